"""Embedding bags: rows of a table reduced bag by bag, and the gradients for table and weights of the samples.

Samples that belong to no bag (padding, or behind the last offset) go to one more bag, which is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import element_count, length, plus, refuse_empty, size
from ort_backend.lowering.constants import as_int64, constant, int64s, scalar_like
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.creation import filled
from ort_backend.lowering.ops.indexing import from_front
from ort_backend.lowering.ops.running import running_sum
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value
_SUM, _MEAN, _MAX = range(3)


def _column(op: Any, value: ir.Value) -> ir.Value:
    return op.Unsqueeze(value, int64s(op, [1]))


def _bag_of_each(op: Any, indices: ir.Value, offsets: ir.Value) -> ir.Value:
    """(samples,) int64: how many offsets lie at or before a sample, less one."""
    starts, samples = as_int64(op, offsets), size(indices, 0)
    zeros = filled(op, [plus(op, length(op, indices, 0), 1)], 0, ir.DataType.INT64)
    ones = filled(op, [length(op, offsets, 0)], 1, ir.DataType.INT64)
    marks = op.ScatterND(zeros, _column(op, starts), ones, reduction="add")
    marks = typed(marks, ir.DataType.INT64, [None if samples is None else samples + 1])
    bags = op.Sub(running_sum(op, marks, 0), constant(op, 1, ir.DataType.INT64))
    found = op.Slice(bags, int64s(op, [0]), op.Shape(indices), int64s(op, [0]))
    return typed(found, ir.DataType.INT64, indices.shape)


def _without_padding(op: Any, bags: ir.Value, indices: ir.Value, padding_idx: int, count: Size) -> ir.Value:
    """`bags`, with samples of the padding index in bag number `count`."""
    if padding_idx < 0:
        return bags
    last = count if isinstance(count, ir.Value) else constant(op, count, ir.DataType.INT64)
    return typed(op.Where(op.Equal(indices, scalar_like(op, padding_idx, indices)), last, bags), ir.DataType.INT64, bags.shape)


def _gathered(op: Any, table: ir.Value, indices: ir.Value) -> ir.Value:
    """Rows of a table in the dtype that they are added in."""
    rows = op.Gather(table, from_front(op, indices), axis=0)
    return op.Cast(rows, to=ir.DataType.FLOAT) if table.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else rows


def _reduced(op: Any, rows: ir.Value, bags: ir.Value, count: Size, width: Size, start: float, reduction: str, dtype: ir.DataType) -> ir.Value:
    """(count, width): the rows of each bag added up, or their maximum."""
    base = filled(op, [plus(op, count, 1), width], start, dtype)
    total = op.ScatterND(base, _column(op, bags), rows, reduction=reduction)
    return op.Slice(total, int64s(op, [0]), as_vector(op, [count]), int64s(op, [0]))


def _sizes(op: Any, bags: ir.Value, count: Size) -> ir.Value:
    """(count,) int64: how many samples each bag has."""
    zeros = filled(op, [plus(op, count, 1)], 0, ir.DataType.INT64)
    ones = filled(op, [length(op, bags, 0)], 1, ir.DataType.INT64)
    return op.Slice(op.ScatterND(zeros, _column(op, bags), ones, reduction="add"), int64s(op, [0]), as_vector(op, [count]), int64s(op, [0]))


@register(aten._embedding_bag.default, aten._embedding_bag_forward_only.default, any_dtype=True)
def embedding_bag(
    op: Any,
    weight: ir.Value,
    indices: ir.Value,
    offsets: ir.Value,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: ir.Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Sequence[ir.Value]:
    """_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq=False, int mode=0, bool sparse=False,
    Tensor? per_sample_weights=None, bool include_last_offset=False, int padding_idx=-1) -> (Tensor, Tensor, Tensor, Tensor)

    The results beside the first are those of PyTorch's kernel: in mode sum it counts nothing, and mostly numbers no samples.
    """
    count, width = plus(op, length(op, offsets, 0), -1 if include_last_offset else 0), length(op, weight, 1)
    if size(indices, 0) == 0:
        return _empty_bags(op, weight, mode, count, width)
    refuse_empty("bags", indices)
    every = _bag_of_each(op, indices, offsets)
    bags = _without_padding(op, every, indices, padding_idx, count)
    rows = _gathered(op, weight, indices)
    dtype = ir.DataType.DOUBLE if weight.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    if per_sample_weights is not None:
        rows = op.Mul(rows, _column(op, op.Cast(per_sample_weights, to=dtype)))
    if mode == _SUM:
        unnumbered = weight.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16) and padding_idx < 0
        none = filled(op, [count], 0, ir.DataType.INT64)
        none.meta["bags"] = bags
        numbers = constant(op, [], ir.DataType.INT64) if unnumbered else every
        return _reduced(op, rows, bags, count, width, 0.0, "add", dtype), op.Identity(numbers), none, op.Identity(none)
    counts = _sizes(op, bags, count)
    counts.meta["bags"] = bags
    if mode == _MEAN:
        total = _reduced(op, rows, bags, count, width, 0.0, "add", dtype)
        return op.Div(total, _divisor(op, counts, dtype)), op.Identity(every), counts, op.Identity(counts)
    largest, chosen = _maxima(op, rows, indices, bags, counts, count, width, dtype)
    return largest, op.Identity(every), counts, chosen


def _empty_bags(op: Any, weight: ir.Value, mode: int, count: Size, width: Size) -> Sequence[ir.Value]:
    """What `embedding_bag` returns where no bag has a sample."""
    assert weight.dtype is not None
    chosen = [count, width] if mode == _MAX else [count]
    none = [filled(op, shape, 0, ir.DataType.INT64) for shape in ([0], [count], chosen)]
    return filled(op, [count, width], 0.0, weight.dtype), *none


def _divisor(op: Any, counts: ir.Value, dtype: ir.DataType) -> ir.Value:
    """(bags, 1): the number of samples, 1 for a bag without any."""
    return _column(op, op.Cast(op.Max(as_int64(op, counts), constant(op, 1, ir.DataType.INT64)), to=dtype))


def _maxima(
    op: Any, rows: ir.Value, indices: ir.Value, bags: ir.Value, counts: ir.Value, count: Size, width: Size, dtype: ir.DataType
) -> tuple[ir.Value, ir.Value]:
    """The largest element of each column of a bag, zero for an empty one, and the row of the table that it comes from: the first of equal ones."""
    largest = _reduced(op, rows, bags, count, width, -math.inf, "max", dtype)
    fill = constant(op, [[0.0]], dtype)
    padded = op.Concat(largest, op.Expand(fill, as_vector(op, [1, width])), axis=0)
    total = element_count(op, indices)
    position = op.Range(constant(op, 0, ir.DataType.INT64), total, constant(op, 1, ir.DataType.INT64))
    candidates = op.Where(op.Equal(rows, op.Gather(padded, bags, axis=0)), _column(op, position), total)
    none = op.Expand(total, as_vector(op, [plus(op, count, 1), width]))
    first = op.ScatterND(none, _column(op, bags), candidates, reduction="min")
    first = op.Slice(first, int64s(op, [0]), as_vector(op, [count]), int64s(op, [0]))
    empty = _column(op, op.Equal(counts, constant(op, 0, ir.DataType.INT64)))
    zero = constant(op, 0, ir.DataType.INT64)
    chosen = op.Where(empty, zero, op.Gather(as_int64(op, indices), op.Where(empty, zero, op.Min(first, op.Sub(total, 1))), axis=0))
    return op.Where(empty, constant(op, 0.0, dtype), largest), chosen


@register(
    aten._embedding_bag_backward.default,
    promote="output",
    keep=("indices", "offsets", "offset2bag", "bag_size", "maximum_indices", "num_weights"),
)
def embedding_bag_backward(
    op: Any,
    grad: ir.Value,
    indices: ir.Value,
    offsets: ir.Value,
    offset2bag: ir.Value,
    bag_size: ir.Value,
    maximum_indices: ir.Value,
    num_weights: Size,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: ir.Value | None,
    padding_idx: int = -1,
) -> ir.Value:
    """_embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, Tensor bag_size, Tensor maximum_indices,
    SymInt num_weights, bool scale_grad_by_freq, int mode, bool sparse, Tensor? per_sample_weights, int padding_idx=-1) -> Tensor
    """
    if sparse:
        raise Unsupported("a sparse gradient")
    assert grad.dtype is not None
    width = length(op, grad, 1)
    zeros = filled(op, [num_weights, width], 0.0, grad.dtype)
    if size(indices, 0) == 0:
        return zeros
    refuse_empty("bags", indices)
    if scale_grad_by_freq and mode != _MAX:
        raise Unsupported("PyTorch's kernel divides by the frequency of another index")
    if mode == _MAX:
        filled_bags = op.Cast(op.Greater(as_int64(op, bag_size), constant(op, 0, ir.DataType.INT64)), to=grad.dtype)
        return op.ScatterElements(zeros, as_int64(op, maximum_indices), op.Mul(grad, _column(op, filled_bags)), axis=0, reduction="add")
    if mode == _MEAN:
        grad = op.Div(grad, _divisor(op, bag_size, grad.dtype))
    updates = _of_samples(op, grad, indices, offsets, bag_size, padding_idx)
    flat = as_int64(op, indices)
    flat.shape = indices.shape
    if per_sample_weights is not None:
        updates = op.Mul(updates, _column(op, per_sample_weights))
    return op.ScatterND(zeros, _column(op, flat), updates, reduction="add")


def _of_samples(op: Any, grad: ir.Value, indices: ir.Value, offsets: ir.Value, bag_size: ir.Value | None, padding_idx: int) -> ir.Value:
    """(samples, width): the gradient of each sample's bag, zero where it has none."""
    count = length(op, grad, 0)
    bags = None if bag_size is None else bag_size.meta.get("bags")
    if bags is None:
        bags = _without_padding(op, _bag_of_each(op, indices, offsets), indices, padding_idx, count)
    assert grad.dtype is not None
    padded = op.Concat(grad, filled(op, [1, length(op, grad, 1)], 0.0, grad.dtype), axis=0)
    return op.Gather(padded, bags, axis=0)


@register(aten._embedding_bag_per_sample_weights_backward.default, promote="output", keep=("indices", "offsets", "offset2bag"))
def embedding_bag_per_sample_weights_backward(
    op: Any, grad: ir.Value, weight: ir.Value, indices: ir.Value, offsets: ir.Value, offset2bag: ir.Value, mode: int, padding_idx: int = -1
) -> ir.Value:
    """_embedding_bag_per_sample_weights_backward(Tensor grad, Tensor weight, Tensor indices, Tensor offsets, Tensor offset2bag, int mode,
    int padding_idx=-1) -> Tensor
    """
    if size(indices, 0) == 0:
        assert grad.dtype is not None
        return filled(op, [0], 0.0, grad.dtype)
    refuse_empty("bags", indices)
    rows = _of_samples(op, grad, indices, offsets, None, padding_idx)
    return op.ReduceSum(op.Mul(rows, op.Gather(weight, indices, axis=0)), int64s(op, [1]), keepdims=0)
