"""Elements picked out and put in along one axis by an index tensor: embeddings, gather and scatter."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, length, rank, size, sizes
from ort_backend.lowering.constants import Scalar, as_int64, constant, int64s, scalar_like
from ort_backend.lowering.kernels.batched_rows import ADD_TO_ROWS, ROWS_OF
from ort_backend.lowering.kernels.row_sums import ZERO_TABLE
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.creation import filled
from ort_backend.lowering.ops.ordering import no_sizes
from ort_backend.lowering.ops.shape import dim_name, move_axis
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value


_LARGEST = {ir.DataType.INT64: (1 << 63) - 1, ir.DataType.INT32: (1 << 31) - 1}


def from_front(op: Any, index: ir.Value) -> ir.Value:
    """The index with what is negative out of range: ONNX counts that from the end, where PyTorch's operators raise an error.

    On a GPU ONNX Runtime's kernels raise none for what is out of range, and there is none for this (1.19.2).
    """
    if index.dtype not in _LARGEST or op.builder.root.device_type != "cpu":
        return index
    return typed(op.BitwiseAnd(index, constant(op, _LARGEST[index.dtype], index.dtype)), index.dtype, index.shape)


# -- embeddings


@register(aten.embedding.default, any_dtype=True)
def embedding(
    op: Any, weight: ir.Value, indices: ir.Value, padding_idx: Size = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> ir.Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) -> Tensor"""
    return op.Gather(weight, from_front(op, indices), axis=0)


@register(aten.embedding_dense_backward.default, promote="output", keep=("indices", "num_weights"))
def embedding_dense_backward(
    op: Any, grad_output: ir.Value, indices: ir.Value, num_weights: Size, padding_idx: Size, scale_grad_by_freq: bool
) -> ir.Value:
    """embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt padding_idx, bool scale_grad_by_freq) -> Tensor

    ONNX Runtime's GatherGrad takes three times as long as adding into zeros.
    """
    if isinstance(padding_idx, ir.Value):
        raise Unsupported("a symbolic padding index")
    dtype = grad_output.dtype
    assert dtype is not None
    if scale_grad_by_freq:
        grad_output = op.Div(grad_output, op.Unsqueeze(frequency(op, as_int64(op, indices), num_weights, dtype), int64s(op, [-1])))
    if padding_idx >= 0:
        is_padding = op.Equal(as_int64(op, indices), constant(op, padding_idx, ir.DataType.INT64))
        grad_output = op.Where(op.Unsqueeze(is_padding, int64s(op, [-1])), constant(op, 0.0, dtype), grad_output)
    width = length(op, grad_output, rank(grad_output) - 1)
    zeros = filled(op, [num_weights, width], 0.0, dtype)
    return op.ScatterND(zeros, op.Unsqueeze(as_int64(op, indices), int64s(op, [rank(indices)])), grad_output, reduction="add")


@register(ZERO_TABLE, promote="output", keep=("count",))
def zero_table(op: Any, rows: ir.Value, count: Size) -> ir.Value:
    """ort_training::zero_table(Tensor rows, SymInt count) -> Tensor: written once the rows are there, and not before, in the forward."""
    assert rows.dtype is not None
    shape = op.Concat(as_vector(op, [count, length(op, rows, rank(rows) - 1)]), no_sizes(op, rows), axis=0)
    return filled(op, shape, 0.0, rows.dtype)


def frequency(op: Any, indices: ir.Value, rows: Size, dtype: ir.DataType) -> ir.Value:
    """For each index into `rows` rows, how often it occurs, in `dtype`."""
    flat = op.Reshape(indices, int64s(op, [-1]))
    ones = op.Expand(constant(op, 1.0, dtype), op.Shape(flat))
    counts = op.ScatterND(filled(op, [rows], 0.0, dtype), op.Unsqueeze(flat, int64s(op, [1])), ones, reduction="add")
    return op.Gather(counts, indices, axis=0)


# -- one index along one axis


@register(aten.gather.default, any_dtype=True)
def gather(op: Any, self: ir.Value, dim: int, index: ir.Value, sparse_grad: bool = False) -> ir.Value:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    if _empty(index):
        return _nothing(op, index, self)
    if rank(self) == 0 or rank(index) == 0:
        return op.Gather(op.Reshape(self, int64s(op, [-1])), from_front(op, index), axis=0)
    return op.GatherElements(self, from_front(op, index), axis=axis(self, dim))


def _empty(index: ir.Value) -> bool:
    """Whether nothing is indexed; such an index may have any rank."""
    assert index.shape is not None
    return any(part == 0 for part in index.shape)


def _nothing(op: Any, index: ir.Value, like: ir.Value) -> ir.Value:
    """No elements, in the shape of an empty index."""
    assert like.dtype is not None
    known = sizes(index)
    return filled(op, op.Shape(index) if known is None else known, 0, like.dtype)


def _scatter(op: Any, value: ir.Value, dim: int, index: ir.Value, updates: ir.Value, reduction: str) -> ir.Value:
    """ScatterElements, also for scalars."""
    if _empty(index):
        return value
    index = from_front(op, index)
    if rank(value) == 0 or rank(index) == 0:
        row = int64s(op, [-1])
        flat = value if rank(value) else op.Reshape(value, row)
        made = op.ScatterElements(flat, op.Reshape(index, row), op.Reshape(updates, row), axis=0, reduction=reduction)
        return made if rank(value) else op.Reshape(made, int64s(op, []))
    return op.ScatterElements(value, index, updates, axis=axis(value, dim), reduction=reduction)


def _updates(op: Any, src: ir.Value, index: ir.Value) -> ir.Value:
    """The part of `src` that `index` covers."""
    if rank(index) == 0 and rank(src) == 1:
        return op.Slice(src, int64s(op, [0]), int64s(op, [1]), int64s(op, [0]))
    if _empty(index) or rank(src) != rank(index):
        return src
    cut = [i for i in range(rank(index)) if dim_name(src, i) is None or dim_name(src, i) != dim_name(index, i)]
    if not cut:
        return src
    ends = as_vector(op, [length(op, index, i) for i in cut])
    return op.Slice(src, int64s(op, [0] * len(cut)), ends, int64s(op, cut))


@register(aten.scatter.src, any_dtype=True)
def scatter(op: Any, self: ir.Value, dim: int, index: ir.Value, src: ir.Value) -> ir.Value:
    """scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    return _scatter(op, self, dim, index, _updates(op, src, index), "none")


@register(aten.scatter.value, any_dtype=True)
def scatter_value(op: Any, self: ir.Value, dim: int, index: ir.Value, value: Scalar | ir.Value) -> ir.Value:
    """scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    return _scatter(op, self, dim, index, _spread(op, scalar_like(op, value, self), index), "none")


def _spread(op: Any, number: ir.Value, like: ir.Value) -> ir.Value:
    known = sizes(like)
    return op.Expand(number, op.Shape(like) if known is None else int64s(op, known))


@register(aten.scatter_add.default)
def scatter_add(op: Any, self: ir.Value, dim: int, index: ir.Value, src: ir.Value) -> ir.Value:
    """scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    return _scatter(op, self, dim, index, _updates(op, src, index), "add")


_REDUCTIONS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}


@register(aten.scatter.reduce)
def scatter_with_reduction(op: Any, self: ir.Value, dim: int, index: ir.Value, src: ir.Value, reduce: str) -> ir.Value:
    """scatter.reduce(Tensor self, int dim, Tensor index, Tensor src, *, str reduce) -> Tensor"""
    return _scatter(op, self, dim, index, _updates(op, src, index), _REDUCTIONS[reduce])


@register(aten.scatter.value_reduce)
def scatter_value_with_reduction(op: Any, self: ir.Value, dim: int, index: ir.Value, value: Scalar | ir.Value, reduce: str) -> ir.Value:
    """scatter.value_reduce(Tensor self, int dim, Tensor index, Scalar value, *, str reduce) -> Tensor"""
    return _scatter(op, self, dim, index, _spread(op, scalar_like(op, value, self), index), _REDUCTIONS[reduce])


@register(aten.scatter_reduce.two)
def scatter_reduce(op: Any, self: ir.Value, dim: int, index: ir.Value, src: ir.Value, reduce: str, include_self: bool = True) -> ir.Value:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True) -> Tensor"""
    assert self.dtype is not None
    updates = _updates(op, src, index)
    if not self.dtype.is_floating_point() and (reduce == "mean" or not include_self):
        raise Unsupported(f"scatter_reduce {reduce} of {self.dtype}")
    if not include_self:
        neutral = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": float("-inf"), "amin": float("inf")}[reduce]
        self = _typed(_scatter(op, self, dim, index, _spread(op, scalar_like(op, neutral, self), index), "none"), self)
    if reduce in ("amax", "amin"):
        return _scattered_extreme(op, self, dim, index, updates, _REDUCTIONS[reduce])
    if reduce != "mean":
        return _scatter(op, self, dim, index, updates, _REDUCTIONS[reduce])
    total = _scatter(op, self, dim, index, updates, "add")
    ones, zeros = _spread(op, scalar_like(op, 1.0, self), self), _spread(op, scalar_like(op, 0.0, self), index)
    if not include_self:
        ones = _typed(_scatter(op, _typed(ones, self), dim, index, _typed(zeros, index), "none"), self)
    count = _scatter(op, _typed(ones, self), dim, index, _spread(op, scalar_like(op, 1.0, self), index), "add")
    return op.Div(total, op.Max(count, scalar_like(op, 1.0, self)))


def _scattered_extreme(op: Any, value: ir.Value, dim: int, index: ir.Value, updates: ir.Value, reduction: str) -> ir.Value:
    """ONNX Runtime knows no extremes of bools, and its own of floats lose a NaN that comes first."""
    if value.dtype == ir.DataType.BOOL:
        value, updates = (_typed(op.Cast(one, to=ir.DataType.INT32), one) for one in (value, updates))
        return _scatter(op, value, dim, index, updates, reduction)
    found = _scatter(op, value, dim, index, updates, reduction)
    if not value.dtype.is_floating_point():  # type: ignore[union-attr]
        return found
    nans = [_typed(op.Cast(op.IsNaN(one), to=ir.DataType.FLOAT), one) for one in (value, updates)]
    any_nan = op.Greater(_scatter(op, nans[0], dim, index, nans[1], "add"), constant(op, 0.0, ir.DataType.FLOAT))
    return op.Where(any_nan, scalar_like(op, math.nan, value), found)


def _typed(value: ir.Value, like: ir.Value) -> ir.Value:
    """`value` with the shape of `like`."""
    value.shape = like.shape
    return value


@register(aten.index_select.default, any_dtype=True)
def index_select(op: Any, self: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    if rank(self) == 0:
        return self
    if rank(index) == 0:
        index = op.Reshape(index, int64s(op, [1]))
    return op.Gather(self, from_front(op, index), axis=axis(self, dim))


@register(ROWS_OF, any_dtype=True)
def rows_of(op: Any, self: ir.Value, index: ir.Value, batch: int) -> ir.Value:
    """ort_training::rows_of(Tensor self, Tensor index, int batch) -> Tensor"""
    places = op.Unsqueeze(as_int64(op, from_front(op, index)), int64s(op, [rank(index)]))
    return op.GatherND(self, places, batch_dims=batch)


@register(ADD_TO_ROWS)
def add_to_rows(op: Any, self: ir.Value, index: ir.Value, rows: ir.Value, batch: int) -> ir.Value:
    """ort_training::add_to_rows(Tensor self, Tensor index, Tensor rows, int batch) -> Tensor"""
    index = as_int64(op, from_front(op, index))
    places = [index]
    if batch:
        zero, one = constant(op, 0, ir.DataType.INT64), constant(op, 1, ir.DataType.INT64)
        shape = op.Shape(index) if (known := sizes(index)) is None else int64s(op, known)
        for i in reversed(range(batch)):
            behind = int64s(op, list(range(1, rank(index) - i)))
            numbers = op.Range(zero, op.Squeeze(as_vector(op, [length(op, index, i)])), one)
            places.insert(0, op.Expand(op.Unsqueeze(numbers, behind), shape))
    last = int64s(op, [rank(index)])
    return op.ScatterND(self, op.Concat(*(op.Unsqueeze(one, last) for one in places), axis=-1), rows, reduction="add")


def put_rows(op: Any, value: ir.Value, dim: int, index: ir.Value, source: ir.Value, reduction: str, *, negative: bool = False) -> ir.Value:
    """Writes the slices of `source` along an axis to the places that `index` names; `negative`: which may count from the end."""
    if not negative:
        index = from_front(op, index)
    if rank(value) == 0:
        one = int64s(op, [1])
        flat = op.ScatterND(
            op.Reshape(value, one), op.Reshape(as_int64(op, index), int64s(op, [-1, 1])), op.Reshape(source, int64s(op, [-1])), reduction=reduction
        )
        return op.Reshape(flat, int64s(op, []))
    at = axis(value, dim)
    rows = op.Reshape(as_int64(op, index), int64s(op, [-1, 1]))
    if rank(source) == 0:
        source = op.Reshape(source, int64s(op, [1]))
    made = op.ScatterND(move_axis(op, value, at, 0), rows, move_axis(op, source, at, 0), reduction=reduction)
    made.shape = ir.Shape([value.shape[at], *(part for i, part in enumerate(value.shape) if i != at)])  # type: ignore[arg-type, index]
    return move_axis(op, made, 0, at)


@register(aten.index_add.default)
def index_add(op: Any, self: ir.Value, dim: int, index: ir.Value, source: ir.Value, alpha: Scalar | ir.Value = 1) -> ir.Value:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    if isinstance(alpha, ir.Value) or alpha != 1:
        times = op.And if source.dtype == ir.DataType.BOOL else op.Mul
        source = times(source, scalar_like(op, alpha, source))
    return put_rows(op, self, dim, index, source, "add")


@register(aten.index_copy.default, any_dtype=True)
def index_copy(op: Any, self: ir.Value, dim: int, index: ir.Value, source: ir.Value) -> ir.Value:
    """index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor"""
    return put_rows(op, self, dim, index, source, "none")


@register(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, any_dtype=True)
def index_fill(op: Any, self: ir.Value, dim: int, index: ir.Value, value: Scalar | ir.Value) -> ir.Value:
    """index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    if rank(self) == 0:
        known = size(index, 0) if rank(index) else 1
        return self if known == 0 else scalar_like(op, value, self)
    at = axis(self, dim)
    count = 1 if rank(index) == 0 else length(op, index, 0)
    shape = [count if i == at else length(op, self, i) for i in range(rank(self))]
    source = op.Expand(scalar_like(op, value, self), as_vector(op, shape))
    source.shape = ir.Shape([None] * rank(self))
    return put_rows(op, self, dim, index, source, "none", negative=True)
