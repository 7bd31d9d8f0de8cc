"""Gradients of the parts of a tensor, side by side instead of filled up with zeros and added."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import seeded
from ops.harness import trace
from torch import Tensor, nn

from ort_backend import regions
from ort_backend.lowering import simplify
from ort_backend.lowering.passes.gathered_parts import gather_parts
from ort_backend.runtime import capabilities

aten = torch.ops.aten

X = torch.randn(3, 4, 6, generator=seeded(0))


@pytest.fixture(name="gathered")
def _gathered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tensors' parts were gathered, for each graph."""
    module: Any = simplify if capabilities.has_training() else regions
    found, gather = list[int](), module.gather_parts

    def counted(graph: Any) -> int:
        found.append(gather(graph))
        return found[-1]

    monkeypatch.setattr(module, "gather_parts", counted)
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield found
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def _all(x: Tensor) -> Tensor:
    a, b, c = x[0], x[1], x[2]
    return a.exp() * b + c.sin()


def _halves(x: Tensor) -> Tensor:
    return x[..., :3].tanh() * x[..., 3:].sigmoid()


def _from_the_end(x: Tensor) -> Tensor:
    return x[..., -2:].sum(2) * x[..., :-2].square().sum(2)


def _one_of_them_twice(x: Tensor) -> Tensor:
    return x[0].exp() * x[1] + x[0].sin() * x[2]


def _the_whole_as_well(x: Tensor) -> Tensor:
    return x[0].exp() * x[1] * x[2] + x.square().sum(0)


def _places_and_a_slice(x: Tensor) -> Tensor:
    return x[:, 0].exp() * x[:, 1] + x[:, 2:].sin().sum(1)


def _two_dimensions(x: Tensor) -> Tensor:
    return _halves(x).sum() + _all(x).sum()


def _many(x: Tensor) -> Tensor:
    x = torch.cat([x.flatten()] * 4)
    total = x[0]
    for i in range(1, 288):
        total = total * 0.9 + x[i]
    return total


def _not_the_first(x: Tensor) -> Tensor:
    return x[1].exp() * x[2]


def _two_runs(x: Tensor) -> Tensor:
    return x[..., 0].exp() * x[..., 1] + x[..., 3:5].sin().sum(2) * x[..., 5] + x.sum(2)


def _a_gap(x: Tensor) -> Tensor:
    return x[0].exp() * x[2]


def _nested(x: Tensor) -> Tensor:
    return x[..., :4].exp().sum() + x[..., :2].sin().sum()


def _overlapping(x: Tensor) -> Tensor:
    return x[..., :4].exp().sum() + x[..., 2:].sin().sum()


def _every_other(x: Tensor) -> Tensor:
    return x[..., ::2].exp() * x[..., 1::2]


@pytest.mark.parametrize(
    "function, count",
    [
        (_all, 1), (_halves, 1), (_from_the_end, 1), (_one_of_them_twice, 1), (_the_whole_as_well, 1), (_places_and_a_slice, 1), (_two_dimensions, 1),
        (_not_the_first, 1), (_two_runs, 1), (_a_gap, 0), (_overlapping, 0), (_nested, 0), (_every_other, 0),
    ],
)  # fmt: skip
def test_the_gradients_are_eager_s(function: Callable[[Tensor], Tensor], count: int, gathered: list[int]) -> None:
    same_as_eager(Net(function), call(X), graphs=1)
    assert sum(gathered) == count


def test_parts_by_the_hundred(gathered: list[int]) -> None:
    """Of an unrolled recurrence; each gradient was filled up to the size of all of them."""
    same_as_eager(Net(_many), call(X), graphs=1, python_ops=None, atol=1e-4)
    assert sum(gathered) == 1


@pytest.mark.parametrize("size, count", [(2, 1), (3, 1)])
def test_a_sum_that_is_read_twice_is_one_by_itself(size: int, count: int) -> None:
    def add(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third = (aten.select_backward(one, [size, 4], 0, place) for one, place in ((a, 0), (b, 1), (c, size - 1)))
        both = first + second
        return both.exp(), both + third

    tensors = [torch.randn(4, generator=seeded(i)) for i in range(3)]
    traced = trace(add, tensors)
    expected = traced(*tensors)
    assert gather_parts(traced.graph) == count
    traced.recompile()
    torch.testing.assert_close(traced(*tensors), expected)


@pytest.mark.parametrize("function", [_halves, _two_runs])
def test_sizes_that_change(function: Callable[[Tensor], Tensor], gathered: list[int]) -> None:
    net = Net(function)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="ort_training", dynamic=True)
    for rows in (3, 5, 2):
        x = torch.randn(rows, 4, 6, generator=seeded(rows))
        expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        torch.testing.assert_close(torch.autograd.grad(compiled(x).square().sum(), list(net.parameters())), expected)
    assert sum(gathered) == 1
