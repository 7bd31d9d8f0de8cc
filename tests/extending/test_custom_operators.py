"""Operators that a user brings: `torch.library` operators, and lowerings for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from behaviours.check import refused, single_session

import ort_backend
from ort_backend import LoweringError, graph_report
from ort_backend.lowering import registry
from ort_backend.lowering.registry import Unsupported


@torch.library.custom_op("extending::soft_sign", mutates_args=())
def soft_sign(x: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * x / (1 + x.abs())


@soft_sign.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("extending::soft_sign_backward", mutates_args=())
def soft_sign_backward(gradient: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * gradient / (1 + x.abs()) ** 2


@soft_sign_backward.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    x, ctx.scale = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return soft_sign_backward(gradient, ctx.saved_tensors[0], ctx.scale), None


soft_sign.register_autograd(_backward, setup_context=_save)

OPERATORS = torch.ops.extending


@pytest.fixture
def lowerings() -> Iterator[None]:
    """Takes what a test registers out of the table again."""
    before = registry.registered()
    yield
    for target in set(registry.registered()) - set(before):
        del registry._table[target]


def compare(*, dynamic: bool = False) -> graph_report.GraphReport:
    """Forward and backward through the backend equal eager's; the report on the compiled graph."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return soft_sign(x @ w, 3.0).exp()

    graph_report.clear()
    compiled = torch.compile(function, backend="ort_training", fullgraph=True, dynamic=dynamic)
    for rows in (2, 5) if dynamic else (2,):
        x, w = torch.randn(rows, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        expected, actual = function(x, w), compiled(x, w)
        torch.testing.assert_close(actual, expected)
        tangent = torch.randn_like(expected)
        torch.testing.assert_close(torch.autograd.grad(actual, [x, w], tangent), torch.autograd.grad(expected, [x, w], tangent))
    (graph,) = ort_backend.report().graphs
    return graph


def register_both() -> None:
    """A lowering for the operator, and one for its gradient."""

    @ort_backend.register_lowering(OPERATORS.soft_sign.default)
    def _(op: Any, x: Any, scale: float) -> Any:
        """extending::soft_sign(Tensor x, float scale) -> Tensor"""
        return op.Mul(op.Softsign(x), op.CastLike(scale, x))

    @ort_backend.register_lowering(OPERATORS.soft_sign_backward.default)
    def _(op: Any, gradient: Any, x: Any, scale: float) -> Any:
        """extending::soft_sign_backward(Tensor gradient, Tensor x, float scale) -> Tensor"""
        denominator = op.Add(op.Abs(x), op.CastLike(1.0, x))
        return op.Div(op.Mul(gradient, op.CastLike(scale, x)), op.Mul(denominator, denominator))


@single_session
def test_a_custom_operator_runs_as_python_op_without_being_asked_for() -> None:
    graph = compare()
    assert sorted(one.operator for one in graph.outside) == ["extending::soft_sign", "extending::soft_sign_backward"]
    assert graph.onnx_nodes > graph.python_ops == 2


def test_a_custom_operator_runs_on_onnx_runtime_once_it_has_a_lowering(lowerings: None) -> None:
    register_both()
    assert compare().python_ops == 0


def test_a_lowering_serves_symbolic_sizes(lowerings: None) -> None:
    register_both()
    assert compare(dynamic=True).python_ops == 0


def test_a_lowering_that_declines_leaves_the_operator_to_pytorch(lowerings: None) -> None:
    @ort_backend.register_lowering(OPERATORS.soft_sign.default)
    def _(op: Any, x: Any, scale: float) -> Any:
        """extending::soft_sign(Tensor x, float scale) -> Tensor"""
        op.Softsign(x)
        raise Unsupported("a scale is not expressible")

    graph = compare()
    assert {one.operator: one.reason for one in graph.outside}["extending::soft_sign"] == "a scale is not expressible"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda op, x: op.Softsign(x), "failed: TypeError: .* takes 2 positional arguments but 3 were given"),
        (lambda op, x, scale: x.no_such, "failed: AttributeError"),
        (lambda op, x, scale: None, "returned NoneType instead of a value of the graph"),
        (lambda op, x, scale: [op.Softsign(x)], "returned list instead of a value of the graph"),
        (lambda op, x, scale: op.ReduceSum(x), r"returned a value of shape \[1,1\] instead of \[2,3\]"),
        (lambda op, x, scale: 3.0, r"returned a value of shape \[\] instead of \[2,3\]"),
    ],
    ids=["arguments", "raises", "nothing", "list", "shape", "number"],
)
def test_a_faulty_lowering_is_an_error_that_names_it(body: Any, said: str, lowerings: None) -> None:
    ort_backend.register_lowering(OPERATORS.soft_sign.default)(body)
    message = rf"(?s)the lowering .*test_custom_operators.py:\d+\) of extending::soft_sign {said}.*soft_sign\(x @ w"
    with refused(ort_backend.OrtBackendError, message):
        compare()


def test_a_lowering_of_too_few_results(lowerings: None) -> None:
    library = torch.library.Library("extending_thirds", "FRAGMENT")
    library.define("parts(Tensor x) -> (Tensor, Tensor)")
    library.impl("parts", lambda x: (x * 0.5, x - x * 0.5), "CompositeExplicitAutograd")
    ort_backend.register_lowering(torch.ops.extending_thirds.parts.default)(lambda op, x: op.Neg(x))
    with refused(ort_backend.OrtBackendError, "of extending_thirds::parts returned 1 results instead of 2"):
        torch.compile(torch.ops.extending_thirds.parts, backend="ort_training")(torch.randn(3))


def test_strict_asks_for_a_lowering() -> None:
    compiled = torch.compile(lambda x: soft_sign(x, 1.0), backend="ort_training", options={"strict": True})
    with pytest.raises(Exception, match="extending::soft_sign does not run on ONNX Runtime") as caught:
        compiled(torch.randn(3))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), LoweringError)


def test_a_lowering_of_several_results(lowerings: None) -> None:
    library = torch.library.Library("extending_pairs", "FRAGMENT")
    library.define("halves(Tensor x) -> (Tensor, Tensor)")
    library.impl("halves", lambda x: (x * 0.5, x - x * 0.5), "CompositeExplicitAutograd")

    @ort_backend.register_lowering(torch.ops.extending_pairs.halves.default)
    def _(op: Any, x: Any) -> Any:
        """extending_pairs::halves(Tensor x) -> (Tensor, Tensor)"""
        half = op.Mul(x, op.CastLike(0.5, x))
        return half, op.Sub(x, half)

    graph_report.clear()
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(torch.ops.extending_pairs.halves, backend="ort_training")(x), (x * 0.5, x - x * 0.5))
    assert ort_backend.report().graphs[0].python_ops == 0
