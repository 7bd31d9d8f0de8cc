"""Parts and joins of tensors with a few numbers in a row, such as boxes, points and pairs, on the CPU: taken column by column.

ONNX Runtime's kernels copy such tensors a row at a time. Of 65,536 rows of 4 a column takes Gather 475 us, Slice 275, in Transpose and Gather 37;
two columns Slice 275, between two Transposes 85; Pad of one to 4 takes 600, else 70; Concat of two rows of 2 takes 366, else 150 (AMD EPYC of family
25, model 17; 1.19.2 and 1.32.0 alike). Beyond 8 numbers there is nothing to gain. Where two Transposes face each other, it is Gather that moves the
columns between: ONNX Runtime's optimizer does not look through it, and would make of any other node, and both Transposes, the slow node again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, length, rank, size, sizes
from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.shape import common_dtype
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import reshape

aten = torch.ops.aten

Size = int | ir.Value

_WIDEST = 8
_FEWEST = 4096  # elements; an unknown number counts as more


def _width(tensor: ir.Value, dim: int) -> int:
    """How many columns a tensor has.

    Raises:
        Unsupported: `dim` is not the last of several dimensions, the tensor has many columns, or few elements.
    """
    last = rank(tensor) - 1
    columns = size(tensor, last) if last > 0 and axis(tensor, dim) == last else None
    if columns is None or not 1 < columns <= _WIDEST or _is_small(sizes(tensor)):
        raise Unsupported("not a large tensor with few elements in each row")
    return columns


def _is_small(shape: Sequence[int] | None) -> bool:
    return shape is not None and math.prod(shape) < _FEWEST


def _columns(op: Any, tensor: ir.Value) -> ir.Value:
    """(..., n) as (n, ...)."""
    last = rank(tensor) - 1
    return typed(op.Transpose(tensor, perm=[last, *range(last)]), tensor.dtype, [tensor.shape[last], *tensor.shape[:last]])  # type: ignore[index]


def _rows(op: Any, columns: ir.Value) -> ir.Value:
    """(n, ...) as (..., n)."""
    return op.Transpose(columns, perm=[*range(1, rank(columns)), 0])


def _taken(op: Any, columns: ir.Value, wanted: Sequence[int]) -> ir.Value:
    """Some of the columns, as rows."""
    made = op.Gather(columns, int64s(op, wanted), axis=0)
    return _rows(op, typed(made, columns.dtype, [len(wanted), *columns.shape[1:]]))  # type: ignore[index]


@register(aten.select.int, device="cpu", any_dtype=True)
def select(op: Any, self: ir.Value, dim: int, index: Size) -> ir.Value:
    """select.int(Tensor self, int dim, SymInt index) -> Tensor"""
    _width(self, dim)
    where = index if isinstance(index, ir.Value) else constant(op, index, ir.DataType.INT64)
    return op.Gather(_columns(op, self), where, axis=0)


@register(aten.unbind.int, device="cpu", any_dtype=True)
def unbind(op: Any, self: ir.Value, dim: int = 0) -> Sequence[ir.Value]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]"""
    width, columns = _width(self, dim), _columns(op, self)
    return [op.Gather(columns, constant(op, i, ir.DataType.INT64), axis=0) for i in range(width)]


@register(aten.slice.Tensor, device="cpu", any_dtype=True)
def slice_(op: Any, self: ir.Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1) -> ir.Value:
    """slice.Tensor(Tensor self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""
    if isinstance(step, int) and (first := _first_of_cells(self, dim, start, end, step)) is not None:
        return op.Gather(_columns(op, _cells(op, self, step)), constant(op, first, ir.DataType.INT64), axis=0)
    width = _width(self, dim)
    wanted = _indices(width, start, end, step)
    return self if len(wanted) == width else _taken(op, _columns(op, self), wanted)


def _cells(op: Any, tensor: ir.Value, width: int) -> ir.Value:
    """(..., n width) as (..., n, width)."""
    *lead, last = tensor.shape  # type: ignore[misc]
    count = int(last) // width  # type: ignore[arg-type]
    made = reshape(op, tensor, [*(length(op, tensor, i) for i in range(len(lead))), count, width])
    return typed(made, tensor.dtype, [*lead, count, width])


def _first_of_cells(self: ir.Value, dim: int, start: Size | None, end: Size | None, step: int) -> int | None:
    """Which element of each `step` a slice takes of a last dimension that consists of such cells, as in interleaved rotary embeddings.

    None: it is no such slice.
    """
    last = rank(self) - 1
    if last < 1 or axis(self, dim) != last or _is_small(sizes(self)):
        return None
    return _first_in_cell(size(self, last), start, end, step)


def _first_of_cells_of(grad_output: ir.Value, input_sizes: Sequence[Size], dim: int, start: Size, end: Size, step: int) -> int | None:
    """The same of the tensor that a gradient is for."""
    last = len(input_sizes) - 1
    if last < 1 or dim % (last + 1) != last or _is_small(sizes(grad_output)):
        return None
    return _first_in_cell(input_sizes[last], start, end, step)


def _first_in_cell(total: Size | None, start: Size | None, end: Size | None, step: int) -> int | None:
    if isinstance(start, ir.Value) or isinstance(end, ir.Value) or not isinstance(total, int):
        return None
    if not 1 < step <= _WIDEST or total % step:
        return None
    taken = range(*slice(start, end, step).indices(total))
    return taken[0] if len(taken) == total // step else None


def _indices(width: int, start: Size | None, end: Size | None, step: Size) -> range:
    if isinstance(start, ir.Value) or isinstance(end, ir.Value) or isinstance(step, ir.Value):
        raise Unsupported("bounds that are computed")
    return range(*slice(start, end, step).indices(width))


@register(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default, device="cpu", any_dtype=True)
def split_with_sizes(op: Any, self: ir.Value, split_sizes: Sequence[Size], dim: int = 0) -> Sequence[ir.Value]:
    """split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]"""
    _width(self, dim)
    widths = [part for part in split_sizes if isinstance(part, int)]
    if len(widths) < len(split_sizes) or len(widths) < 2:
        raise Unsupported("sizes that are computed, or one part alone")
    columns, starts = _columns(op, self), [sum(widths[:i]) for i in range(len(widths))]
    return [_taken(op, columns, range(start, start + width)) for start, width in zip(starts, widths)]


@register(aten.cat.default, device="cpu", any_dtype=True)
def cat(op: Any, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    last = rank(tensors[0]) - 1
    if last < 1 or len(tensors) < 2 or axis(tensors[0], dim) != last or any(rank(tensor) != last + 1 for tensor in tensors):
        raise Unsupported("joined along another dimension than the last")
    widths = [size(tensor, last) or _WIDEST for tensor in tensors]
    if sum(widths) > _WIDEST or max(widths) == 1 or _is_small(sizes(tensors[0])):
        raise Unsupported("long rows, or single columns, or few elements")
    parts = common_dtype(op, tensors)
    joined = op.Concat(*(_columns(op, tensor) for tensor in parts), axis=0)
    joined = typed(joined, parts[0].dtype, [sum(widths), *parts[0].shape[:last]])  # type: ignore[index]
    return _taken(op, joined, range(sum(widths)))


@register(aten.select_backward.default, device="cpu")
def select_backward(op: Any, grad_output: ir.Value, input_sizes: Sequence[Size], dim: int, index: Size) -> ir.Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    width = _width_of(grad_output, input_sizes, dim)
    if not isinstance(index, int):
        raise Unsupported("an index that is computed")
    first = index % width
    return _rows(op, _padded(op, _column(op, grad_output), first, width - 1 - first))


@register(aten.slice_backward.default, device="cpu")
def slice_backward(op: Any, grad_output: ir.Value, input_sizes: Sequence[Size], dim: int, start: Size, end: Size, step: Size) -> ir.Value:
    """slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end, SymInt step) -> Tensor"""
    if isinstance(step, int) and (first := _first_of_cells_of(grad_output, input_sizes, dim, start, end, step)) is not None:
        cells = _rows(op, _padded(op, _column(op, grad_output), first, step - 1 - first))
        return reshape(op, cells, input_sizes)
    width = _width_of(grad_output, input_sizes, dim)
    wanted = _indices(width, start, end, step)
    zero = len(wanted)  # where the column of zeros stands, behind the others
    sources = [wanted.index(i) if i in wanted else zero for i in range(width)]
    return _taken(op, _padded(op, _columns(op, grad_output), 0, 1), sources)


def _width_of(grad_output: ir.Value, input_sizes: Sequence[Size], dim: int) -> int:
    """`_width` of the tensor that a gradient is for."""
    last = len(input_sizes) - 1
    width, lead = input_sizes[last], [part for part in input_sizes[:last] if isinstance(part, int)]
    is_large = len(lead) < last or not isinstance(width, int) or not _is_small([*lead, width])
    if last < 1 or dim % (last + 1) != last or not isinstance(width, int) or not 1 < width <= _WIDEST or not is_large:
        raise Unsupported("not a large tensor with few elements in each row")
    return width


def _column(op: Any, tensor: ir.Value) -> ir.Value:
    """A tensor as the only column of another."""
    return typed(op.Unsqueeze(tensor, int64s(op, [0])), tensor.dtype, [1, *tensor.shape])  # type: ignore[misc]


def _padded(op: Any, columns: ir.Value, before: int, behind: int) -> ir.Value:
    """With columns of zeros around."""
    others = [0] * (rank(columns) - 1)
    made = op.Pad(columns, int64s(op, [before, *others, behind, *others]))
    count = columns.shape[0]  # type: ignore[index]
    return typed(made, columns.dtype, [None if not isinstance(count, int) else count + before + behind, *columns.shape[1:]])  # type: ignore[index]
