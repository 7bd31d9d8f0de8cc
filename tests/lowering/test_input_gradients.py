"""The gradient of a convolution's input as a convolution of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, randn
from torch.fx.experimental.proxy_tensor import make_fx

import ort_backend
from ort_backend.lowering.passes.input_gradients import split_input_gradients
from ort_backend.target import OrtTarget

aten = torch.ops.aten
CPU = OrtTarget(kernels="onnxruntime")


def _backward(
    channels: tuple[int, int],
    kernel: tuple[int, int] = (3, 3),
    stride: int = 1,
    padding: Any = (1, 1),
    dilation: Any = (1, 1),
    groups: int = 1,
    side: int = 12,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A convolution's backward as a function, and its arguments."""
    input, weight = randn(2, channels[0], side, side, dtype=dtype), randn(channels[1], channels[0] // groups, *kernel, dtype=dtype)
    shared = ([stride, stride], list(padding), list(dilation), False, [0, 0], groups)
    grad_output = torch.randn_like(aten.convolution(input, weight, None, *shared))

    def run(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        found = aten.convolution_backward(grad_output, input, weight, [channels[1]], *shared, list(wanted))
        return [gradient for gradient in found if gradient is not None]

    return run, (grad_output, input, weight)


def _split(function: Any, inputs: tuple[torch.Tensor, ...], target: OrtTarget = CPU) -> int:
    """How many the pass takes; the rewritten graph is compared with the function."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    count = split_input_gradients(traced.graph, target)
    traced.graph.lint()
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)
    kinds = [node.target for node in traced.graph.nodes]
    assert kinds.count(aten.convolution.default) == count
    assert all(node.args[-1][0] is False for node in traced.graph.nodes if count and node.target is aten.convolution_backward.default)
    return count


@pytest.mark.parametrize(
    "settings",
    [
        {"channels": (8, 4)},
        {"channels": (4, 4)},
        {"channels": (6, 3), "kernel": (5, 1), "padding": (0, 0)},
        {"channels": (6, 3), "kernel": (3, 2), "padding": (2, 0), "dilation": (2, 3)},
        {"channels": (6, 3), "padding": (1,), "dilation": (1,)},
        {"channels": (6, 3), "wanted": (True, True, False)},
        {"channels": (6, 3), "wanted": (True, False, False)},
    ],
    ids=["fewer channels", "as many", "a column, no padding", "dilated", "one number for both", "no bias", "a frozen kernel"],
)
def test_the_input_gradient_becomes_a_convolution(settings: dict[str, Any]) -> None:
    assert _split(*_backward(**settings)) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"channels": (4, 8)},
        {"channels": (8, 4), "kernel": (1, 1), "padding": (0, 0)},
        {"channels": (8, 4), "stride": 2},
        {"channels": (8, 4), "padding": (3, 3)},
        {"channels": (8, 4), "groups": 2},
        {"channels": (64, 64), "side": 4},
        {"channels": (8, 4), "wanted": (False, True, True)},
        {"channels": (8, 4), "dtype": torch.float64},
    ],
    ids=["more channels", "1x1", "a stride", "far padding", "groups", "few positions", "not wanted", "float64"],
)
def test_other_backwards_stay(settings: dict[str, Any]) -> None:
    assert _split(*_backward(**settings)) == 0


def test_only_the_training_kernels_of_the_cpu_are_spared() -> None:
    function, inputs = _backward((8, 4))
    assert _split(function, inputs, OrtTarget(provider="CUDAExecutionProvider", kernels="onnxruntime")) == 0
    assert _split(function, inputs, OrtTarget(training=False, kernels="onnxruntime")) == 0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_model_gets_the_same_gradients(dynamic: bool) -> None:
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=2, dilation=2))
    model = nn.Sequential(*layers)
    compiled = torch.compile(model, backend="ort_training", options={"kernels": "onnxruntime"}, dynamic=dynamic)
    for side in (16, 19) if dynamic else (16,):
        input = randn(2, 3, side, side, requires_grad=True)
        parameters = [input, *model.parameters()]
        expected = torch.autograd.grad(model(input).square().sum(), parameters)
        found = torch.autograd.grad(compiled(input).square().sum(), parameters)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ort_backend.report().graphs[-1].outside == ()
