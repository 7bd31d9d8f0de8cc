"""Graphs for CUDA, whose normalizations have tensors in half precision inside, run by the CPU's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from ort_backend.lowering.lowered import NotOnOrt
from ort_backend.runtime import capabilities

pytestmark = pytest.mark.cpu_only(reason="its kernels stand for those of a device")

aten = torch.ops.aten
Lower = Callable[..., Callable[..., list[torch.Tensor]]]


@pytest.fixture(autouse=True)
def _for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), provider="CUDAExecutionProvider", contrib_ops=frozenset())
    monkeypatch.setattr(capabilities, "target", lambda *_: target)


def _same(lower: Lower, function: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor) -> None:
    found, exact = lower(function, inputs)(*inputs), function(*(one.float() for one in inputs))
    for one, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(one.float().reshape(wanted.shape), wanted, rtol=3e-3, atol=3e-3)


def test_batch_norm(lower: Lower) -> None:
    """Far from zero: a mean in half precision would be off by more than the result may be."""

    def both(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, save_mean, invstd, *running = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, 0.1, 1e-5)
        statistics = mean, var, save_mean.float(), invstd.float()
        return out, *running, *aten.native_batch_norm_backward(g, x, w, *statistics, True, 1e-5, [True, True, True])

    _same(lower, both, torch.randn(4, 3, 5).half(), (torch.randn(4, 3, 5) + 4).half(), torch.rand(3), torch.randn(3), torch.randn(3), torch.rand(3))


def test_batch_norm_of_running_statistics(lower: Lower) -> None:
    def call(x: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (aten._native_batch_norm_legit_no_training(x, None, b, mean, var, 0.1, 1e-5)[0],)

    _same(lower, call, torch.randn(4, 3, 5).half(), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5)


@pytest.mark.parametrize("has_weight", [True, False])
def test_layer_norm(lower: Lower, has_weight: bool) -> None:
    def both(g: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, bias = weights or (None, None)
        out, mean, rstd = aten.native_layer_norm(x, [6], weight, bias, 1e-5)
        return out, *aten.native_layer_norm_backward(g, x, [6], mean, rstd, weight, bias, [True, has_weight, has_weight])

    def only(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one for one in both(*inputs) if one is not None)

    _same(lower, only, *(torch.randn(*size).half() for size in ((4, 6), (4, 6), *[(6,)] * (2 * has_weight))))


@pytest.mark.parametrize("size", [7, 1 << 14])
def test_group_norm(lower: Lower, size: int) -> None:
    if size == 7 and capabilities.has_training():
        pytest.skip("1.19 gives a LayerNormalization that it puts casts around on the CPU statistics of another dtype")

    def both(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, mean, rstd = aten.native_group_norm(x, w, b, 2, 4, size, 2, 1e-5)
        grads = aten.native_group_norm_backward(g, x, mean, rstd, w, 2, 4, size, 2, [True, True, True])
        return out, grads[0], *(one / size for one in grads[1:])

    _same(lower, both, *(torch.randn(*one).half() for one in ((2, 4, size), (2, 4, size), (4,), (4,))))


def test_dtypes_that_pytorch_does_not_take_together(lower: Lower) -> None:
    """Its kernel says so, and not ONNX Runtime about a graph."""
    inputs = torch.randn(4, 6).half(), torch.randn(6)
    with pytest.raises(NotOnOrt, match="no LayerNormalization kernel"):
        lower(lambda x, w: aten.native_layer_norm(x, [6], w, None, 1e-5)[0], inputs)
