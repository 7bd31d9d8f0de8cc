"""Parts of a tensor: slices, selections, splits and diagonals, with their gradients and their `_scatter` counterparts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, length, minus, plus, rank, size, sizes
from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.ops.shape import dim_name
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.strides import in_blocks
from ort_backend.lowering.symbolic import as_vector, name_of

aten = torch.ops.aten

Size = int | ir.Value
_END = 2**63 - 1

# Elements from which on a tensor has a slice written over (`_written_over`); those of the slice, of which one takes as long as copying so many, up to
# which they are scattered one by one; elements that a row of memory has at least, and rows that a constant index may have.
_LARGE = 65536
_MOST_ELEMENTS, _ELEMENT = 1 << 17, 16
_SHORTEST_ROW, _MOST_ROWS = 4, 1 << 16


def _position(op: Any, bound: Size | None, total: Size, default: Size) -> Size:
    """A slice bound as Python reads it (negative: from the end; beyond: clamped), counted from the front."""
    if bound is None:
        return default
    if isinstance(bound, int) and isinstance(total, int):
        return min(max(bound + total if bound < 0 else bound, 0), total)
    if isinstance(bound, int):
        if bound in (0, _END):
            return 0 if bound == 0 else total
        return op.Max(op.Add(bound, total), 0) if bound < 0 else op.Min(bound, total)
    if name_of(bound) is not None and name_of(bound) == name_of(total):
        return bound
    wrapped = op.Where(op.Less(bound, 0), op.Add(bound, total), bound)
    return op.Max(op.Min(wrapped, total), 0)


def _pad(op: Any, value: ir.Value, at: int, before: Size, after: Size) -> ir.Value:
    """`value` with zeros added at both ends of one axis, never less than none (see `_on_diagonal`)."""
    if before == 0 and after == 0:
        return value
    pads: list[Size] = [0] * (2 * rank(value))
    pads[at], pads[at + rank(value)] = before, after
    return op.Pad(value, as_vector(op, pads))


# -- slice


@register(aten.slice.Tensor, any_dtype=True)
def slice_(op: Any, self: ir.Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1) -> ir.Value:
    """slice.Tensor(Tensor self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""
    at = axis(self, dim)
    start = 0 if start is None else start
    end = _END if end is None else end
    whole = dim_name(self, at)
    to_the_end = name_of(end) == whole if isinstance(end, ir.Value) else end >= (whole if isinstance(whole, int) else _END)
    if isinstance(start, int) and start == 0 and isinstance(step, int) and step == 1 and to_the_end:
        return self
    bounds = [as_vector(op, [start]), as_vector(op, [end]), int64s(op, [at])]
    return op.Slice(self, *bounds) if isinstance(step, int) and step == 1 else op.Slice(self, *bounds, as_vector(op, [step]))


@register(aten.narrow_copy.default, any_dtype=True)
def narrow_copy(op: Any, self: ir.Value, dim: int, start: Size, length: Size) -> ir.Value:
    """narrow_copy(Tensor self, int dim, SymInt start, SymInt length) -> Tensor"""
    at = axis(self, dim)
    first = _start(op, self, at, start)
    return slice_(op, self, at, first, plus(op, first, length))


def _start(op: Any, value: ir.Value, at: int, start: Size) -> Size:
    """The start of a slice, counted from the front."""
    return start if isinstance(start, int) and start >= 0 else _position(op, start, length(op, value, at), 0)


@register(aten.slice_backward.default)
def slice_backward(op: Any, grad_output: ir.Value, input_sizes: Sequence[Size], dim: int, start: Size, end: Size, step: Size) -> ir.Value:
    """slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end, SymInt step) -> Tensor"""
    at = dim % len(input_sizes)
    total = input_sizes[at]
    before = _position(op, start, total, 0)
    taken = length(op, grad_output, at)
    if isinstance(step, int) and step == 1:
        return _pad(op, grad_output, at, before, minus(op, minus(op, total, before), taken))
    if isinstance(step, ir.Value):
        raise Unsupported("a dynamic step")
    # Every element in a cell of its own, `step` wide; the cells in a row are the axis.
    cells = op.Unsqueeze(grad_output, int64s(op, [0]))
    cells.shape = ir.Shape([1, *grad_output.shape])  # type: ignore[misc]
    cells = op.Transpose(_pad(op, cells, 0, 0, step - 1), perm=[*range(1, at + 2), 0, *range(at + 2, rank(cells))])
    width = taken * step if isinstance(taken, int) else op.Mul(taken, step)
    row = op.Reshape(cells, _merged_shape(op, grad_output, at, width), allowzero=1)
    row.shape = ir.Shape([None if i == at else part for i, part in enumerate(grad_output.shape)])  # type: ignore[arg-type]
    room = minus(op, total, before)
    if isinstance(room, int) and isinstance(width, int):
        return _pad(op, _first(op, row, at, room) if width > room else row, at, before, max(room - width, 0))
    return _pad(op, _first(op, row, at, room), at, before, op.Max(op.Sub(room, width), 0))


def _first(op: Any, value: ir.Value, at: int, count: Size) -> ir.Value:
    """The first `count` elements along an axis, if there are as many."""
    found = op.Slice(value, int64s(op, [0]), as_vector(op, [count]), int64s(op, [at]))
    found.shape = ir.Shape([None if i == at else part for i, part in enumerate(value.shape)])  # type: ignore[arg-type]
    return found


def _merged_shape(op: Any, value: ir.Value, at: int, new: Size) -> ir.Value:
    return as_vector(op, [new if i == at else length(op, value, i) for i in range(rank(value))])


@register(aten.slice_scatter.default, any_dtype=True)
def slice_scatter(
    op: Any, self: ir.Value, src: ir.Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> ir.Value:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""
    at = axis(self, dim)
    if src.dtype != self.dtype:
        src = op.Cast(src, to=self.dtype)
    total = length(op, self, at)
    first, last = _position(op, start, total, 0), _position(op, end, total, total)
    last = _not_before(op, last, first, total)
    if isinstance(step, ir.Value) or step != 1:
        return _scatter_with_step(op, self, src, at, first, last, step)
    if op.builder.root.device_type == "cpu" and (written := _written_over(op, self, src, at, first, last)) is not None:
        return written
    parts = []
    if not (isinstance(first, int) and first == 0):
        parts.append(op.Slice(self, int64s(op, [0]), as_vector(op, [first]), int64s(op, [at])))
    parts.append(src)
    to_the_end = name_of(last) == dim_name(self, at) if isinstance(last, int) or name_of(last) else last is total
    if not to_the_end:
        parts.append(op.Slice(self, as_vector(op, [last]), int64s(op, [_END]), int64s(op, [at])))
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=at)


def _not_before(op: Any, last: Size, first: Size, total: Size) -> Size:
    """The end of a slice, or its start where that lies behind: then there are no elements in between."""
    if isinstance(first, int) and isinstance(last, int):
        return max(first, last)
    return last if last is total or (isinstance(first, int) and first == 0) else op.Max(last, first)


def _written_over(op: Any, value: ir.Value, src: ir.Value, at: int, first: Size, last: Size) -> ir.Value | None:
    """A copy of `value` with a slice written over, or, where nobody reads it afterwards, itself; None where it is better put together anew.

    A program that fills a tensor part by part would have all of it copied twice for each part: to take what lies in front and behind, and to put it
    together. ONNX Runtime scatters single elements in place, and rows of memory behind one copy.
    """
    known = sizes(value)
    if known is None or not isinstance(first, int) or not isinstance(last, int) or not 0 <= first < last or math.prod(known) < _LARGE:
        return None
    total, inner = math.prod(known), math.prod(known[at + 1 :])
    stride, start, run = known[at] * inner, first * inner, (last - first) * inner
    block = math.gcd(stride, start, run)  # elements of a row, of which the slice covers some and no part of another
    count = total // stride * run // block
    few = count * block <= min(_MOST_ELEMENTS, total // _ELEMENT)
    if count > _MOST_ROWS or not (few or (block >= _SHORTEST_ROW and 2 * run <= stride)):
        return None
    places = ((np.arange(0, total, stride) + start) // block)[:, None] + np.arange(run // block)
    rows, shape = constant(op, places.reshape(-1, 1), ir.DataType.INT64), int64s(op, [-1, block])
    old, new = op.Reshape(value, shape), op.Reshape(src, shape)
    written = op.ScatterElements(old, op.Expand(rows, int64s(op, [count, block])), new, axis=0) if few else op.ScatterND(old, rows, new)
    return op.Reshape(written, int64s(op, known))


def _scatter_with_step(op: Any, value: ir.Value, src: ir.Value, at: int, first: Size, last: Size, step: Size) -> ir.Value:
    rows = _rows(op, first, last, step)
    order = [at, *(i for i in range(rank(value)) if i != at)]
    back = [*range(1, at + 1), 0, *range(at + 1, rank(value))]
    if at == 0:
        return op.ScatterND(value, rows, src)
    return op.Transpose(op.ScatterND(op.Transpose(value, perm=order), rows, op.Transpose(src, perm=order)), perm=back)


def _rows(op: Any, first: Size, last: Size, step: Size) -> ir.Value:
    """The indices of a slice with a step, int64 (n, 1)."""
    if isinstance(first, int) and isinstance(last, int) and isinstance(step, int):
        return constant(op, np.arange(first, last, step)[:, None], ir.DataType.INT64)
    bounds = [part if isinstance(part, ir.Value) else constant(op, part, ir.DataType.INT64) for part in (first, last, step)]
    return op.Unsqueeze(op.Range(*bounds), int64s(op, [1]))


# -- select


@register(aten.select.int, any_dtype=True)
def select(op: Any, self: ir.Value, dim: int, index: Size) -> ir.Value:
    """select.int(Tensor self, int dim, SymInt index) -> Tensor"""
    where = index if isinstance(index, ir.Value) else constant(op, index, ir.DataType.INT64)
    return op.Gather(self, where, axis=axis(self, dim))


def _index(op: Any, index: Size, total: Size) -> Size:
    """An index counted from the front."""
    if isinstance(index, int):
        return index if index >= 0 else index + total if isinstance(total, int) else op.Add(total, index)
    return op.Mod(index, total)


@register(aten.select_backward.default)
def select_backward(op: Any, grad_output: ir.Value, input_sizes: Sequence[Size], dim: int, index: Size) -> ir.Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    at = dim % len(input_sizes)
    before = _index(op, index, input_sizes[at])
    row = op.Unsqueeze(grad_output, int64s(op, [at]))
    row.shape = ir.Shape([*grad_output.shape[:at], 1, *grad_output.shape[at:]])  # type: ignore[index]
    return _pad(op, row, at, before, minus(op, minus(op, input_sizes[at], 1), before))


@register(aten.select_scatter.default, any_dtype=True)
def select_scatter(op: Any, self: ir.Value, src: ir.Value, dim: int, index: Size) -> ir.Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    at = axis(self, dim)
    first = _index(op, index, length(op, self, at))
    after = first + 1 if isinstance(first, int) else op.Add(first, 1)
    return slice_scatter(op, self, op.Unsqueeze(src, int64s(op, [at])), at, first, after)


# -- split


@register(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default, any_dtype=True)
def split_with_sizes(op: Any, self: ir.Value, split_sizes: Sequence[Size], dim: int = 0) -> Sequence[ir.Value]:
    """split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]"""
    if len(split_sizes) == 1:
        return [self]
    return op.Split(self, as_vector(op, split_sizes), axis=axis(self, dim), _outputs=len(split_sizes))


@register(aten.unbind.int, aten.unbind_copy.int, any_dtype=True)
def unbind(op: Any, self: ir.Value, dim: int = 0) -> Sequence[ir.Value]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]"""
    total = size(self, axis(self, dim))
    if total is None:
        raise Unsupported("the number of parts is not known from static sizes")
    return [select(op, self, dim, i) for i in range(total)]


# -- memory addressed by strides

_INDEX_UP_TO = 1 << 20  # blocks that a constant index may have


def _addresses(total: int, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None) -> tuple[int, torch.Tensor]:
    """The elements of a block (`in_blocks`), and the place in memory of each block."""
    numbers = [*size, *stride, 0 if storage_offset is None else storage_offset]
    if any(isinstance(number, ir.Value) for number in numbers):
        raise Unsupported("dynamic sizes or strides")
    block, counts, steps, first = in_blocks(total, size, stride, numbers[-1])  # type: ignore[arg-type]
    if math.prod(counts) > _INDEX_UP_TO:
        raise Unsupported("more blocks than a constant index may have")
    places = torch.full(counts, first)
    for at, (count, step) in enumerate(zip(counts, steps)):
        places += (torch.arange(count) * step).reshape([-1] + [1] * (len(counts) - at - 1))
    if places.numel() and int(places.max()) * block >= total:
        raise Unsupported("an address outside of the tensor")
    return block, places


def _in_order(places: torch.Tensor) -> bool:
    return bool((places.flatten() == torch.arange(places.numel())).all())


@register(aten.as_strided.default, any_dtype=True, whole_storage=("self",))
def as_strided(op: Any, self: ir.Value, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None) -> ir.Value:
    """as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)"""
    total = math.prod(sizes(self) or [])
    block, places = _addresses(total, size, stride, storage_offset)
    if places.numel() * block == total and _in_order(places):
        return op.Reshape(self, int64s(op, size), allowzero=1)  # type: ignore[arg-type]
    if block == 1:
        return op.Gather(op.Reshape(self, int64s(op, [-1])), constant(op, places.numpy(), ir.DataType.INT64), axis=0)
    found = op.Gather(op.Reshape(self, int64s(op, [-1, block])), constant(op, places.numpy(), ir.DataType.INT64), axis=0)
    return op.Reshape(found, int64s(op, size))  # type: ignore[arg-type]


@register(aten.as_strided_scatter.default, any_dtype=True, whole_storage=("self",))
def as_strided_scatter(
    op: Any, self: ir.Value, src: ir.Value, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None
) -> ir.Value:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor"""
    known = sizes(self) or []
    total = math.prod(known)
    block, places = _addresses(total, size, stride, storage_offset)
    if places.unique().numel() != places.numel():
        raise Unsupported("elements that overlap")
    if src.dtype != self.dtype:
        src = op.Cast(src, to=self.dtype)
    if places.numel() * block == total and _in_order(places):
        return op.Reshape(src, int64s(op, known), allowzero=1)
    rows = int64s(op, [-1] if block == 1 else [-1, block])
    at = constant(op, places.reshape(-1, 1).numpy(), ir.DataType.INT64)
    return op.Reshape(op.ScatterND(op.Reshape(self, rows), at, op.Reshape(src, rows)), int64s(op, known), allowzero=1)
