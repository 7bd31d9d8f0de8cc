"""Sums of many numbers are made in two steps, as precise as eager's, and numbers beside columns have their rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import call, same_as_eager
from ops.harness import check, lower, trace

import ort_backend

_SUMS = ("ReduceSum", "ReduceMean", "ReduceSumSquare", "MatMul")  # a product with a row of ones is the sum of columns


def _reductions(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> int:
    return sum(node.op_type in _SUMS for node in lower(trace(function, inputs, dynamic=dynamic)).model.graph)


CASES: list[tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = [
    (lambda x: x.sum(), (1 << 22,)),
    (lambda x: x.mean(), (4, 3, 512, 512)),
    (lambda x: x.sum(0), (1 << 18, 8)),
    (lambda x: x.mean(0), (1 << 20, 3)),
    (lambda x: x.sum((0, 1), keepdim=True), (64, 4096, 5)),
    (lambda x: x.mean((2, 3)), (2, 3, 1024, 512)),
    (lambda x: x.sum(1), (2, 1 << 16, 16)),
    (lambda x: x.var((0, 2, 3)), (4, 3, 512, 256)),
    (lambda x: x.std(), (1 << 20,)),
    (lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), (8, 2, 256, 256)),
    (lambda x: torch.nn.functional.group_norm(x, 2), (2, 4, 256, 256)),
    (lambda x: torch.nn.functional.instance_norm(x), (2, 2, 256, 256)),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_as_precise_as_eager(number: int) -> None:
    function, shape = CASES[number]
    torch.manual_seed(number)
    x = torch.rand(shape) + 0.5
    exact = function(x.double())
    torch._dynamo.reset()
    found = torch.compile(function, backend="ort_training", options={"kernels": "onnxruntime"})(x)
    assert not ort_backend.report().graphs[-1].outside
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "function, shape, steps",
    [
        (lambda x: x.sum(), (1 << 16,), 2),
        (lambda x: x.sum(), (1 << 14,), 1),
        (lambda x: x.sum(0), (1024, 64), 2),
        (lambda x: x.sum(0), (1021, 64), 1),  # a prime
        (lambda x: x.sum(-1), (1024, 64), 1),
        (lambda x: x.sum((0, 2, 3)), (4, 8, 16, 16), 1),
        (lambda x: x.sum((0, 2, 3)), (4, 8, 256, 256), 3),
        (lambda x: x.long().sum(), (1 << 16,), 1),
    ],
)
def test_which_sums_are_split(function: Callable[..., Any], shape: tuple[int, ...], steps: int) -> None:
    assert _reductions(function, torch.rand(shape)) == steps


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (1, 2), (0, 2), (0, 1, 2), (-1,)], ids=str)
def test_shapes(dims: tuple[int, ...], keepdim: bool) -> None:
    for shape in ((1024, 2, 3), (2, 1024, 3), (3, 2, 40000), (2048, 48, 1)):
        check(lambda x: (x.sum(dims, keepdim), x.mean(dims, keepdim), x.var(dims, keepdim=keepdim)), torch.rand(shape))


@pytest.mark.parametrize("dims", [(0,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_symbolic_sizes(dims: tuple[int, ...]) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(dims), x.flatten(0, 1).mean(0), x.flatten(1).sum(1)

    given, other = torch.rand(8, 512, 32), torch.rand(3, 700, 32)
    torch._dynamo.mark_dynamic(given, 0)
    compiled = torch.compile(both, backend="ort_training", fullgraph=True)
    for x in (given, torch.rand(5, 512, 32), other):
        torch.testing.assert_close(compiled(x), both(x), rtol=1e-5, atol=1e-4)


def test_gradients_of_many_rows() -> None:
    """Of a bias, for example: a sum over all rows."""

    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias).square().mean()

    inputs = (torch.rand(1 << 16, 8), torch.rand(4, 8).requires_grad_(), torch.rand(4).requires_grad_())
    same_as_eager(step, call(*inputs), graphs=1, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_numbers_beside_columns_have_their_rank(dynamic: bool) -> None:
    def function(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean = x.mean(-1, keepdim=True)
        return (mean + 1) * 2.5 * scale, torch.where(mean > 0.5, scale, mean), mean > 0.25

    lowered = check(
        function, torch.rand(8192, 4), torch.tensor(3.0), dynamic=dynamic, other=[torch.rand(5000, 4), torch.tensor(2.0)] if dynamic else None
    )
    for node in lowered.model.graph:
        if node.op_type in ("Add", "Mul", "Where", "Greater"):
            assert {len(value.shape) for value in node.inputs} == {2}, node  # type: ignore[arg-type, union-attr]


def test_numbers_beside_other_tensors_stay_scalars() -> None:
    lowered = check(lambda x: (x + 1.5, x.mean(-1, keepdim=True)[:8] + 2.5), torch.rand(8192, 4))
    shapes = [len(node.inputs[1].shape) for node in lowered.model.graph if node.op_type == "Add"]  # type: ignore[arg-type, union-attr]
    assert shapes == [0, 0]
