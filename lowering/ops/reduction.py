"""Reductions over axes: sums, extremes, statistics, and running sums."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axes, axis, length, may_be_zero, rank
from ort_backend.lowering.constants import constant, int64s, negated, scalar_like
from ort_backend.lowering.ops.pointwise import exp
from ort_backend.lowering.ops.running import gradient_of_running_product, running_product, running_sum
from ort_backend.lowering.registry import register
from ort_backend.lowering.tracing.cumulative_products import CUMPROD_BACKWARD

aten = torch.ops.aten

Dims = int | Sequence[int] | None
Correction = int | float | ir.Value | None


def reduce_along(op: Any, kind: str, value: ir.Value, at: Sequence[int], keepdim: bool) -> ir.Value:
    """A reduction of ONNX's (`kind`) of `value` along the axes `at`."""
    if len(at) == rank(value):
        return getattr(op, kind)(value, keepdims=int(keepdim))
    return getattr(op, kind)(value, int64s(op, at), keepdims=int(keepdim))


# -- sums


@register(aten.sum.default, promote="output")
def sum_(op: Any, self: ir.Value, dtype: torch.dtype | None = None) -> ir.Value:
    """sum(Tensor self, *, ScalarType? dtype=None) -> Tensor"""
    return sum_dim(op, self, None)


@register(aten.sum.dim_IntList, promote="output")
def sum_dim(op: Any, self: ir.Value, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None) -> ir.Value:
    """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    return reduce_along(op, "ReduceSum", self, axes(self, dim), keepdim) if rank(self) else self


@register(aten.mean.default, promote="output")
def mean(op: Any, self: ir.Value, dtype: torch.dtype | None = None) -> ir.Value:
    """mean(Tensor self, *, ScalarType? dtype=None) -> Tensor"""
    return mean_dim(op, self, None)


@register(aten.mean.dim, promote="output")
def mean_dim(op: Any, self: ir.Value, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None) -> ir.Value:
    """mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    at = axes(self, dim)
    if rank(self) == 0:
        return self
    if all(_never_empty(self, i) for i in at):
        return reduce_along(op, "ReduceMean", self, at, keepdim)
    # ONNX Runtime's mean of nothing is 0, not NaN.
    return op.Div(reduce_along(op, "ReduceSum", self, at, keepdim), _count(op, self, at))


def _never_empty(value: ir.Value, at: int) -> bool:
    """Whether an axis has elements: a plain symbol of Dynamo's stands for two or more."""
    assert value.shape is not None
    part = value.shape[at]
    return part > 0 if isinstance(part, int) else re.fullmatch(r"s\d+", part.value or "") is not None


def _count(op: Any, value: ir.Value, at: Sequence[int]) -> ir.Value:
    """The number of elements along some axes, in `value`'s dtype."""
    lengths = [length(op, value, i) for i in at]
    total = math.prod(part for part in lengths if isinstance(part, int))
    count: ir.Value | int = total
    for part in lengths:
        if isinstance(part, ir.Value):
            count = part if isinstance(count, int) and count == 1 else op.Mul(part, count)
    return scalar_like(op, count, value)


@register(aten.prod.default, promote="output")
def prod(op: Any, self: ir.Value, dtype: torch.dtype | None = None) -> ir.Value:
    """prod(Tensor self, *, ScalarType? dtype=None) -> Tensor"""
    return reduce_along(op, "ReduceProd", self, axes(self, None), False) if rank(self) else self


@register(aten.prod.dim_int, promote="output")
def prod_dim(op: Any, self: ir.Value, dim: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> ir.Value:
    """prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    return reduce_along(op, "ReduceProd", self, axes(self, dim), keepdim) if rank(self) else self


@register(aten.cumsum.default, promote="output")
def cumsum(op: Any, self: ir.Value, dim: int, dtype: torch.dtype | None = None) -> ir.Value:
    """cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    return running_sum(op, self, axis(self, dim)) if rank(self) else self


@register(aten.cumprod.default, promote="output")
def cumprod(op: Any, self: ir.Value, dim: int, dtype: torch.dtype | None = None) -> ir.Value:
    """cumprod(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    return running_product(op, self, axis(self, dim)) if rank(self) else self


@register(CUMPROD_BACKWARD, promote="output")
def cumprod_backward(op: Any, grad: ir.Value, input: ir.Value, dim: int, output: ir.Value) -> ir.Value:
    """ort_training::cumprod_backward(Tensor grad, Tensor input, int dim, Tensor output) -> Tensor"""
    return gradient_of_running_product(op, grad, input, output, axis(input, dim)) if rank(input) else grad


@register(aten.count_nonzero.default, promote="bool")
def count_nonzero(op: Any, self: ir.Value, dim: int | None = None) -> ir.Value:
    """count_nonzero(Tensor self, int? dim=None) -> Tensor"""
    return count_nonzero_dim(op, self, dim)


@register(aten.count_nonzero.dim_IntList, promote="bool")
def count_nonzero_dim(op: Any, self: ir.Value, dim: Dims) -> ir.Value:
    """count_nonzero.dim_IntList(Tensor self, int[] dim) -> Tensor"""
    return sum_dim(op, typed_like(op.Cast(self, to=ir.DataType.INT64), self), dim)


def typed_like(value: ir.Value, like: ir.Value) -> ir.Value:
    """`value` with the shape of `like`, of which it is an elementwise function."""
    value.shape = like.shape
    return value


# -- extremes


def nan_at(op: Any, value: ir.Value) -> ir.Value | None:
    """1 where `value` is NaN, as bytes; None for integers. ONNX Runtime's vectorised extremes overlook NaN."""
    assert value.dtype is not None
    return typed_like(op.Cast(op.IsNaN(value), to=ir.DataType.UINT8), value) if value.dtype.is_floating_point() else None


def extreme(op: Any, kind: str, value: ir.Value, at: Sequence[int], keepdim: bool) -> ir.Value:
    """The largest or smallest (`kind`: ReduceMax or ReduceMin) of `value` along axes; NaN where one is, as in PyTorch."""
    if rank(value) == 0:
        return value
    if value.dtype == ir.DataType.BOOL:
        value = typed_like(op.Cast(value, to=ir.DataType.UINT8), value)
    found = reduce_along(op, kind, value, at, keepdim)
    nans = nan_at(op, value)
    if nans is None:
        return found
    any_nan = op.Cast(reduce_along(op, "ReduceMax", nans, at, keepdim), to=ir.DataType.BOOL)
    return op.Where(any_nan, scalar_like(op, math.nan, value), found)


@register(aten.amax.default)
def amax(op: Any, self: ir.Value, dim: Dims = (), keepdim: bool = False) -> ir.Value:
    """amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return extreme(op, "ReduceMax", self, axes(self, dim), keepdim)


@register(aten.amin.default)
def amin(op: Any, self: ir.Value, dim: Dims = (), keepdim: bool = False) -> ir.Value:
    """amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return extreme(op, "ReduceMin", self, axes(self, dim), keepdim)


@register(aten.max.default)
def max_(op: Any, self: ir.Value) -> ir.Value:
    """max(Tensor self) -> Tensor"""
    return amax(op, self)


@register(aten.min.default)
def min_(op: Any, self: ir.Value) -> ir.Value:
    """min(Tensor self) -> Tensor"""
    return amin(op, self)


@register(aten.aminmax.default)
def aminmax(op: Any, self: ir.Value, dim: int | None = None, keepdim: bool = False) -> Sequence[ir.Value]:
    """aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)"""
    return amin(op, self, dim, keepdim), amax(op, self, dim, keepdim)


def _arg(op: Any, kind: str, value: ir.Value, at: int) -> ir.Value:
    """The index of the first extreme along an axis, which is kept; NaN is one, as in PyTorch."""
    if value.dtype == ir.DataType.BOOL:
        value = typed_like(op.Cast(value, to=ir.DataType.INT32), value)
    if value.dtype == ir.DataType.INT64:  # ONNX Runtime has no kernel; the first of equal elements leads in TopK as well
        return op.TopK(value, int64s(op, [1]), axis=at, largest=int(kind == "ArgMax"), _outputs=2)[1]
    found = getattr(op, kind)(value, axis=at, keepdims=1)
    nans = nan_at(op, value)
    if nans is None:
        return found
    any_nan = op.Cast(reduce_along(op, "ReduceMax", nans, [at], True), to=ir.DataType.BOOL)
    return op.Where(any_nan, op.ArgMax(nans, axis=at, keepdims=1), found)


def argmax_nan(op: Any, value: ir.Value, at: int) -> ir.Value:
    """The index of the first maximum along an axis, which is kept; NaN is one."""
    return _arg(op, "ArgMax", value, at)


def _argument(op: Any, kind: str, value: ir.Value, dim: int | None, keepdim: bool) -> ir.Value:
    if rank(value) == 0:
        return constant(op, 0, ir.DataType.INT64)
    if dim is not None:
        at = axis(value, dim)
        found = _arg(op, kind, value, at)
        return found if keepdim else op.Squeeze(found, int64s(op, [at]))
    flat = op.Reshape(value, int64s(op, [-1]))
    flat.shape = ir.Shape([None])
    return op.Reshape(_arg(op, kind, flat, 0), int64s(op, [1] * rank(value) if keepdim else []))


@register(aten.argmax.default)
def argmax(op: Any, self: ir.Value, dim: int | None = None, keepdim: bool = False) -> ir.Value:
    """argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    return _argument(op, "ArgMax", self, dim, keepdim)


@register(aten.argmin.default)
def argmin(op: Any, self: ir.Value, dim: int | None = None, keepdim: bool = False) -> ir.Value:
    """argmin(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    return _argument(op, "ArgMin", self, dim, keepdim)


def _extreme_and_index(op: Any, kind: str, value: ir.Value, dim: int, keepdim: bool) -> Sequence[ir.Value]:
    if rank(value) == 0:
        return value, constant(op, 0, ir.DataType.INT64)
    at = axis(value, dim)
    index = _arg(op, kind, value, at)
    found = op.GatherElements(value, index, axis=at)
    return (found, index) if keepdim else (op.Squeeze(found, int64s(op, [at])), op.Squeeze(index, int64s(op, [at])))


@register(aten.max.dim)
def max_dim(op: Any, self: ir.Value, dim: int, keepdim: bool = False) -> Sequence[ir.Value]:
    """max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _extreme_and_index(op, "ArgMax", self, dim, keepdim)


@register(aten.min.dim)
def min_dim(op: Any, self: ir.Value, dim: int, keepdim: bool = False) -> Sequence[ir.Value]:
    """min.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _extreme_and_index(op, "ArgMin", self, dim, keepdim)


# -- any, all


@register(aten.any.default, promote="bool")
def any_(op: Any, self: ir.Value) -> ir.Value:
    """any(Tensor self) -> Tensor"""
    return any_dims(op, self)


@register(aten.any.dim, promote="bool")
def any_dim(op: Any, self: ir.Value, dim: int, keepdim: bool = False) -> ir.Value:
    """any.dim(Tensor self, int dim, bool keepdim=False) -> Tensor"""
    return any_dims(op, self, dim, keepdim)


@register(aten.any.dims, promote="bool")
def any_dims(op: Any, self: ir.Value, dim: Dims = None, keepdim: bool = False) -> ir.Value:
    """any.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    if not isinstance(dim, int) and dim is not None and len(dim) == 0:
        return self
    at = axes(self, dim)
    if rank(self) == 0:
        return self
    filled = all(_never_empty(self, i) for i in at)
    bytes_ = typed_like(op.Cast(self, to=ir.DataType.UINT8 if filled else ir.DataType.INT32), self)
    return op.Cast(reduce_along(op, "ReduceMax" if filled else "ReduceSum", bytes_, at, keepdim), to=ir.DataType.BOOL)


@register(aten.all.default, promote="bool")
def all_(op: Any, self: ir.Value) -> ir.Value:
    """all(Tensor self) -> Tensor"""
    return all_dims(op, self)


@register(aten.all.dim, promote="bool")
def all_dim(op: Any, self: ir.Value, dim: int, keepdim: bool = False) -> ir.Value:
    """all.dim(Tensor self, int dim, bool keepdim=False) -> Tensor"""
    return all_dims(op, self, dim, keepdim)


@register(aten.all.dims, promote="bool")
def all_dims(op: Any, self: ir.Value, dim: Dims = None, keepdim: bool = False) -> ir.Value:
    """all.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    return negated(op, any_dims(op, typed_like(negated(op, self), self), dim, keepdim))


# -- statistics and norms


def _variance(op: Any, value: ir.Value, dim: Dims, correction: Correction, keepdim: bool) -> tuple[ir.Value, ir.Value]:
    """Variance and mean, the mean with its reduced axes kept.

    Of the differences from the first element: of equal ones it is 0, where the rounded mean of many 0.1 is not 0.1, and the gradient of a deviation
    of 1e-8 would be anything.
    """
    at = axes(value, dim)
    if at:
        first = op.Slice(value, int64s(op, [0] * len(at)), int64s(op, [1] * len(at)), int64s(op, at))
        if any(map(may_be_zero, [value.shape[i] for i in at])):  # type: ignore[index]
            first = reduce_along(op, "ReduceSum", first, at, True)  # of nothing it is 0
        value = typed_like(op.Sub(value, first), value)
    mean = mean_dim(op, value, dim, True)
    centred = typed_like(op.Sub(value, mean), value)
    count = _count(op, value, at)
    freedom = op.Max(op.Sub(count, scalar_like(op, 1.0 if correction is None else correction, value)), scalar_like(op, 0.0, value))
    return op.Div(reduce_along(op, "ReduceSumSquare", centred, at, keepdim), freedom), op.Add(mean, first) if at else mean


@register(aten.var.correction)
def var(op: Any, self: ir.Value, dim: Dims = None, correction: Correction = None, keepdim: bool = False) -> ir.Value:
    """var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    return _variance(op, self, dim, correction, keepdim)[0]


@register(aten.std.correction)
def std(op: Any, self: ir.Value, dim: Dims = None, correction: Correction = None, keepdim: bool = False) -> ir.Value:
    """std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    return op.Sqrt(_variance(op, self, dim, correction, keepdim)[0])


def _with_mean(op: Any, value: ir.Value, dim: Dims, mean: ir.Value, keepdim: bool) -> ir.Value:
    return mean if keepdim or rank(value) == 0 else op.Squeeze(mean, int64s(op, axes(value, dim)))


@register(aten.var_mean.correction)
def var_mean(op: Any, self: ir.Value, dim: Dims = None, correction: Correction = None, keepdim: bool = False) -> Sequence[ir.Value]:
    """var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> (Tensor, Tensor)"""
    variance, mean = _variance(op, self, dim, correction, keepdim)
    return variance, _with_mean(op, self, dim, mean, keepdim)


@register(aten.std_mean.correction)
def std_mean(op: Any, self: ir.Value, dim: Dims = None, correction: Correction = None, keepdim: bool = False) -> Sequence[ir.Value]:
    """std_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> (Tensor, Tensor)"""
    variance, mean = _variance(op, self, dim, correction, keepdim)
    return op.Sqrt(variance), _with_mean(op, self, dim, mean, keepdim)


@register(aten.logsumexp.default, promote="output")
def logsumexp(op: Any, self: ir.Value, dim: Dims, keepdim: bool = False) -> ir.Value:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor"""
    if rank(self) == 0:
        return self
    at = axes(self, dim)
    if not all(_never_empty(self, i) for i in at):
        return reduce_along(op, "ReduceLogSumExp", self, at, keepdim)
    # ONNX Runtime's ReduceLogSumExp takes an infinite largest element off itself, which is NaN.
    largest = reduce_along(op, "ReduceMax", self, at, keepdim=True)
    finite = op.Where(op.IsInf(largest), scalar_like(op, 0.0, largest), largest)
    total = op.Add(op.Log(reduce_along(op, "ReduceSum", exp(op, op.Sub(self, finite)), at, keepdim=True)), finite)
    return total if keepdim else op.Squeeze(total, int64s(op, at))
