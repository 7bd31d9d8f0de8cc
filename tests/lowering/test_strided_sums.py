"""Memory addressed by strides in blocks of neighbours, and sums at such places: eager's numbers, and fewer indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from behaviours.check import compiled, same_gradients, same_tree, twin
from default_device import seeded
from ops.harness import check

from ort_backend import regions
from ort_backend.lowering import simplify
from ort_backend.lowering.passes import strided_sums
from ort_backend.lowering.strides import in_blocks

Strided = tuple[tuple[int, ...], tuple[int, ...], int]

BLOCKS: dict[str, Strided] = {
    "windows_that_overlap": ((3, 3, 4, 6), (48, 12, 6, 1), 0),
    "with_an_offset": ((2, 3, 6), (60, 12, 1), 36),
    "rows_in_another_order": ((4, 6, 3), (6, 24, 1), 3),
    "of_one_row": ((1, 12), (7, 1), 24),
    "a_row_again_and_again": ((5, 12), (0, 1), 12),
}
SINGLE: dict[str, Strided] = {
    "transposed": ((6, 24), (1, 6), 0),
    "from_the_middle_of_a_block": ((3, 12), (12, 1), 5),
    "diagonal": ((6,), (25,), 0),
}


@pytest.fixture(name="rewritten")
def _rewritten(counted: Callable[..., list[int]]) -> list[int]:
    """How many sums each run of the pass rewrote."""
    return counted("add_blocks", strided_sums.add_blocks, simplify, regions)


def _step(strided: Strided, make: Callable[..., Any] = lambda function: function) -> list[Any]:
    x = torch.randn(144, generator=seeded(0)).requires_grad_()
    result = make(lambda x: (x * 2).as_strided(*strided) * 3)(x)
    (result * torch.arange(result.numel()).view(result.shape)).sum().backward()
    return [result.detach(), x.grad]


@pytest.mark.parametrize("kind", [*BLOCKS, *SINGLE])
def test_gradients_of_strided_tensors(rewritten: list[int], kind: str) -> None:
    strided = {**BLOCKS, **SINGLE}[kind]
    torch.testing.assert_close(_step(strided, compiled), _step(strided), rtol=1e-5, atol=1e-4)
    overlap = len({int(place) for place in torch.arange(144).as_strided(*strided).flatten()}) < math.prod(strided[0]) and 0 not in strided[1]
    assert sum(rewritten) == (kind in BLOCKS and overlap)  # what does not overlap is written, not added


@pytest.mark.parametrize("kind", [*BLOCKS, *SINGLE])
def test_values_and_blocks(kind: str) -> None:
    strided = {**BLOCKS, **SINGLE}[kind]
    check(lambda t: torch.as_strided(t, *strided), torch.randn(12, 12))
    block, size, stride, offset = in_blocks(144, *strided)
    assert (block > 1) == (kind in BLOCKS)
    assert torch.equal(
        torch.arange(144).view(-1, block).as_strided([*size, block], [*(block * step for step in stride), 1], block * offset).reshape(strided[0]),
        torch.arange(144).as_strided(*strided),
    )


def test_rows_are_scattered() -> None:
    check(lambda t, s: torch.as_strided_scatter(t, s, (3, 6), (24, 1), 6), torch.randn(12, 12), torch.randn(3, 6))


@pytest.mark.parametrize(("size", "stride"), [((), ()), ((0, 3), (3, 1)), ((2, 0), (1, 1))])
def test_scalars_and_nothing(size: Sequence[int], stride: Sequence[int]) -> None:
    assert in_blocks(12, size, stride, 0)[0] == 1
    check(lambda t: torch.as_strided(t, size, stride), torch.randn(12))


def test_a_sum_at_other_numbers_stays(rewritten: list[int]) -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, 25).as_strided((2, 4), (4, 1)).reshape(-1)  # not from zero
        return torch.zeros(24).index_add(0, places, (x * 2).reshape(-1))

    one, other = (twin(torch.randn(2, 4, generator=seeded(0))).requires_grad_() for _ in range(2))
    results = compiled(add)(one), add(other)
    same_tree(*results)
    for result in results:
        result.square().sum().backward()
    same_gradients(one, other)
    assert not sum(rewritten)
