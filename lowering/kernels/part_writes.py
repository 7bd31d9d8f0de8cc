"""An operator for a tensor of which parts are written over, one after the other: one copy, whatever the number of parts, by PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class View(NamedTuple):
    """A slice, or a selection of `start` where `step` is 0."""

    dim: int
    start: int
    end: int
    step: int


_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("write_parts(Tensor self, Tensor[] parts, int[] views) -> Tensor")
WRITE_PARTS = torch.ops.ort_training.write_parts.default


def flat(views: Sequence[Sequence[View]]) -> list[int]:
    """The views of each part as numbers, behind how many there are."""
    return [number for of_part in views for number in (len(of_part), *(number for view in of_part for number in view))]


@torch.library.register_fake("ort_training::write_parts", lib=_library)
def _(tensor: Tensor, parts: Sequence[Tensor], views: Sequence[int]) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.impl(_library, "write_parts", "CompositeExplicitAutograd")
def _write_parts(tensor: Tensor, parts: Sequence[Tensor], views: Sequence[int]) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    numbers = iter(views)
    for source in parts:
        part_of(result, [next(numbers) for _ in range(4 * next(numbers))]).copy_(source)
    return result


def part_of(tensor: Tensor, views: Sequence[int]) -> Tensor:
    """A view of a view of a tensor, and so on; four numbers each."""
    for dim, start, end, step in zip(*(views[i::4] for i in range(4)), strict=True):
        tensor = tensor.select(dim, start) if step == 0 else aten.slice.Tensor(tensor, dim, start, end, step)
    return tensor


def copy_of_parts(tensor: Tensor, parts: Sequence[Sequence[int]] | None) -> Tensor:
    """A copy that has these views of a tensor, and anything elsewhere; of the whole for None. Memory that nothing is written to costs nothing."""
    if parts is None:
        return tensor.clone()
    copy = torch.empty_like(tensor)
    for views in parts:
        part_of(copy, views).copy_(part_of(tensor, views))
    return copy


# What a node calls: without PyTorch's dispatcher, whose layers in Python take as long as a small kernel.
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {WRITE_PARTS: _write_parts}
