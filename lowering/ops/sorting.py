"""Order statistics, all of them by ONNX's TopK: among equal elements it takes the first one first, as a stable sort does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, length, rank
from ort_backend.lowering.constants import constant, int64s, scalar_like
from ort_backend.lowering.dtypes import to_torch
from ort_backend.lowering.ops.reduction import nan_at
from ort_backend.lowering.registry import register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value


def _top(op: Any, value: ir.Value, k: Size, at: int, *, largest: bool, ordered: bool = True) -> Sequence[ir.Value]:
    if value.dtype == ir.DataType.BOOL:
        value = op.Cast(value, to=ir.DataType.INT32)
    assert value.dtype is not None
    if not value.dtype.is_floating_point():
        return op.TopK(value, as_vector(op, [k]), axis=at, largest=int(largest), sorted=int(ordered), _outputs=2)
    # PyTorch takes NaN as the largest number, behind infinity, and ONNX Runtime's kernel compares it as it comes.
    finite = op.Min(value, scalar_like(op, torch.finfo(to_torch(value.dtype)).max, value))
    ordered_by = op.Where(op.IsNaN(value), scalar_like(op, math.inf, value), finite)
    _, index = op.TopK(ordered_by, as_vector(op, [k]), axis=at, largest=int(largest), sorted=int(ordered), _outputs=2)
    return op.GatherElements(value, index, axis=at), index


def _scalar(op: Any, value: ir.Value) -> Sequence[ir.Value]:
    return value, constant(op, 0, ir.DataType.INT64)


@register(aten.topk.default)
def topk(op: Any, self: ir.Value, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True) -> Sequence[ir.Value]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)"""
    return _top(op, self, k, axis(self, dim), largest=largest, ordered=sorted) if rank(self) else _scalar(op, self)


@register(aten.sort.default)
def sort(op: Any, self: ir.Value, dim: int = -1, descending: bool = False) -> Sequence[ir.Value]:
    """sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    return sort_stable(op, self, None, dim, descending)


@register(aten.sort.stable)
def sort_stable(op: Any, self: ir.Value, stable: bool | None, dim: int = -1, descending: bool = False) -> Sequence[ir.Value]:
    """sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    if rank(self) == 0:
        return _scalar(op, self)
    at = axis(self, dim)
    return _top(op, self, length(op, self, at), at, largest=descending)


@register(aten.argsort.default)
def argsort(op: Any, self: ir.Value, dim: int = -1, descending: bool = False) -> ir.Value:
    """argsort(Tensor self, int dim=-1, bool descending=False) -> Tensor"""
    return sort_stable(op, self, None, dim, descending)[1]


def _last(op: Any, value: ir.Value, k: Size, dim: int, keepdim: bool) -> Sequence[ir.Value]:
    """The `k`-th smallest elements and their indices."""
    at = axis(value, dim)
    results = _top(op, value, k, at, largest=False)
    end = [int64s(op, [-1]), int64s(op, [2**63 - 1]), int64s(op, [at])]
    if keepdim:
        return [op.Slice(result, *end) for result in results]
    return [op.Gather(result, constant(op, -1, ir.DataType.INT64), axis=at) for result in results]


@register(aten.kthvalue.default)
def kthvalue(op: Any, self: ir.Value, k: Size, dim: int = -1, keepdim: bool = False) -> Sequence[ir.Value]:
    """kthvalue(Tensor self, SymInt k, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _last(op, self, k, dim, keepdim) if rank(self) else _scalar(op, self)


@register(aten.median.dim)
def median_dim(op: Any, self: ir.Value, dim: int, keepdim: bool = False) -> Sequence[ir.Value]:
    """median.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    if rank(self) == 0:
        return _scalar(op, self)
    total = length(op, self, axis(self, dim))
    middle = (total + 1) // 2 if isinstance(total, int) else op.Div(op.Add(total, 1), constant(op, 2, ir.DataType.INT64))
    nans = nan_at(op, self)
    if nans is None:
        return _last(op, self, middle, dim, keepdim)
    # One NaN, and the median is the first of them.
    at = axis(self, dim)
    _, index = _last(op, self, middle, dim, True)
    any_nan = op.Cast(op.ReduceMax(nans, int64s(op, [at])), to=ir.DataType.BOOL)
    index = op.Where(any_nan, op.ArgMax(nans, axis=at), index)
    value = op.GatherElements(self, index, axis=at)
    return (value, index) if keepdim else (op.Squeeze(value, int64s(op, [at])), op.Squeeze(index, int64s(op, [at])))


@register(aten.median.default)
def median(op: Any, self: ir.Value) -> ir.Value:
    """median(Tensor self) -> Tensor"""
    return median_dim(op, _flat(op, self), 0)[0]


@register(aten.nanmedian.dim)
def nanmedian_dim(op: Any, self: ir.Value, dim: int, keepdim: bool = False) -> Sequence[ir.Value]:
    """nanmedian.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    nans = nan_at(op, self)
    if nans is None or rank(self) == 0:
        return median_dim(op, self, dim, keepdim)
    # NaN comes last, as often as there are some; of nothing but NaN it is the first.
    at = axis(self, dim)
    total = length(op, self, at)
    _, order = _top(op, self, total, at, largest=False)
    one, two = (constant(op, number, ir.DataType.INT64) for number in (1, 2))
    missing = op.ReduceSum(op.Cast(nans, to=ir.DataType.INT64), int64s(op, [at]))
    middle = op.Div(op.Sub(op.Sub(constant(op, total, ir.DataType.INT64) if isinstance(total, int) else total, missing), one), two)
    index = op.GatherElements(order, middle, axis=at)
    value = op.GatherElements(self, index, axis=at)
    return (value, index) if keepdim else (op.Squeeze(value, int64s(op, [at])), op.Squeeze(index, int64s(op, [at])))


@register(aten.nanmedian.default)
def nanmedian(op: Any, self: ir.Value) -> ir.Value:
    """nanmedian(Tensor self) -> Tensor"""
    return nanmedian_dim(op, _flat(op, self), 0)[0]


def _flat(op: Any, value: ir.Value) -> ir.Value:
    flat = op.Reshape(value, int64s(op, [-1]))
    flat.type, flat.shape = ir.TensorType(value.dtype), ir.Shape([_elements(value)])  # type: ignore[arg-type]
    return flat


def _elements(value: ir.Value) -> int | None:
    assert value.shape is not None
    total = 1
    for part in value.shape:
        if not isinstance(part, int):
            return None
        total *= part
    return total
