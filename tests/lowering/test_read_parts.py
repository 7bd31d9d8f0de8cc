"""Parts that are read of what parts were written to: where they come from, and that the numbers stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import seeded
from functorch.compile import aot_function, default_partition, nop
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ort_backend.lowering.passes.read_parts import read_parts

aten = torch.ops.aten

ROWS, COLUMNS = 6, 8
X = torch.randn(ROWS, COLUMNS, generator=seeded(0))


def _filled(x: Tensor) -> Tensor:
    y = torch.zeros(ROWS, COLUMNS)
    for i in range(ROWS):
        y[i] = x[i].tanh() if i == 0 else (x[i] + y[i - 1]).tanh()
    return y


def _in_pairs(x: Tensor) -> Tensor:
    y = x * 3
    for i in range(0, ROWS, 2):
        y[i : i + 2, 1:5] = x[i : i + 2, 2:6].sin()
    return y


def _every_other(x: Tensor) -> Tensor:
    y = torch.empty(ROWS, COLUMNS)
    y[:, ::2] = x[:, 1::2] * 2
    y[:, 1::2] = y[:, ::2] + x[:, ::2]
    return y[:, 1::2].exp()


def _last_one(x: Tensor) -> Tensor:
    y = x * 2
    y[-1] = x[0]
    y[:-1] *= 3
    return y[-1] + y[-2]


def _whole(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0:COLUMNS] = x.sin()
    return y


def _cast(x: Tensor) -> Tensor:
    y = x * 2
    y[2:4] = x[2:4].double().exp()
    y[4:] = x[0]
    return y[2:4] * y[4:]


def _returned(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.zeros(ROWS, COLUMNS)
    y[1:3] = x[1:3]
    return y, y[1:3]


PROGRAMS = [_filled, _in_pairs, _every_other, _last_one, _whole, _cast, _returned]


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(COLUMNS, COLUMNS), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


@pytest.mark.parametrize("program", PROGRAMS)
def test_equals_eager(program: Callable[[Tensor], Any]) -> None:
    same_as_eager(Net(program), call(X), graphs=1, python_ops=None)


def _checked(program: Callable[[Tensor], Any]) -> torch.fx.Graph:
    """The joint graph of a program after the pass, which changes no number."""
    found = list[torch.fx.Graph]()

    def check(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            placeholders = joint.graph.find_nodes(op="placeholder")
            first, *rest = (torch.randn(node.meta["val"].shape, dtype=torch.float64, generator=seeded(i)) for i, node in enumerate(placeholders))
            expected = torch.utils._pytree.tree_leaves(joint([first], rest))
        read_parts(joint.graph)
        joint.graph.lint()
        joint.recompile()
        with unset_fake_temporarily():
            torch.testing.assert_close(torch.utils._pytree.tree_leaves(joint([first], rest)), expected, rtol=0, atol=1e-12)
        found.append(joint.graph)
        return default_partition(joint, inputs, **kwargs)

    aot_function(program, fw_compiler=nop, partition_fn=check)(X.double().requires_grad_())
    return found[0]


def test_a_part_that_is_a_result_stays_where_it_is_written_elsewhere_too() -> None:
    """It is looked at through the other write; what was written to it is a result of its own."""

    def write(x: Tensor) -> tuple[Tensor, ...]:
        sine = x[:2].sin()
        y, z = x * 2, torch.zeros(ROWS, COLUMNS)
        y[1:3] = sine
        part = y[1:3]
        z[2:4] = part
        return sine, part, z[2:4].exp()

    found = torch.compile(write, backend="ort_training", fullgraph=True)(X)
    torch.testing.assert_close(found, write(X))
    assert found[0].data_ptr() != found[1].data_ptr()


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_places_that_follow_from_values() -> None:
    def write(x: Tensor, at: Tensor) -> Tensor:
        start = at.item()
        torch._check(start >= 0)
        torch._check(start <= ROWS - 2)
        y = x * 2
        y.narrow(0, start, 2).copy_(x[:2].sin())
        return y.narrow(0, start, 2).exp() + y[:2]

    runner = torch.compile(write, backend="ort_training", fullgraph=True)
    for at in (0, 1, 4):
        found, expected = [], []
        for function, kept in ((runner, found), (write, expected)):
            x = X.clone().requires_grad_()
            result = function(x, torch.tensor(at))
            result.sin().sum().backward()
            kept += [result.detach(), x.grad]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _count(graph: torch.fx.Graph, *targets: Any) -> int:
    return sum(node.target in targets for node in graph.nodes)


_WRITES = (aten.select_scatter.default, aten.slice_scatter.default)


def test_a_tensor_that_is_filled_is_computed_once() -> None:
    """Each state is read of the one before it, and no gradient of the whole is computed for any of them."""
    graph = _checked(_filled)
    assert _count(graph, *_WRITES) == ROWS
    assert _count(graph, aten.select_backward.default) == ROWS  # of the argument's rows


def test_what_is_written_everywhere_is_what_was_written() -> None:
    assert not _count(_checked(_whole), *_WRITES)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_number_changes(program: Callable[[Tensor], Any]) -> None:
    _checked(program)


def _random_program(seed: int) -> Callable[[Tensor], Any]:
    """Writes and reads at random places, some of them of what was written before."""

    def place(numbers: random.Random, size: int) -> Any:
        if numbers.random() < 0.3:
            return numbers.randrange(-size, size)
        start = numbers.randrange(size)
        return slice(start, numbers.randrange(start + 1, size + 1), numbers.choice((1, 1, 1, 2)))

    def run(x: Tensor) -> list[Tensor]:
        numbers = random.Random(seed)
        y, read = x * 2, [x.sum()]
        for _ in range(numbers.randrange(3, 9)):
            where = place(numbers, ROWS), *([place(numbers, COLUMNS)] if numbers.random() < 0.5 else [])
            if numbers.random() < 0.5:
                read.append((y[where] * 0.5).sin().sum())
            elif numbers.random() < 0.3:
                y[where] *= 1.5
            else:
                y[where] = (x[where] + read[-1]).cos()
        return [y, *read] if numbers.random() < 0.5 else [*read, y[place(numbers, ROWS)]]

    return run


@pytest.mark.parametrize("seed", range(20))
def test_no_number_of_random_programs_changes(seed: int) -> None:
    _checked(_random_program(seed))
