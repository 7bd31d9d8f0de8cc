"""Elements picked out and put in by several index tensors or masks at once: `x[i, :, j]`, `x[mask] = y`, `nonzero`, `take` and `put`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import rank, same_shape, sizes
from ort_backend.lowering.constants import as_bool, as_int64, int64s
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.comparison import where_
from ort_backend.lowering.ops.creation import filled
from ort_backend.lowering.ops.running import running_sum
from ort_backend.lowering.ops.shape import permute
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value


def _positions(op: Any, indices: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """One integer index (or None) for each axis: a mask becomes the places where it is true."""
    found: list[ir.Value | None] = []
    for index in indices:
        if index is not None and index.dtype in (ir.DataType.BOOL, ir.DataType.UINT8):
            if rank(index) == 0:
                raise Unsupported("a mask without dimensions")
            places = op.NonZero(as_bool(op, index) if index.dtype == ir.DataType.UINT8 else index)
            columns = op.Split(places, axis=0, num_outputs=rank(index), _outputs=rank(index)) if rank(index) > 1 else places
            for column in [columns] if isinstance(columns, ir.Value) else columns:
                flat = op.Squeeze(column, int64s(op, [0]))
                flat.type, flat.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([None])
                found.append(flat)
        else:
            found.append(index)
    return found


def _places(op: Any, parts: Sequence[ir.Value]) -> tuple[ir.Value, int]:
    """The indices of several axes as the rows of one tensor that GatherND and ScatterND take, and their common rank."""
    ranks = max(rank(part) for part in parts)
    if len(parts) == 1:
        return op.Unsqueeze(as_int64(op, parts[0]), int64s(op, [ranks])), ranks
    parts = [as_int64(op, part) for part in parts]
    if not all(same_shape(part, parts[0]) for part in parts):
        shape = _broadcast_shape(op, parts, ranks)
        parts = [op.Expand(part, shape) for part in parts]
    return op.Concat(*(op.Unsqueeze(part, int64s(op, [ranks])) for part in parts), axis=-1), ranks


def _broadcast_shape(op: Any, parts: Sequence[ir.Value], ranks: int) -> ir.Value:
    known = [sizes(part) for part in parts]
    if all(one is not None for one in known):
        return int64s(op, list(torch.broadcast_shapes(*known)))
    if len({part.dtype for part in parts}) > 1:  # a mask among them
        parts = [op.Cast(part, to=ir.DataType.INT64) for part in parts]
    whole = parts[0]
    for part in parts[1:]:
        whole = op.Add(whole, part)
    return op.Shape(whole)


def _axes_of(indices: Sequence[ir.Value | None], value: ir.Value) -> tuple[list[int], list[int]]:
    """The indexed axes, and the others."""
    used = [i for i, index in enumerate(indices) if index is not None]
    return used, [i for i in range(rank(value)) if i not in used]


def _in_place_of(used: Sequence[int]) -> int:
    """Where the indices' dimensions go in the result: behind what precedes adjacent axes, to the front otherwise."""
    return used[0] if used[-1] - used[0] == len(used) - 1 else 0


@register(aten.index.Tensor, aten._unsafe_index.Tensor, any_dtype=True)
def index(op: Any, self: ir.Value, indices: Sequence[ir.Value | None]) -> ir.Value:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    positions = _positions(op, indices)
    used, rest = _axes_of(positions, self)
    parts = [part for part in positions if part is not None]
    if len(used) == 1:
        return op.Gather(self, as_int64(op, parts[0]), axis=used[0])
    places, ranks = _places(op, parts)
    found = op.GatherND(permute(op, self, [*used, *rest]), places)
    before = _in_place_of(used)
    if before == 0:
        return found
    order = [*range(ranks, ranks + before), *range(ranks), *range(ranks + before, ranks + len(rest))]
    return op.Transpose(found, perm=order)


@register(aten.index_put.default, aten._unsafe_index_put.default, keep=("indices",))
def index_put(op: Any, self: ir.Value, indices: Sequence[ir.Value | None], values: ir.Value, accumulate: bool = False) -> ir.Value:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    if self.dtype == ir.DataType.BOOL and accumulate:
        number, more = (op.Cast(value, to=ir.DataType.INT32) for value in (self, values))
        total = index_put(op, typed(number, ir.DataType.INT32, self.shape), indices, typed(more, ir.DataType.INT32, values.shape), True)
        return op.Cast(total, to=ir.DataType.BOOL)
    masked = _masked_put(op, self, indices, values, accumulate)
    if masked is not None:
        return masked
    positions = _positions(op, indices)
    used, rest = _axes_of(positions, self)
    places, ranks = _places(op, [part for part in positions if part is not None])
    before = _in_place_of(used)
    count = ranks + len(rest)
    order = [*used, *rest]
    front = permute(op, self, order)
    shape = op.Concat(op.Shape(places, start=0, end=ranks), op.Shape(front, start=len(used)), axis=0)
    if before:
        # `values` broadcasts against the result of the indexing, in which the indices' dimensions stand behind `before` others.
        values = _leading_ones(op, values, count)
        values = op.Transpose(values, perm=[*range(before, before + ranks), *range(before), *range(before + ranks, count)])
    values = op.Expand(values, shape)
    made = op.ScatterND(front, places, values, reduction="add" if accumulate else "none")
    back = [order.index(i) for i in range(len(order))]
    return made if back == sorted(back) else op.Transpose(made, perm=back)


def _leading_ones(op: Any, value: ir.Value, ranks: int) -> ir.Value:
    missing = ranks - rank(value)
    return op.Unsqueeze(value, int64s(op, list(range(missing)))) if missing else value


def _masked_put(op: Any, value: ir.Value, indices: Sequence[ir.Value | None], values: ir.Value, accumulate: bool) -> ir.Value | None:
    """`value` with one number where a single mask is true; None if that is not what is asked for."""
    if accumulate or len(indices) != 1 or indices[0] is None or indices[0].dtype != ir.DataType.BOOL or sizes(values) not in ([], [1]):
        return None
    mask = indices[0]
    missing = rank(value) - rank(mask)
    if missing:
        mask = op.Unsqueeze(mask, int64s(op, list(range(rank(mask), rank(value)))))
    return where_(op, mask, op.Reshape(values, int64s(op, [])) if rank(values) else values, value)


@register(aten.nonzero.default, any_dtype=True)
def nonzero(op: Any, self: ir.Value) -> ir.Value:
    """nonzero(Tensor self) -> Tensor"""
    if rank(self) == 0:
        raise Unsupported("nonzero of a scalar")
    return op.Transpose(op.NonZero(as_bool(op, self)), perm=[1, 0])


@register(aten.masked_select.default, keep=("mask",))
def masked_select(op: Any, self: ir.Value, mask: ir.Value) -> ir.Value:
    """masked_select(Tensor self, Tensor mask) -> Tensor"""
    if not same_shape(self, mask):
        shape = _broadcast_shape(op, [self, mask], max(rank(self), rank(mask)))
        self, mask = op.Expand(self, shape), op.Expand(mask, shape)
    flat = int64s(op, [-1])
    return op.Compress(op.Reshape(self, flat), op.Reshape(mask, flat), axis=0)


def _place_among_true(op: Any, mask: ir.Value) -> ir.Value:
    """For each element of a flat mask, how many before it are true."""
    ones = typed(op.Cast(mask, to=ir.DataType.INT64), ir.DataType.INT64, mask.shape or [None])
    return op.Sub(running_sum(op, ones, 0), ones)


@register(aten.masked_scatter.default, keep=("mask",))
def masked_scatter(op: Any, self: ir.Value, mask: ir.Value, source: ir.Value) -> ir.Value:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor"""
    if not same_shape(self, mask):
        shape = _broadcast_shape(op, [self, mask], max(rank(self), rank(mask)))
        self, mask = op.Expand(self, shape), op.Expand(mask, shape)
    flat = int64s(op, [-1])
    flat_mask = op.Reshape(mask, flat)
    # Behind the last place that is true, the count may point behind the source.
    place = op.Mul(_place_among_true(op, flat_mask), op.Cast(flat_mask, to=ir.DataType.INT64))
    spare = op.Concat(op.Reshape(source, flat), filled(op, [1], 0, source.dtype), axis=0)  # type: ignore[arg-type]
    chosen = where_(op, flat_mask, op.Gather(spare, place, axis=0), op.Reshape(self, flat))
    return op.Reshape(chosen, op.Shape(self), allowzero=1)


@register(aten.masked_scatter_backward.default, keep=("mask",))
def masked_scatter_backward(op: Any, grad_output: ir.Value, mask: ir.Value, sizes: Sequence[Size]) -> ir.Value:
    """masked_scatter_backward(Tensor grad_output, Tensor mask, SymInt[] sizes) -> Tensor"""
    chosen = masked_select(op, grad_output, mask)
    shape = as_vector(op, sizes)
    total = op.ReduceProd(shape) if sizes else int64s(op, [1])
    missing = op.Sub(total, op.Shape(chosen))
    return op.Reshape(op.Pad(chosen, op.Concat(int64s(op, [0]), missing, axis=0)), shape, allowzero=1)


@register(aten.take.default, any_dtype=True)
def take(op: Any, self: ir.Value, index: ir.Value) -> ir.Value:
    """take(Tensor self, Tensor index) -> Tensor"""
    return op.Gather(op.Reshape(self, int64s(op, [-1])), index, axis=0)


@register(aten.put.default)
def put(op: Any, self: ir.Value, index: ir.Value, source: ir.Value, accumulate: bool = False) -> ir.Value:
    """put(Tensor self, Tensor index, Tensor source, bool accumulate=False) -> Tensor"""
    if self.dtype == ir.DataType.BOOL and accumulate:
        number, more = (op.Cast(value, to=ir.DataType.INT32) for value in (self, source))
        return op.Cast(put(op, number, index, more, True), to=ir.DataType.BOOL)
    flat = int64s(op, [-1])
    rows = op.Reshape(as_int64(op, index), int64s(op, [-1, 1]))
    made = op.ScatterND(op.Reshape(self, flat), rows, op.Reshape(source, flat), reduction="add" if accumulate else "none")
    return op.Reshape(made, op.Shape(self), allowzero=1)
