"""Activations and softmax against eager, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import randn
from torch.nn import functional as F

aten = torch.ops.aten
contrib = pytest.mark.parametrize("contrib", [True, False], ids=["fused", "plain"])

# (operator, further arguments): the first takes x, the second (gradient, x)
FORWARD = [
    (aten.relu, (), {}),
    (aten.gelu, (), {}),
    (aten.gelu, (), {"approximate": "tanh"}),
    (aten.silu, (), {}),
    (aten.sigmoid, (), {}),
    (aten.tanh, (), {}),
    (aten.leaky_relu, (0.1,), {}),
    (aten.leaky_relu, (0.0,), {}),
    (aten.leaky_relu, (1.7,), {}),
    (aten.leaky_relu, (-0.4,), {}),
    (aten.softshrink, (0.7,), {}),
    (aten.hardshrink, (0.7,), {}),
    (aten.hardtanh, (0, 6), {}),
    (aten.hardtanh, (), {}),
    (aten.hardsigmoid, (), {}),
    (aten.hardswish, (), {}),
    (aten.elu, (1.5, 1.1, 0.9), {}),
    (aten.softplus, (2, 5), {}),
    (aten.softplus, (), {}),
    (aten.glu, (-1,), {}),
    (aten.mish, (), {}),
    (aten.log_sigmoid_forward, (), {}),
    (aten.celu, (1.3,), {}),
]
BACKWARD = [
    (aten.threshold_backward, (0,), {}),
    (aten.gelu_backward, (), {}),
    (aten.gelu_backward, (), {"approximate": "tanh"}),
    (aten.silu_backward, (), {}),
    (aten.sigmoid_backward, (), {}),
    (aten.tanh_backward, (), {}),
    (aten.leaky_relu_backward, (0.1, False), {}),
    (aten.hardtanh_backward, (0, 6), {}),
    (aten.hardsigmoid_backward, (), {}),
    (aten.hardswish_backward, (), {}),
    (aten.softplus_backward, (2, 5), {}),
    (aten.softplus_backward, (1, 20), {}),
    (aten.mish_backward, (), {}),
]


def _sample() -> torch.Tensor:
    x = 4 * randn(4, 6)
    x[0] = torch.tensor([0.0, 3.0, -3.0, 6.0, -1.0, 1.0])  # where pieces meet
    x[1] = torch.tensor([-100.0, 100.0, -30.0, 30.0, 20.0, -20.0])
    return x


def _name(value: Any) -> str:
    return str(value).removeprefix("aten.")


@contrib
@pytest.mark.parametrize("target, args, kwargs", FORWARD, ids=_name)
def test_forward(check: Callable, contrib: bool, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check(lambda x: target(x, *args, **kwargs), _sample(), also=(randn(3, 6),), contrib=contrib)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_in_float64(approximate: str) -> None:
    """ONNX Runtime's FastGelu has constants of float32."""
    x = torch.linspace(-6, 6, 1000, dtype=torch.float64).requires_grad_()
    gelu = torch.compile(lambda x: F.gelu(x, approximate=approximate), backend="ort_training")
    (got,), (want,) = (torch.autograd.grad(function(x).sum(), x) for function in (gelu, lambda x: F.gelu(x, approximate=approximate)))
    torch.testing.assert_close(gelu(x), F.gelu(x, approximate=approximate), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@contrib
@pytest.mark.parametrize("target, args, kwargs", BACKWARD, ids=_name)
def test_backward(check: Callable, contrib: bool, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = _sample() if target not in (aten.sigmoid_backward, aten.tanh_backward) else randn(4, 6)
    check(lambda g, x: target(g, x, *args, **kwargs), randn(4, 6), x, also=(randn(3, 6), randn(3, 6)), contrib=contrib)


@contrib
@pytest.mark.parametrize("target", [aten.silu_backward, aten.sigmoid_backward, aten.tanh_backward], ids=_name)
def test_a_gradient_that_broadcasts(check: Callable, contrib: bool, target: Any) -> None:
    """As `torch.vmap` makes them: ONNX Runtime's gradient kernels wrote a tensor of the gradient's own size."""
    check(lambda g, x: target(g, x), randn(6), randn(4, 6), also=(randn(6), randn(3, 6)), contrib=contrib)
    check(lambda g, x: target(g, x), randn(4, 1), randn(4, 6), also=(randn(3, 1), randn(3, 6)), contrib=contrib)


@pytest.mark.parametrize("is_result", [False, True])
def test_elu_backward(check: Callable, is_result: bool) -> None:
    x = aten.elu(_sample(), 1.5, 1.1, 0.9) if is_result else _sample()
    check(lambda g, x: aten.elu_backward(g, 1.5, 1.1, 0.9, is_result, x), randn(4, 6), x, also=(randn(3, 6), randn(3, 6)))


def test_glu_and_prelu(check: Callable) -> None:
    check(lambda g, x: aten.glu_backward(g, x, -1), randn(4, 3), randn(4, 6), also=(randn(2, 3), randn(2, 6)))
    check(lambda x: aten.glu(x, 0), randn(0, 6))
    check(lambda g, x: aten.glu_backward(g, x, 0), randn(0, 6), randn(0, 6))
    check(lambda x, w: aten._prelu_kernel(x, w), randn(4, 6), randn(1, 6), also=(randn(2, 6), randn(1, 6)))


@pytest.mark.parametrize("contrib", [True, False], ids=["step", "plain"])
def test_prelu_backward_does_not_branch_on_the_data(check: Callable, contrib: bool) -> None:
    """ONNX Runtime's Where waits for each element's sign: it took half of a step of ConvTasNet."""
    x = _sample()
    weight = torch.linspace(-1.5, 2.0, x.shape[-1])[None]
    lowered = check(lambda g, x, w: aten._prelu_kernel_backward(g, x, w), torch.rand_like(x) - 0.5, x, weight, contrib=contrib)
    assert "Where" not in lowered.op_types
    check(lambda g, x, w: aten._prelu_kernel_backward(g, x, w), torch.rand_like(x) - 0.5, x, 1e8 * weight, contrib=contrib)
    check(lambda g, x, w: aten._prelu_kernel_backward(g, x, w), randn(4, 6), randn(4, 6), randn(1, 6), also=(randn(2, 6), randn(2, 6), randn(1, 6)))


def test_shrinks(check: Callable) -> None:
    """With fixed sizes: PyTorch cannot trace their backwards with symbolic ones."""
    check(lambda g, x: (aten.hardshrink_backward(g, x, 0.5), aten.softshrink_backward(g, x, 0.5)), randn(4, 6), randn(4, 6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(check: Callable, dtype: torch.dtype) -> None:
    def several(g: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        g, x = g.to(dtype), x.to(dtype)
        results = [aten.silu_backward(g, x), aten.leaky_relu(x, 0.1), aten.threshold_backward(g, x, 0)]
        if dtype != torch.float64:  # Erf has no float64 kernel
            results += [aten.gelu(x), aten.gelu_backward(g, x)]
        return [result.float() for result in results]

    tolerance = 1e-5 if dtype == torch.float64 else 1e-2
    check(several, randn(4, 6), randn(4, 6), rtol=tolerance, atol=tolerance)


@contrib
@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_softmax(check: Callable, contrib: bool, dim: int) -> None:
    x, g, also = randn(4, 5, 6), randn(4, 5, 6), (randn(3, 5, 6), randn(3, 5, 6))
    check(lambda x: (aten._softmax(x, dim, False), aten._log_softmax(x, dim, False)), x, also=also[:1], contrib=contrib)
    check(lambda g, x: aten._softmax_backward_data(g, x.softmax(dim), dim, torch.float32), g, x, also=also, contrib=contrib)
    check(lambda g, x: aten._log_softmax_backward_data(g, x.log_softmax(dim), dim, torch.float32), g, x, also=also, contrib=contrib)


def test_softmax_of_a_number_and_of_half_types(check: Callable) -> None:
    check(lambda x: (aten._softmax(x, 0, False), aten._log_softmax(x, 0, False)), randn(()))
    check(lambda x: aten._safe_softmax(x, -1, torch.float32), randn(3, 4).half(), atol=1e-3)


def test_safe_softmax_of_rows_without_a_finite_entry(check: Callable) -> None:
    x = randn(4, 5)
    x[0], x[1, 2], x[2, 1] = -torch.inf, -torch.inf, torch.nan
    check(lambda x: aten._safe_softmax(x, -1), x, also=(randn(2, 5),))


@contrib
@pytest.mark.parametrize("scale", [1 / 0.9, 1.0, 0.0])
def test_dropout_backward(check: Callable, contrib: bool, scale: float) -> None:
    mask = torch.rand(4, 5) > 0.5
    check(lambda g, mask: aten.native_dropout_backward(g, mask, scale), randn(4, 5), mask, also=(randn(3, 5), mask[:3]), contrib=contrib)
    check(lambda g, mask: aten.native_dropout_backward(g, mask, scale), randn(4, 5).double(), mask, contrib=contrib)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.leaky_relu(x, 0.2),
        F.softshrink,
        F.hardshrink,
        F.celu,
        F.logsigmoid,
        torch.frac,
        torch.trunc,
        lambda x: F.smooth_l1_loss(x, x.flip(0), beta=0.5),
        lambda x: F.huber_loss(x, x.flip(0), delta=2.0),
    ],
    ids=["leaky_relu", "softshrink", "hardshrink", "celu", "logsigmoid", "frac", "trunc", "smooth_l1", "huber"],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_no_branch_on_the_data(function: Callable[[torch.Tensor], torch.Tensor], dynamic: bool, tmp_path: Path) -> None:
    """Where, LeakyRelu and their like take nanoseconds for each element whose sign changes, arithmetic a tenth of one."""
    options = {"dump_dir": str(tmp_path), "kernels": "onnxruntime"}
    one, other = _sample().requires_grad_(), _sample().requires_grad_()
    other.data.copy_(one.data)
    function(one).mean().backward()
    torch.compile(lambda x: function(x).mean(), backend="ort_training", options=options, dynamic=dynamic, fullgraph=True)(other).backward()
    torch.testing.assert_close(other.grad, one.grad)
    kinds = {node.op_type for path in tmp_path.glob("*.onnx") for node in onnx.load(path).graph.node}
    assert kinds and not kinds & {"Where", "LeakyRelu", "PRelu", "Elu", "Celu", "Shrink", "ThresholdedRelu"}
