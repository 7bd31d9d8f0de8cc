"""Blocks of rows in which attention runs on ONNX Runtime: where they end, and how tensors are cut for them and put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_backend.lowering.constants import int64s
from ort_backend.lowering.kernels.attention_choice import row_blocks
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.symbolic import example


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Where rows of queries are cut into blocks.

    Attributes:
        ends: Of each block, None where they are not known.
        at: The same in the graph, int64: (1,) each.
        sizes: Of all blocks, int64: (blocks,)
        cuts_keys: Whether a block sees the keys up to its own end alone, else all.
    """

    ends: Sequence[int | None]
    at: Sequence[ir.Value]
    sizes: ir.Value
    cuts_keys: bool


def causal_ends(length: Any, keys: Any) -> list[int]:
    """Where the blocks of rows of a causal attention end; none of them: it has one block, or no known number of queries."""
    if not isinstance(length, int) or length != keys:
        return []
    count = row_blocks(length, length, is_causal=True)
    return _ends(length, count) if count > 1 else []


def _ends(length: int, count: int) -> list[int]:
    return [length * (i + 1) // count for i in range(count)]


def cuts_of(op: Any, query: ir.Value, key: ir.Value, is_causal: bool) -> Cuts | None:
    """None for one block.

    Args:
        op: The builder.
        query: (N, H, L, width)
        key: (N, H or a part of them, S, width)
        is_causal: Whether a query sees the keys up to its own place alone, and nothing else masks them. A block is computed with all keys where they
            are not as many as the queries.
    """
    length, keys = query.shape[2], key.shape[2]  # type: ignore[index]
    hints, cuts_keys = op.builder.root.hints, is_causal and length == keys
    example_length = example(length, hints)
    count = row_blocks(example_length, example(keys, hints), cuts_keys)
    if count == 1:
        return None
    if isinstance(length, int):
        return known_cuts(op, _ends(length, count), cuts_keys)
    if example_length <= 512:  # to cut an unknown number costs as much as fewer products gain
        return None
    steps = op.Div(op.Mul(op.Shape(query, start=2, end=3), int64s(op, range(count + 1))), int64s(op, [count]))
    at = op.Split(steps, int64s(op, [1] * (count + 1)), axis=0, _outputs=count + 1)
    starts, ends = (op.Slice(steps, int64s(op, [first]), int64s(op, [first + count])) for first in (0, 1))
    return Cuts([None] * count, at[1:], op.Sub(ends, starts), cuts_keys)


def known_cuts(op: Any, ends: Sequence[int], cuts_keys: bool) -> Cuts | None:
    """Those in front of `ends`; none of these means one block."""
    if not ends:
        return None
    return Cuts(ends, [int64s(op, [end]) for end in ends], int64s(op, np.diff(ends, prepend=0).tolist()), cuts_keys)


def cut(op: Any, tensor: ir.Value, cuts: Cuts | None) -> list[ir.Value]:
    """(..., L, width) in blocks of rows; in one where there are no cuts."""
    if cuts is None:
        return [tensor]
    sizes = [None if end is None or start is None else end - start for start, end in zip([0, *cuts.ends], cuts.ends)]
    parts = op.Split(tensor, cuts.sizes, axis=-2, _outputs=len(sizes))
    return [typed(part, tensor.dtype, [*tensor.shape[:-2], size, tensor.shape[-1]]) for part, size in zip(parts, sizes)]  # type: ignore[index]


def seen(op: Any, tensor: ir.Value, cuts: Cuts | None) -> list[ir.Value]:
    """What each block of queries sees of keys or values: (N, H, S, width)."""
    if cuts is None:
        return [tensor]
    if not cuts.cuts_keys:
        return [tensor] * len(cuts.at)
    starts, axes = int64s(op, [0]), int64s(op, [2])
    parts = [op.Slice(tensor, starts, end, axes) for end in cuts.at[:-1]]
    shapes = [[*tensor.shape[:2], end, tensor.shape[3]] for end in cuts.ends]  # type: ignore[index]
    return [*(typed(part, tensor.dtype, shape) for part, shape in zip(parts, shapes)), tensor]


def joined(op: Any, parts: list[ir.Value]) -> ir.Value:
    """The inverse of `cut`, of (N, H, rows, width)."""
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=2)


def add_seen(op: Any, total: ir.Value | None, part: ir.Value, cuts: Cuts | None) -> ir.Value:
    """The gradient of what later blocks have seen (None: there are none) and of what this block has seen, fewer rows if it sees fewer keys."""
    if total is None:
        return part
    if cuts is None or not cuts.cuts_keys:
        return typed(op.Add(total, part), total.dtype, total.shape)
    rows, all_rows = op.Shape(part, start=2, end=3), op.Shape(total, start=2, end=3)
    first, rest = op.Split(total, op.Concat(rows, op.Sub(all_rows, rows), axis=0), axis=2, _outputs=2)
    return typed(op.Concat(op.Add(first, part), rest, axis=2), total.dtype, total.shape)
