"""Activations that are written out become one operator, however they are written; what is something else stays what it is."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import ON_CPU, seeded
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ort_backend.lowering.passes.written_activations import fold_activations

Function = Callable[..., Any]

X = 3 * torch.randn(5, 7, generator=seeded(0))


def _of_transformers(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _factored(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _with_its_distribution(x: Tensor) -> Tensor:
    return x * (0.5 * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))))


def _by_the_error_function(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _by_methods(x: Tensor) -> Tensor:
    return x.mul((x * 0.5**0.5).erf().add(1).div(2))


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _of_clip(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.sigmoid(x) * x


def _compiled(function: Function, *args: Tensor, dynamic: bool | None = False) -> tuple[list[fx.Node], Any]:
    """The calls in Dynamo's graph behind the pass, and what the graph gives."""
    found: list[fx.Node] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        fold_activations(gm)
        found.extend(
            node for module in gm.modules() if isinstance(module, fx.GraphModule) for node in module.graph.nodes if node.op.startswith("call")
        )
        return gm.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    return found, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "made", "approximate"),
    [
        (_of_transformers, F.gelu, "tanh"),
        (_factored, F.gelu, "tanh"),
        (_with_its_distribution, F.gelu, "tanh"),
        (_by_the_error_function, F.gelu, None),
        (_by_methods, F.gelu, None),
        (_swish, F.silu, None),
        (Swish(), F.silu, None),
    ],
)
def test_one_operator(function: Function, made: Function, approximate: str | None, dynamic: bool, dtype: torch.dtype) -> None:
    x = X.to(dtype)
    nodes, result = _compiled(function, x, dynamic=dynamic)
    (node,) = [one for one in nodes if isinstance(one.meta["example_value"], Tensor)]  # Dynamo leaves the numbers, which nothing reads
    assert node.target is made and node.kwargs.get("approximate") == approximate
    torch.testing.assert_close(result, function(x.double()).to(dtype))  # written out in bfloat16 it is rounded eight times


def test_a_silu_of_a_product() -> None:
    nodes, result = _compiled(_of_clip, X)
    assert [node.target for node in nodes] == [operator.mul, F.silu, operator.truediv]
    assert len({node.meta["stack_trace"] for node in nodes}) == 1 and "torch.sigmoid(1.702 * x)" in nodes[0].meta["stack_trace"]
    torch.testing.assert_close(result, _of_clip(X))


def _of_itself_behind(x: Tensor) -> Tensor:
    return _swish(2 * x) * 3 + x


def _inside_a_checkpoint(x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(_of_transformers, x, use_reentrant=False)


@pytest.mark.parametrize(("function", "made"), [(_of_itself_behind, F.silu), (_inside_a_checkpoint, F.gelu)])
def test_among_others(function: Function, made: Function) -> None:
    nodes, result = _compiled(function, X)
    assert made in [node.target for node in nodes] and not {torch.tanh, torch.sigmoid} & {node.target for node in nodes}
    torch.testing.assert_close(result, function(X))


def _with_another_constant(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x**3)))


def _quicker(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x)


def _gated(x: Tensor) -> Tensor:
    return x[:, :3] * torch.sigmoid(x[:, 3:6])


def _by_a_tensor(x: Tensor) -> Tensor:
    return x * torch.erf(x / torch.tensor(2.0).sqrt()).add(1).div(2)


def _with_a_gate_that_is_read(x: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(x)
    return x * gate, gate


def _of_what_is_written_to(x: Tensor) -> Tensor:
    x = x.clone()
    gate = torch.sigmoid(x)
    x.zero_()
    return x * gate


def _of_roots(x: Tensor) -> Tensor:
    return torch.tanh(x**0.5) * x


def _by_a_sum_of_two(x: Tensor) -> Tensor:
    return torch.mul(torch.sigmoid(torch.add(x, x, alpha=-0.5)), x)


def _in_float64(x: Tensor) -> Tensor:
    return _factored(x.double())


@pytest.mark.parametrize(
    "function",
    [
        _with_another_constant,
        _quicker,
        _gated,
        _by_a_tensor,
        _with_a_gate_that_is_read,
        _of_what_is_written_to,
        _of_roots,
        _by_a_sum_of_two,
        _in_float64,  # whose constant has ten digits
        torch.sigmoid,
        lambda x: x * torch.tanh(x),
    ],
)
def test_what_is_something_else_stays(function: Function) -> None:
    nodes, result = _compiled(function, X)
    assert not {F.gelu, F.silu} & {node.target for node in nodes}
    torch.testing.assert_close(result, function(X), equal_nan=True, rtol=0, atol=0)


def _typed(function: Function, before: torch.dtype, behind: torch.dtype) -> fx.GraphModule:
    """The graph behind the pass, with dtypes of its argument and of all results as Dynamo would note them."""
    gm = fx.symbolic_trace(function)
    for node in gm.graph.nodes:
        node.meta["example_value"] = torch.empty(5, 7, dtype=before if node.op == "placeholder" else behind)
    fold_activations(gm)
    return gm


def test_what_autocast_widens_is_computed_so() -> None:
    """As on CUDA, where it computes powers in float32: the result is of another dtype than the argument."""
    gm = _typed(_of_transformers, torch.bfloat16, torch.float32)
    assert [node.target for node in gm.graph.nodes if node.op.startswith("call")] == ["to", F.gelu]
    x = X.bfloat16()
    assert gm(x).dtype is torch.float32
    torch.testing.assert_close(gm(x), _of_transformers(x.float()))


@pytest.mark.parametrize(("before", "behind"), [(torch.float32, torch.bfloat16), (torch.int64, torch.float32), (torch.float32, torch.float64)])
def test_other_dtypes_stay(before: torch.dtype, behind: torch.dtype) -> None:
    assert torch.tanh in [node.target for node in _typed(_of_transformers, before, behind).graph.nodes]


class Perceptron(nn.Module):
    def __init__(self, activation: Function) -> None:
        super().__init__()
        self.wide, self.narrow, self.activation = nn.Linear(64, 256), nn.Linear(256, 64), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.activation(self.wide(x)))


@pytest.mark.parametrize("activation", [_of_transformers, _by_the_error_function, _swish, _of_clip])
def test_the_gradients_hold_and_the_argument_alone_is_kept(activation: Function) -> None:
    x = torch.randn(4096, 64, generator=seeded(0)).requires_grad_()
    ran = same_as_eager(Perceptron(activation), call(x), graphs=1, python_ops=None, atol=1e-4)
    if ON_CPU:  # on a device nothing is computed again unasked
        assert ran.graphs[0].kept_bytes == 4096 * 256 * 4


def test_a_number_that_is_an_input_has_a_guard() -> None:
    """With `dynamic=True` what a module holds is one."""

    class Scaled(nn.Module):
        scale = 0.5**0.5

        def forward(self, x: Tensor) -> Tensor:
            return x * 0.5 * (1 + torch.erf(x * self.scale))

    module, x = Scaled(), X.clone().requires_grad_()
    same_as_eager(module, call(x), graphs=1, dynamic=True)
    nodes, _ = _compiled(module, X, dynamic=True)
    assert F.gelu in [node.target for node in nodes]
    module.scale = 2.0
    same_as_eager(module, call(x), graphs=1, dynamic=True)

    runner = torch.compile(module, backend="ort_training", dynamic=True)
    for module.scale in (0.5**0.5, 2.0, 0.5**0.5):
        torch.testing.assert_close(runner(X), module(X))
