"""Operators that change their arguments.

In the trace each is a call of `auto_functionalized_v2`, which changes clones of the tensors that the arguments are views of (their bases), and makes
the views again: by strides and an offset, which are those of the trace, where a slice would not do (read in torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.memory_order import is_dense

FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2

# Strides and offset of a tensor.
Place = Sequence[Any]


def places_of_bases(node: fx.Node) -> dict[int, Place]:
    """Where the bases of a call of `FUNCTIONALIZED` lie in memory: those of which a view is made by strides, and that a session has otherwise.

    A session's tensors are in the order of the trace (`call_orders`), but have no gaps, and begin at 0.
    """
    bases: Sequence[Any] = node.kwargs["_all_bases"]  # type: ignore[assignment]
    fakes = {i: bases[i].meta["val"] for i in sorted(_addressed(node.kwargs))}
    return {i: (*fake.stride(), fake.storage_offset()) for i, fake in fakes.items() if not _is_dense_from_0(fake)}


def on_placed_bases(operator: Any, *, _all_bases: Sequence[torch.Tensor], _places: Mapping[int, Place], **named: Any) -> Any:
    """`FUNCTIONALIZED`, behind bases that lie in memory as `_places` says."""
    bases = [_placed(base, _places[i]) if i in _places else base for i, base in enumerate(_all_bases)]
    return FUNCTIONALIZED(operator, _all_bases=bases, **named)


on_placed_bases.__wrapped__ = FUNCTIONALIZED  # type: ignore[attr-defined]  # for `call_orders`


def _addressed(named: Mapping[str, Any]) -> set[int]:
    """Which bases have views that are made by strides."""
    prefixes = [key.removesuffix("_storage_offset") for key in named if key.startswith("_") and key.endswith("_storage_offset")]
    return {named[f"{prefix}_base_index"] for prefix in prefixes if f"{prefix}_base_index" in named}


def _is_dense_from_0(fake: torch.Tensor) -> bool:
    offset = fake.storage_offset()
    return isinstance(offset, int) and offset == 0 and is_dense(fake)


def _placed(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """A copy that lies so in memory of its own."""
    *stride, offset = place
    end = offset + sum((n - 1) * step for n, step in zip(tensor.shape, stride)) + 1 if tensor.numel() else offset
    return tensor.new_empty(end).as_strided(tensor.shape, stride, offset).copy_(tensor)
