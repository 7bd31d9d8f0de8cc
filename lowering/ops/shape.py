"""The same elements in another shape or order: views, joins, repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, element_count, length, rank, size
from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.dtypes import to_ir, to_torch
from ort_backend.lowering.permuting import permuted
from ort_backend.lowering.registry import register
from ort_backend.lowering.symbolic import as_vector, name_of, reshape

aten = torch.ops.aten

Size = int | ir.Value


def dim_name(tensor: ir.Value, at: int) -> int | str | None:
    """A size as `symbolic.name_of` names size arguments: two equal names are equal sizes."""
    assert tensor.shape is not None
    part = tensor.shape[at]
    return part if isinstance(part, int) else part.value


# -- views


@register(aten.view.default, aten.view_copy.default, aten._unsafe_view.default, any_dtype=True)
def view(op: Any, self: ir.Value, size: Sequence[Size]) -> ir.Value:
    """view(Tensor self, SymInt[] size) -> Tensor"""
    same = rank(self) == len(size) and all(name_of(part) == dim_name(self, i) != None for i, part in enumerate(size))  # noqa: E711
    return self if same else reshape(op, self, size)


@register(aten.reshape.default, any_dtype=True)
def reshape_(op: Any, self: ir.Value, shape: Sequence[Size]) -> ir.Value:
    """reshape(Tensor self, SymInt[] shape) -> Tensor"""
    return view(op, self, shape)


@register(aten.squeeze.default, aten.squeeze_copy.default, any_dtype=True)
def squeeze(op: Any, self: ir.Value) -> ir.Value:
    """squeeze(Tensor self) -> Tensor"""
    return squeeze_dims(op, self, list(range(rank(self))))


@register(aten.squeeze.dim, aten.squeeze_copy.dim, any_dtype=True)
def squeeze_dim(op: Any, self: ir.Value, dim: int) -> ir.Value:
    """squeeze.dim(Tensor self, int dim) -> Tensor"""
    return squeeze_dims(op, self, [dim])


@register(aten.squeeze.dims, aten.squeeze_copy.dims, any_dtype=True)
def squeeze_dims(op: Any, self: ir.Value, dim: Sequence[int]) -> ir.Value:
    """squeeze.dims(Tensor self, int[] dim) -> Tensor"""
    if rank(self) == 0:
        return self
    single = sorted({axis(self, d) for d in dim if size(self, axis(self, d)) == 1})
    return op.Squeeze(self, int64s(op, single)) if single else self


@register(aten.unsqueeze.default, aten.unsqueeze_copy.default, any_dtype=True)
def unsqueeze(op: Any, self: ir.Value, dim: int) -> ir.Value:
    """unsqueeze(Tensor self, int dim) -> Tensor"""
    return op.Unsqueeze(self, int64s(op, [axis(self, dim, extra=1)]))


@register(aten.permute.default, aten.permute_copy.default, any_dtype=True)
def permute(op: Any, self: ir.Value, dims: Sequence[int]) -> ir.Value:
    """permute(Tensor self, int[] dims) -> Tensor"""
    return permuted(op, self, [axis(self, d) for d in dims])


@register(aten.transpose.int, aten.transpose_copy.int, any_dtype=True)
def transpose(op: Any, self: ir.Value, dim0: int, dim1: int) -> ir.Value:
    """transpose.int(Tensor self, int dim0, int dim1) -> Tensor"""
    order = list(range(rank(self)))
    if order:
        a, b = axis(self, dim0), axis(self, dim1)
        order[a], order[b] = order[b], order[a]
    return permute(op, self, order)


@register(aten.t.default, aten.t_copy.default, any_dtype=True)
def t(op: Any, self: ir.Value) -> ir.Value:
    """t(Tensor self) -> Tensor"""
    return permute(op, self, list(reversed(range(rank(self)))))


def move_axis(op: Any, value: ir.Value, source: int, destination: int) -> ir.Value:
    """`value` with one axis moved and the others in order."""
    order = [i for i in range(rank(value)) if i != source]
    order.insert(destination, source)
    return permute(op, value, order)


# -- repetition


@register(aten.expand.default, aten.expand_copy.default)
def expand(op: Any, self: ir.Value, size: Sequence[Size], implicit: bool = False) -> ir.Value:
    """expand(Tensor self, SymInt[] size, *, bool implicit=False) -> Tensor"""
    new = len(size) - rank(self)
    wanted: list[Size] = []
    for i, part in enumerate(size):
        name = name_of(part)
        kept = i >= new and (name == -1 or (name is not None and name == dim_name(self, i - new)))
        wanted.append(1 if kept else part)
    empty = [i for i, part in enumerate(wanted) if not isinstance(part, ir.Value) and part == 0]
    if empty:  # ONNX Runtime's optimiser takes an Expand from 1 to 0 for one that does nothing (1.19.2)
        self = op.Unsqueeze(self, int64s(op, list(range(new)))) if new else self
        none = int64s(op, [0] * len(empty))
        self, new = op.Slice(self, none, none, int64s(op, empty)), 0
        wanted = [1 if i in empty else part for i, part in enumerate(wanted)]
    if all(not isinstance(part, ir.Value) and part == 1 for part in wanted):
        return op.Unsqueeze(self, int64s(op, list(range(new)))) if new else self
    return op.Expand(self, as_vector(op, wanted))


@register(aten.repeat.default)
def repeat(op: Any, self: ir.Value, repeats: Sequence[Size]) -> ir.Value:
    """repeat(Tensor self, SymInt[] repeats) -> Tensor"""
    new = len(repeats) - rank(self)
    if new:
        self = op.Unsqueeze(self, int64s(op, list(range(new))))
    if all(not isinstance(part, ir.Value) and part == 1 for part in repeats):
        return self
    return op.Tile(self, as_vector(op, repeats)) if repeats else self


# -- joins


def common_dtype(op: Any, tensors: Sequence[ir.Value]) -> list[ir.Value]:
    """The tensors, cast to the dtype that PyTorch joins them in."""
    dtypes = [to_torch(tensor.dtype) for tensor in tensors]  # type: ignore[arg-type]
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    wanted = to_ir(result)
    return [tensor if tensor.dtype == wanted else op.Cast(tensor, to=wanted) for tensor in tensors]


@register(aten.cat.default, any_dtype=True)
def cat(op: Any, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    parts = common_dtype(op, tensors)
    ranks = max(rank(tensor) for tensor in parts)
    # An empty vector joins tensors of any rank.
    parts = [tensor for tensor in parts if rank(tensor) == ranks and (ranks != 1 or size(tensor, 0) != 0)] or parts[:1]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis(parts[0], dim))


@register(aten.stack.default, any_dtype=True)
def stack(op: Any, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    """stack(Tensor[] tensors, int dim=0) -> Tensor"""
    at = axis(tensors[0], dim, extra=1)
    parts = [op.Unsqueeze(tensor, int64s(op, [at])) for tensor in common_dtype(op, tensors)]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=at)


# -- order

_TO_THE_FRONT = -(2**63) + 1


@register(aten.flip.default, any_dtype=True)
def flip(op: Any, self: ir.Value, dims: Sequence[int]) -> ir.Value:
    """flip(Tensor self, int[] dims) -> Tensor"""
    at = sorted({axis(self, d) for d in dims})
    if not at or rank(self) == 0 or 0 in (self.shape or ()):  # of which ONNX's shape inference would make a slice with one element
        return self
    back = int64s(op, [-1] * len(at))
    return op.Slice(self, back, int64s(op, [_TO_THE_FRONT] * len(at)), int64s(op, at), back)


@register(aten.roll.default, any_dtype=True)
def roll(op: Any, self: ir.Value, shifts: Sequence[Size], dims: Sequence[int] = ()) -> ir.Value:
    """roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor"""
    if not dims:
        if rank(self) == 1:
            return roll(op, self, shifts, [0])
        if self.shape is not None and 0 in self.shape:
            return self
        flat = op.Reshape(self, int64s(op, [-1]))
        return op.Reshape(_rolled(op, flat, shifts[0], element_count(op, self), 0), op.Shape(self))
    for shift, dim in zip(shifts, dims):
        at = axis(self, dim)
        self = _rolled(op, self, shift, length(op, self, at), at) if rank(self) else self
    return self


def _rolled(op: Any, value: ir.Value, shift: Size, total: Size, at: int) -> ir.Value:
    if isinstance(total, int) and total == 0:
        return value
    if isinstance(shift, int) and isinstance(total, int):
        shift = shift % total
        if shift == 0:
            return value
        split = int64s(op, [total - shift])
    else:
        split = op.Sub(total, op.Mod(shift, total))
        split = op.Unsqueeze(split, int64s(op, [0]))
    where = int64s(op, [at])
    tail = op.Slice(value, split, int64s(op, [2**63 - 1]), where)
    result = op.Concat(tail, op.Slice(value, int64s(op, [0]), split, where), axis=at)
    result.shape = value.shape
    return result


# -- triangles and blocks


@register(aten.tril.default)
def tril(op: Any, self: ir.Value, diagonal: Size = 0) -> ir.Value:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    return _triangle(op, self, diagonal, upper=0)


@register(aten.triu.default)
def triu(op: Any, self: ir.Value, diagonal: Size = 0) -> ir.Value:
    """triu(Tensor self, SymInt diagonal=0) -> Tensor"""
    return _triangle(op, self, diagonal, upper=1)


def _triangle(op: Any, value: ir.Value, diagonal: Size, upper: int) -> ir.Value:
    if value.dtype == ir.DataType.INT32:
        value = op.Cast(value, to=ir.DataType.INT64)
    if isinstance(diagonal, int):
        diagonal = constant(op, diagonal, ir.DataType.INT64)
    return op.Trilu(value, diagonal, upper=upper)


@register(aten.pixel_shuffle.default, any_dtype=True)
def pixel_shuffle(op: Any, self: ir.Value, upscale_factor: int) -> ir.Value:
    """pixel_shuffle(Tensor self, int upscale_factor) -> Tensor"""
    r = upscale_factor
    *outer, c, h, w = (length(op, self, i) for i in range(rank(self)))
    n, channels = len(outer), _divided(op, c, r * r)
    cells = op.Reshape(self, as_vector(op, [*outer, channels, r, r, h, w]), allowzero=1)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return op.Reshape(op.Transpose(cells, perm=order), as_vector(op, [*outer, channels, _multiplied(op, h, r), _multiplied(op, w, r)]), allowzero=1)


@register(aten.pixel_unshuffle.default, any_dtype=True)
def pixel_unshuffle(op: Any, self: ir.Value, downscale_factor: int) -> ir.Value:
    """pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor"""
    r = downscale_factor
    *outer, c, h, w = (length(op, self, i) for i in range(rank(self)))
    n, rows, columns = len(outer), _divided(op, h, r), _divided(op, w, r)
    cells = op.Reshape(self, as_vector(op, [*outer, c, rows, r, columns, r]), allowzero=1)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return op.Reshape(op.Transpose(cells, perm=order), as_vector(op, [*outer, _multiplied(op, c, r * r), rows, columns]), allowzero=1)


def _divided(op: Any, number: Size, by: int) -> Size:
    return number // by if isinstance(number, int) else op.Div(number, constant(op, by, ir.DataType.INT64))


def _multiplied(op: Any, number: Size, by: int) -> Size:
    return number * by if isinstance(number, int) else op.Mul(number, constant(op, by, ir.DataType.INT64))
