"""Indices that are expanded along whole rows: what becomes of them, with eager's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import compiled, same_gradients, same_tree, same_without_and_with_gradients, twin
from default_device import seeded

from ort_backend import regions
from ort_backend.lowering import simplify
from ort_backend.lowering.passes import row_indices

ROWS = torch.tensor([3, 0, 3, 1, 1, 3])  # of the six rows of X; row 2 of what they go to gets none
X = torch.randn(6, 4, generator=seeded(0))


@pytest.fixture(name="rewritten")
def _rewritten(counted: Callable[..., list[int]]) -> list[int]:
    """How many nodes each run of the pass rewrote."""
    return counted("index_rows", row_indices.index_rows, simplify, regions)


def _as(x: torch.Tensor, rows: torch.Tensor = ROWS) -> torch.Tensor:
    return rows.view(-1, 1).expand_as(x)


def _reduced(reduce: str, include_self: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.full((5, 4), 0.5).scatter_reduce(0, _as(x), x * 2, reduce, include_self=include_self)


WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scatter_add": lambda x: torch.zeros(5, 4).scatter_add(0, _as(x), x * 2),
    "gather": lambda x: (x * 2).gather(0, _as(x)),
    "unsqueezed": lambda x: (x * 2).gather(0, ROWS[:, None].expand(-1, 4)),
    "along_the_last": lambda x: (x * 2).gather(1, (ROWS[:4] % 4)[None, :].expand(6, 4)),
    "fewer": lambda x: (x * 2).gather(-2, ROWS[:2, None].expand(-1, 4)),
    "in_the_middle": lambda x: torch.zeros(2, 5, 2).scatter_add(1, ROWS.view(1, 6, 1).expand(2, 6, 2), x.view(2, 6, 2)),
    "of_a_computed_index": lambda x: (x * 2).gather(0, (x.sum(1, keepdim=True) > 0).long().expand(-1, 4)),
    **{f"{reduce}_{own}": _reduced(reduce, own) for reduce in ("amax", "amin", "mean", "prod") for own in (True, False)},
    "sum": _reduced("sum", True),
}
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "smaller_than_the_target": lambda x: torch.zeros(5, 3).scatter_add(0, _as(x[:, :2]), x[:, :2].contiguous()),
    "smaller_than_both": lambda x: torch.zeros(5, 2).scatter_add(0, ROWS.view(-1, 1).expand(6, 2), x),
    "expanded_along_itself": lambda x: (x * 2).gather(0, ROWS[:4].view(1, 4).expand(6, 4)),
    "full": lambda x: (x * 2).gather(0, _as(x).clone()),
    "sum_without_itself": _reduced("sum", False),
    "vector": lambda x: (x[:, 0] * 2).gather(0, ROWS),
}


@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_rows(rewritten: list[int], kind: str, dynamic: bool | None) -> None:
    same_without_and_with_gradients(WHOLE[kind], X, dynamic=dynamic)
    assert sum(rewritten) >= 2  # without gradients and with some


@pytest.mark.parametrize("kind", OTHERS)
def test_others_stay(rewritten: list[int], kind: str) -> None:
    function, x = OTHERS[kind], twin(X)
    with torch.no_grad():
        result = compiled(function)(x)
    assert rewritten == [0]
    if kind.startswith("smaller"):  # eager's kernel of expanded indices writes to other places there (torch 2.13)
        same_tree(result, torch.cat([torch.zeros(5, 2).index_add(0, ROWS, x[:, :2]), torch.zeros(5, 1)], 1)[:, : result.shape[1]])
    else:
        same_tree(result, function(x))
        same_without_and_with_gradients(function, X)


@pytest.mark.parametrize(
    ("dtype", "reduce"),
    [
        *(pytest.param(torch.bool, name, marks=pytest.mark.cpu_only(reason="PyTorch's extremes of bools")) for name in ("amax", "amin")),
        (torch.bfloat16, "prod"),
        (torch.float16, "prod"),
    ],
)
@pytest.mark.parametrize("include_self", [True, False])
def test_what_index_reduce_is_not_for(rewritten: list[int], dtype: torch.dtype, reduce: str, include_self: bool) -> None:
    x, own = (one.abs().mul(2).round().clamp(max=1).to(dtype) for one in (X, X[:5]))

    def function(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return own.scatter_reduce(0, _as(x), x, reduce, include_self=include_self)

    same_tree(compiled(function)(x, own), function(x, own))
    assert rewritten == [0]


def test_rows_of_changing_number(rewritten: list[int]) -> None:
    def pool(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(5, 4).scatter_reduce(0, rows.view(-1, 1).expand_as(x), x.sin(), "mean", include_self=False)

    step = compiled(pool, dynamic=None)
    for count in (6, 5, 4):
        one, other = twin(X[:count]).requires_grad_(), twin(X[:count]).requires_grad_()
        results = step(one, ROWS[:count]), pool(other, ROWS[:count])
        same_tree(*results)
        for result in results:
            result.square().sum().backward()
        same_gradients(one, other)
    assert len(rewritten) >= 2 and all(rewritten[:2])
