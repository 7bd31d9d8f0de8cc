"""Indices of a batch that are expanded along rows: what becomes of them, with eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled, same_gradients, same_tree, same_without_and_with_gradients, twin
from default_device import seeded

from ort_backend import min_cut, regions
from ort_backend.errors import OutOfRangeError
from ort_backend.lowering import simplify
from ort_backend.lowering.passes import batched_rows

pytestmark = pytest.mark.cpu_only(reason="the pass is for the CPU")

X = torch.randn(2, 6, 4, generator=seeded(0))  # two tables of six rows
ROWS = torch.tensor([[3, 0, 3, 5, 1], [2, 2, 0, 4, 4]])
EACH = torch.tensor([[[3, 0], [3, 5], [1, 1]], [[2, 2], [0, 4], [4, 3]]])  # two rows for each of three points


@pytest.fixture(name="rewritten")
def _rewritten(counted: Callable[..., list[int]]) -> list[int]:
    """How many nodes each run of the pass rewrote."""
    return counted("index_batches", batched_rows.index_batches, simplify, regions, min_cut)


def _into(index: torch.Tensor, width: int = 4) -> torch.Tensor:
    return index.unsqueeze(-1).expand(*index.shape, width)


def _neighbours(x: torch.Tensor, each: torch.Tensor = EACH) -> torch.Tensor:
    return (x * 2).unsqueeze(1).expand(-1, each.shape[1], -1, -1).gather(2, _into(each))


# What is rewritten, and how many nodes of forward and backward that is at least.
BATCHES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "gather": (lambda x: (x * 2).gather(1, _into(ROWS)), 2),
    "repeat": (lambda x: (x * 2).gather(1, ROWS[..., None].repeat(1, 1, 4)), 2),
    "viewed": (lambda x: (x * 2).gather(1, _into(ROWS).reshape(2, 5, 4)), 2),
    "negative_dim": (lambda x: (x * 2).gather(-2, _into(ROWS)), 2),
    "deep_rows": (lambda x: (x * 2).view(2, 6, 2, 2).gather(1, ROWS.view(2, 5, 1, 1).expand(2, 5, 2, 2)), 2),
    "two_batches": (lambda x: (x * 2).view(2, 1, 6, 4).gather(2, ROWS.view(2, 1, 5, 1).expand(2, 1, 5, 4)), 2),
    "neighbours": (_neighbours, 2),
    "neighbours_behind": (lambda x: (x * 2)[:, :, None].expand(-1, -1, 2, -1).gather(1, _into(EACH)), 2),
    "neighbours_of_one_table": (lambda x: (x[0] * 2).expand(3, 6, 4).gather(1, _into(EACH[0])), 1),
    "one_table_with_a_one": (lambda x: (x[:1] * 2).expand(3, 6, 4).gather(1, _into(EACH[0])), 2),
    "scatter_add": (lambda x: torch.ones_like(x).scatter_add(1, _into(ROWS), x[:, :5] * 2), 2),
    "of_a_computed_index": (lambda x: (x * 2).gather(1, x.sum(2, keepdim=True).argsort(1).expand(-1, -1, 4)), 2),
}
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "narrow": lambda x: (x[..., :2] * 2).gather(1, _into(ROWS, 2)),
    "fewer_columns": lambda x: (x * 2).gather(1, _into(ROWS, 3)),
    "fewer_tables": lambda x: (x * 2).gather(1, _into(ROWS[:1])),
    "along_the_row": lambda x: (x * 2).gather(2, (ROWS % 4)[:, :1, None].expand(2, 6, 4)),
    "full": lambda x: (x * 2).gather(1, _into(ROWS).clone()),
    "vector": lambda x: (x[0, :, 0] * 2).gather(0, ROWS[0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", BATCHES)
def test_rows_of_a_batch(rewritten: list[int], kind: str, dtype: torch.dtype) -> None:
    function, count = BATCHES[kind]
    # Whole numbers, whose sums in bfloat16 are the same in any order.
    same_without_and_with_gradients(lambda x: function(x).to(dtype), (X * 4).round().to(dtype))
    assert rewritten[0] >= 1 and sum(rewritten[1:]) >= count


@pytest.mark.parametrize("kind", ["gather", "neighbours", "scatter_add"])
def test_complex_rows(rewritten: list[int], kind: str) -> None:
    same_without_and_with_gradients(lambda x: torch.view_as_real(BATCHES[kind][0](torch.complex(x, x.flip(0)))), X)
    assert rewritten[0] >= 1 and sum(rewritten[1:]) >= 2


@pytest.mark.parametrize("kind", OTHERS)
def test_others_stay(rewritten: list[int], kind: str) -> None:
    same_without_and_with_gradients(OTHERS[kind], X)
    assert sum(rewritten) == 0


def test_a_larger_source_stays(rewritten: list[int]) -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, 6, 4).scatter_add(1, _into(ROWS), x)

    same_tree(compiled(add)(X), add(X))  # PyTorch gives it no gradient
    assert rewritten == [0]


def test_a_gradient_is_of_one_table(rewritten: list[int]) -> None:
    """And nothing has the size of all its copies."""
    x = torch.randn(2, 1000, 4, requires_grad=True)
    each = torch.randint(1000, (2, 1000, 3))
    step = compiled(_neighbours)
    sizes = list[int]()

    def measure(graph: torch.fx.Graph, *_: Any) -> int:
        done = batched_rows.index_batches(graph)
        graph.eliminate_dead_code()
        made = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor) and "expand" not in node.name]
        sizes.append(max(one.numel() for one in made))
        return done

    with pytest.MonkeyPatch.context() as patch:
        for module in (simplify, regions, min_cut):
            patch.setattr(module, "index_batches", measure)
        step(x, each).sum().backward()
    assert x.grad is not None and sizes and max(sizes) == 2 * 1000 * 3 * 4
    torch.testing.assert_close(
        x.grad, 2 * torch.stack([torch.bincount(one.flatten(), minlength=1000) for one in each])[..., None].expand(2, 1000, 4).float()
    )


def test_sizes_that_change(rewritten: list[int]) -> None:
    step = compiled(_neighbours, dynamic=None)
    for batch, points, rows in ((2, 3, 6), (1, 2, 5), (2, 1, 6)):
        x, each = X[:batch, :rows], EACH[:batch, :points] % rows
        one, other = twin(x).requires_grad_(), twin(x).requires_grad_()
        results = step(one, each), _neighbours(other, each)
        same_tree(*results)
        for result in results:
            result.square().sum().backward()
        same_gradients(one, other)
    assert sum(rewritten) >= 4  # of fixed sizes, and of others


@pytest.mark.parametrize("row", [6, -1])
def test_an_index_out_of_range(rewritten: list[int], row: int) -> None:
    """It is one of the table's own, not of the next table's."""
    function = compiled(lambda x, rows: (x * 2).gather(1, _into(rows)))
    rows = ROWS.clone()
    rows[0, 1] = row
    with pytest.raises(OutOfRangeError, match=rf"index {row} is out of bounds.*\n.*test_batched_rows"):
        function(X, rows)
    assert sum(rewritten) == 1


def test_added_rows_out_of_range(rewritten: list[int]) -> None:
    function = compiled(lambda x, rows: (x * 2).scatter_add(1, _into(rows), x[:, :5]))
    with pytest.raises(OutOfRangeError, match="index 6 is out of bounds"):
        function(X, ROWS + 1)
    assert sum(rewritten) == 1
