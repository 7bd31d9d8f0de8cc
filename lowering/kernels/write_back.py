"""Writes to parts of a large argument (a cache, a queue), by PyTorch, in the user's memory.

AOTAutograd has the whole argument computed anew, and copied into the old one: of a cache of 64 MB 128 MB are written for each token. A write stands
behind the session that computes what is written; or inside, where the rest of the graph reads the whole argument after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ort_backend.lowering.kernels.part_writes import part_of

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


# -- inside a session: `self` has to be a contiguous argument that nothing reads before the write, or the result of another such write

_library.define("write_here(Tensor self, Tensor part, SymInt[] view) -> Tensor")
_library.define("index_copy_here(Tensor self, int dim, Tensor index, Tensor source) -> Tensor")
_library.define("index_put_here(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor")
_here = torch.ops.ort_training
WRITE_HERE = _here.write_here.default
BY_INDEX_HERE = {aten.index_copy.default: _here.index_copy_here.default, aten.index_put.default: _here.index_put_here.default}

# What a node calls: it returns `self`, whose memory ONNX Runtime gives to nobody else, as it is not its own.
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    WRITE_HERE: write_into,
    **{target: BY_INDEX[functional] for functional, target in BY_INDEX_HERE.items()},
}


def _fake(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
    return torch.empty_like(tensor)


def written_argument(node: Any) -> Any:
    """The argument that a write inside a session returns; any other node, or constant, as it is."""
    while isinstance(node, fx.Node) and node.target in IMPLEMENTATIONS:
        node = node.args[0]
    return node


for _target in IMPLEMENTATIONS:
    torch.library.register_fake(_target, _fake, lib=_library)
