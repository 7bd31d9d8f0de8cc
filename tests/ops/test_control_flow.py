"""torch.cond, while_loop, scan, map: whole, one PythonOp each in the forward and in the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviours.check import single_session
from ops.trained import check_training, needs_grad
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from ort_backend import graph_report

DYNAMIC = pytest.mark.parametrize("dynamic", [False, True])
LIKE_TRAINING = pytest.mark.parametrize("training", [True, False])


def _input(training: bool, *size: int) -> torch.Tensor:
    return torch.randn(*size).requires_grad_(training)


def _others(dynamic: bool, training: bool, *size: int) -> list[Any]:
    return [(_input(training, *size),)] if dynamic else []


@DYNAMIC
@LIKE_TRAINING
def test_cond(training: bool, dynamic: bool) -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * x.shape[0], lambda x: x.relu() - 1, (x,)) * 2

    check_training(branch, _input(training, 4, 6).abs(), dynamic=dynamic, outside=["cond"])
    check_training(branch, -_input(training, 4, 6).abs(), dynamic=dynamic, others=_others(dynamic, training, 5, 7), outside=["cond"])


@DYNAMIC
def test_cond_with_parameters_of_both_branches(dynamic: bool) -> None:
    def branch(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ w, lambda x: (x @ v).tanh(), (x,))

    for x in (torch.ones(4, 6), -torch.ones(4, 6)):
        check_training(branch, x.requires_grad_(), needs_grad(6, 7), needs_grad(6, 7), dynamic=dynamic, outside=["cond"])


def test_cond_of_several_results_and_a_nested_one() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.max() > 1, lambda x: x + 1, lambda x: x * 3, (x,))

    def branch(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cond(x.sum() > 0, lambda x: (inner(x), x.sum()), lambda x: (x * 2, x.mean()), (x,))

    check_training(branch, torch.ones(4, 6).requires_grad_(), outside=["cond"])
    check_training(branch, (torch.ones(4, 6) * 2).requires_grad_(), outside=["cond"])
    check_training(branch, (-torch.ones(4, 6)).requires_grad_(), outside=["cond"])


@DYNAMIC
def test_while_loop(dynamic: bool) -> None:
    def loop(x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (torch.tensor(0), x))

    check_training(loop, torch.randn(4, 6), dynamic=dynamic, others=_others(dynamic, False, 5, 7), outside=["while_loop"])


def test_gradient_of_a_while_loop() -> None:
    def loop(x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (torch.tensor(0), x))[1]

    check_training(loop, needs_grad(4, 6), outside=["while_loop", "while_loop_stack_output"])


@DYNAMIC
@LIKE_TRAINING
def test_scan(training: bool, dynamic: bool) -> None:
    def steps(first: torch.Tensor, rows: torch.Tensor) -> Any:
        return scan(lambda carry, row: (carry * 0.5 + row, (carry + row).clone()), first, rows)

    check_training(steps, _input(training, 3), _input(training, 5, 3), dynamic=dynamic, outside=["scan"])


@LIKE_TRAINING
def test_map(training: bool) -> None:
    check_training(lambda rows: map_over(lambda row: row.sin() * 2, rows), _input(training, 5, 3), outside=["map_impl"])


def test_associative_scan_is_taken_apart() -> None:
    check_training(lambda rows: associative_scan(lambda a, b: a * b, rows, 0, combine_mode="generic"), torch.randn(5, 3))


@single_session
def test_one_node_each_way() -> None:
    torch._dynamo.reset()
    graph_report.clear()
    x = needs_grad(4, 6)
    compiled = torch.compile(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)).exp(), backend="ort_training")
    compiled(x).sum().backward()
    (graph,) = graph_report.report().graphs
    assert {one.operator for one in graph.outside} == {"cond"} and graph.python_ops == 2
    assert graph.onnx_nodes > 4
