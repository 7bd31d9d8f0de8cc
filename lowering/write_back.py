"""Writes to parts of a large argument (a cache, a queue), by PyTorch, in the user's memory, behind the session that computes what is written.

AOTAutograd has the whole argument computed anew, and copied into the old one: of a cache of 64 MB 128 MB are written for each token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ort_backend.lowering.part_writes import part_of

aten = torch.ops.aten

IN_ARGUMENT = "it writes where an argument lies"

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("write_back(Tensor self, Tensor part, SymInt[] view) -> Tensor")
# `self`, an argument or the result of another write back, with `part` written to a view of it (as `part_writes.View`s, one after the other, their
# numbers in a row); nothing but a result of the graph may read it.
WRITE_BACK = torch.ops.ort_training.write_back.default

# What writes by indices, and the same in place.
BY_INDEX = {aten.index_copy.default: aten.index_copy_.default, aten.index_put.default: aten.index_put_.default}

IN_PLACE_WRITES = frozenset({WRITE_BACK, *BY_INDEX.values()})


def write_into(tensor: Tensor, part: Tensor, view: Sequence[int]) -> Tensor:
    """What runs for `WRITE_BACK`."""
    part_of(tensor, view).copy_(part)
    return tensor


@torch.library.impl(_library, "write_back", "CompositeImplicitAutograd")
def _(tensor: Tensor, part: Tensor, view: Sequence[int]) -> Tensor:
    result = tensor.clone()
    part_of(result, view).copy_(part)
    return result
