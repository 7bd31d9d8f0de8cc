"""Adaptive pooling: windows that divide an axis into a given number of parts, of sizes that may differ by one.

Averages are matrix products along each axis, maxima of equal windows ONNX's MaxPool, those of unequal windows extremes of gathered windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.axes import length, rank, size
from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.pooling import max_pool, scatter_maxima
from ort_backend.lowering.ops.reduction import argmax_nan
from ort_backend.lowering.ops.resizing import along_axis
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value


def _bounds(total: int, parts: int) -> list[tuple[int, int]]:
    """Where each window starts and ends."""
    return [(i * total // parts, -(-(i + 1) * total // parts)) for i in range(parts)]


def _averaging(total: int, parts: int) -> np.ndarray:
    """(parts, total): row i averages the elements of window i."""
    matrix: np.ndarray = np.zeros([parts, total])
    for i, (start, end) in enumerate(_bounds(total, parts)):
        matrix[i, start:end] = 1 / (end - start)
    return matrix


def _averaging_value(op: Any, total: Size, parts: Size, dtype: ir.DataType) -> ir.Value:
    """The same for sizes that are not known."""
    zero, one = (constant(op, number, ir.DataType.INT64) for number in (0, 1))
    total, parts = (number if isinstance(number, ir.Value) else constant(op, number, ir.DataType.INT64) for number in (total, parts))
    window = op.Unsqueeze(op.Range(zero, parts, one), int64s(op, [1]))
    start = op.Div(op.Mul(window, total), parts)
    end = op.Div(op.Add(op.Mul(op.Add(window, one), total), op.Sub(parts, one)), parts)
    place = op.Range(zero, total, one)
    inside = op.And(op.GreaterOrEqual(place, start), op.Less(place, end))
    return op.Div(op.Cast(inside, to=dtype), op.Cast(op.Sub(end, start), to=dtype))


def _averaged(op: Any, value: ir.Value, at: int, total: Size, parts: Size, *, back: bool) -> ir.Value:
    """One axis of `total` elements as `parts` averages, or the gradient of that."""
    assert value.dtype is not None
    new = total if back else parts
    if isinstance(total, int) and isinstance(parts, int):
        matrix = _averaging(total, parts)
        forth, turned = constant(op, matrix, value.dtype), constant(op, matrix.T.copy(), value.dtype)
    else:
        forth = _averaging_value(op, total, parts, value.dtype)
        turned = op.Transpose(forth, perm=[1, 0])
    return along_axis(op, value, at, turned, forth, new) if back else along_axis(op, value, at, forth, turned, new)


def _average(op: Any, value: ir.Value, output_size: Sequence[Size]) -> ir.Value:
    spatial = len(output_size)
    behind = list(range(-spatial, 0))
    if all(part == 1 for part in output_size if isinstance(part, int)) and not any(isinstance(part, ir.Value) for part in output_size):
        return op.ReduceMean(value, int64s(op, behind), keepdims=1)
    cells = _equal_cells(value, output_size)
    if cells is not None:
        lead = [length(op, value, i) for i in range(rank(value) - spatial)]
        apart = op.Reshape(value, as_vector(op, [*lead, *cells]))
        return op.ReduceMean(apart, int64s(op, range(len(lead) + 1, len(lead) + 2 * spatial, 2)), keepdims=0)
    for i, at in enumerate(range(rank(value) - spatial, rank(value))):
        value = _averaged(op, value, at, length(op, value, at), output_size[i], back=False)
    return value


def _equal_cells(value: ir.Value, output_size: Sequence[Size]) -> list[int] | None:
    """Number and size of the windows of each axis, one after the other; None if they are not all equal, or not known."""
    cells: list[int] = []
    for at, parts in enumerate(output_size, rank(value) - len(output_size)):
        total = size(value, at)
        if total is None or not isinstance(parts, int) or parts == 0 or total % parts:
            return None
        cells += [parts, total // parts]
    return cells


def _average_backward(op: Any, grad: ir.Value, like: ir.Value, spatial: int) -> ir.Value:
    first = rank(grad) - spatial
    if all(size(grad, at) == 1 for at in range(first, rank(grad))):
        count = op.Cast(op.ReduceProd(op.Shape(like, start=-spatial), keepdims=0), to=like.dtype)
        return op.Expand(op.Div(grad, count), op.Shape(like))
    for at in range(first, rank(grad)):
        grad = _averaged(op, grad, at, length(op, like, at), length(op, grad, at), back=True)
    return grad


@register(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(op: Any, self: ir.Value, output_size: Sequence[Size]) -> ir.Value:
    """_adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor"""
    return _average(op, self, output_size)


@register(aten._adaptive_avg_pool2d_backward.default, promote="output")
def adaptive_avg_pool2d_backward(op: Any, grad_output: ir.Value, self: ir.Value) -> ir.Value:
    """_adaptive_avg_pool2d_backward(Tensor grad_output, Tensor self) -> Tensor"""
    return _average_backward(op, grad_output, self, 2)


@register(aten._adaptive_avg_pool3d_backward.default, promote="output")
def adaptive_avg_pool3d_backward(op: Any, grad_output: ir.Value, self: ir.Value) -> ir.Value:
    """_adaptive_avg_pool3d_backward(Tensor grad_output, Tensor self) -> Tensor"""
    return _average_backward(op, grad_output, self, 3)


# -- maxima


@register(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(op: Any, self: ir.Value, output_size: Sequence[int]) -> Sequence[ir.Value]:
    """adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)"""
    if any(isinstance(part, ir.Value) or part == 0 for part in output_size):
        raise Unsupported("adaptive pooling of zero-sized tensors, or to dimensions of unknown size")
    cells = _equal_cells(self, output_size)
    if cells is not None:
        kernel = cells[1::2]
        return max_pool(op, self, len(kernel), {"kernel_shape": kernel, "strides": kernel, "pads": [0] * 2 * len(kernel)})
    totals = [size(self, at) for at in range(rank(self) - len(output_size), rank(self))]
    if any(total is None for total in totals):
        raise Unsupported("maxima of windows of unknown size")
    return _unequal_maxima(op, self, totals, output_size)  # type: ignore[arg-type]


def _unequal_maxima(op: Any, value: ir.Value, totals: Sequence[int], parts: Sequence[int]) -> Sequence[ir.Value]:
    """Every window in a row of its own, as long as the longest: a shorter one repeats its last element, which is never the first of equal ones."""
    rows = []
    for total, count in zip(totals, parts):
        bounds = _bounds(total, count)
        longest = max(end - start for start, end in bounds)
        rows.append(np.array([[min(start + i, end - 1) for i in range(longest)] for start, end in bounds]))
    places = rows[0]
    for total, more in zip(totals[1:], rows[1:]):  # (part..., part, element..., element)
        places = places[..., None, None] * total + more
        places = np.moveaxis(places, -2, places.ndim // 2 - 1)
    windows = places.reshape([*parts, -1])  # of places in a plane
    lead = [length(op, value, i) for i in range(rank(value) - len(totals))]
    planes = op.Reshape(value, as_vector(op, [*lead, math.prod(totals)]), allowzero=1)
    gathered = op.Gather(planes, constant(op, windows, ir.DataType.INT64), axis=len(lead))
    found = typed(gathered, value.dtype, [*value.shape[: len(lead)], *windows.shape])  # type: ignore[index]
    chosen = argmax_nan(op, found, rank(found) - 1)
    table = op.Expand(constant(op, windows, ir.DataType.INT64), op.Shape(found))
    last = int64s(op, [rank(found) - 1])
    return [op.Squeeze(op.GatherElements(each, chosen, axis=-1), last) for each in (found, table)]


@register(aten.adaptive_max_pool2d_backward.default, promote="output", keep=("indices",))
def adaptive_max_pool2d_backward(op: Any, grad_output: ir.Value, self: ir.Value, indices: ir.Value) -> ir.Value:
    """adaptive_max_pool2d_backward(Tensor grad_output, Tensor self, Tensor indices) -> Tensor"""
    return scatter_maxima(op, grad_output, self, indices, 2)


@register(aten.adaptive_max_pool3d_backward.default, promote="output", keep=("indices",))
def adaptive_max_pool3d_backward(op: Any, grad_output: ir.Value, self: ir.Value, indices: ir.Value) -> ir.Value:
    """adaptive_max_pool3d_backward(Tensor grad_output, Tensor self, Tensor indices) -> Tensor"""
    return scatter_maxima(op, grad_output, self, indices, 3)
