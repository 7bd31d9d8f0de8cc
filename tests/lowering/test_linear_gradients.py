"""What autograd leaves around the gradients of linear layers is left out, where it changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ort_backend.lowering.passes.linear_gradients import simplify_linear_gradients

aten = torch.ops.aten
X, Y = torch.randn(3, 4), torch.randn(4, 5)


def traced(function: Callable[..., object]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(X, Y)


def targets(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_both_are_left_out() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient = aten.mm(x, y)
        total = aten.sum.dim_IntList(gradient, [0], True)
        return aten.t(aten.t(gradient)), aten.view(total, [5])

    module = traced(function)
    assert simplify_linear_gradients(module.graph) == 2
    module.recompile()
    assert aten.view.default not in targets(module)
    for mine, theirs in zip(module(X, Y), function(X, Y), strict=True):
        torch.testing.assert_close(mine, theirs)
    shapes = [node.meta["val"].shape for node in module.graph.nodes if node.target is aten.sum.dim_IntList]
    assert shapes == [torch.Size([5])]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (aten.t(aten.t(x)),),
        lambda x, y: (aten.view(aten.sum.dim_IntList(y, [0], True), [5, 1]),),
        lambda x, y: ((total := aten.sum.dim_IntList(y, [0], True)) + 1, aten.view(total, [5])),
        lambda x, y: (aten.view(aten.sum.dim_IntList(y, [1], False), [4]),),
    ],
    ids=["an argument", "another shape", "read twice", "no dimension kept"],
)
def test_what_stays(function: Callable[..., object]) -> None:
    module = traced(function)
    before = targets(module)
    assert simplify_linear_gradients(module.graph) == 0 and targets(module) == before
