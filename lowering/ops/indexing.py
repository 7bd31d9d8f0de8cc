"""Elements picked out and put in by index tensors: embeddings, gather and scatter, advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, length, rank, same_shape, size, sizes
from ort_backend.lowering.constants import Scalar, constant, int64s, scalar_like
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.comparison import where_
from ort_backend.lowering.ops.creation import filled
from ort_backend.lowering.ops.running import running_sum
from ort_backend.lowering.ops.shape import dim_name, move_axis, permute
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value


def _int64(op: Any, index: ir.Value) -> ir.Value:
    return index if index.dtype == ir.DataType.INT64 else op.Cast(index, to=ir.DataType.INT64)


# -- embeddings


@register(aten.embedding.default, any_dtype=True)
def embedding(
    op: Any, weight: ir.Value, indices: ir.Value, padding_idx: Size = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> ir.Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) -> Tensor"""
    return op.Gather(weight, indices, axis=0)


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
        grad_output = op.Div(grad_output, op.Unsqueeze(frequency(op, _int64(op, indices), num_weights, dtype), int64s(op, [-1])))
    width = length(op, grad_output, rank(grad_output) - 1)
    zeros = filled(op, [num_weights, width], 0.0, dtype)
    total = op.ScatterND(zeros, op.Unsqueeze(_int64(op, indices), int64s(op, [rank(indices)])), grad_output, reduction="add")
    if padding_idx < 0:
        return total
    return op.ScatterND(total, constant(op, [[padding_idx]], ir.DataType.INT64), filled(op, [1, width], 0.0, dtype))


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
        flat = op.Gather(op.Reshape(self, int64s(op, [-1])), index, axis=0)
        return flat
    return op.GatherElements(self, index, axis=axis(self, dim))


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
    if rank(value) == 0 or rank(index) == 0:
        one = int64s(op, [1])
        flat = value if rank(value) else op.Reshape(value, one)
        made = op.ScatterElements(flat, op.Reshape(index, one), op.Reshape(updates, one), axis=0, reduction=reduction)
        return made if rank(value) else op.Reshape(made, int64s(op, []))
    return op.ScatterElements(value, index, updates, axis=axis(value, dim), reduction=reduction)


def _updates(op: Any, src: ir.Value, index: ir.Value) -> ir.Value:
    """The part of `src` that `index` covers."""
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
    if reduce != "mean":
        return _scatter(op, self, dim, index, updates, _REDUCTIONS[reduce])
    total = _scatter(op, self, dim, index, updates, "add")
    ones, zeros = _spread(op, scalar_like(op, 1.0, self), self), _spread(op, scalar_like(op, 0.0, self), index)
    if not include_self:
        ones = _typed(_scatter(op, _typed(ones, self), dim, index, _typed(zeros, index), "none"), self)
    count = _scatter(op, _typed(ones, self), dim, index, _spread(op, scalar_like(op, 1.0, self), index), "add")
    return op.Div(total, op.Max(count, scalar_like(op, 1.0, self)))


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
    return op.Gather(self, index, axis=axis(self, dim))


def put_rows(op: Any, value: ir.Value, dim: int, index: ir.Value, source: ir.Value, reduction: str) -> ir.Value:
    """Writes the slices of `source` along an axis to the places that `index` names."""
    if rank(value) == 0:
        one = int64s(op, [1])
        flat = op.ScatterND(
            op.Reshape(value, one), op.Reshape(_int64(op, index), int64s(op, [-1, 1])), op.Reshape(source, int64s(op, [-1])), reduction=reduction
        )
        return op.Reshape(flat, int64s(op, []))
    at = axis(value, dim)
    rows = op.Reshape(_int64(op, index), int64s(op, [-1, 1]))
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
    return put_rows(op, self, dim, index, source, "none")


# -- advanced indexing


def _positions(op: Any, indices: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """One integer index (or None) for each axis: a mask becomes the places where it is true."""
    found: list[ir.Value | None] = []
    for index in indices:
        if index is not None and index.dtype in (ir.DataType.BOOL, ir.DataType.UINT8):
            if rank(index) == 0:
                raise Unsupported("a mask without dimensions")
            places = op.NonZero(op.Cast(index, to=ir.DataType.BOOL) if index.dtype == ir.DataType.UINT8 else index)
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
        return op.Unsqueeze(_int64(op, parts[0]), int64s(op, [ranks])), ranks
    parts = [_int64(op, part) for part in parts]
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
        return op.Gather(self, _int64(op, parts[0]), axis=used[0])
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
    return op.Transpose(op.NonZero(self if self.dtype == ir.DataType.BOOL else op.Cast(self, to=ir.DataType.BOOL)), perm=[1, 0])


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
    rows = op.Reshape(_int64(op, index), int64s(op, [-1, 1]))
    made = op.ScatterND(op.Reshape(self, flat), rows, op.Reshape(source, flat), reduction="add" if accumulate else "none")
    return op.Reshape(made, op.Shape(self), allowzero=1)
