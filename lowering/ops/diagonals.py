"""Diagonals of matrices, with their gradients and `_scatter` counterparts, for sizes that are known and that are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, length, rank
from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.ops.comparison import where_
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value


def _plus(op: Any, a: Size, b: Size) -> Size:
    return a + b if isinstance(a, int) and isinstance(b, int) else op.Add(a, b)


def _minus(op: Any, a: Size, b: Size) -> Size:
    return a - b if isinstance(a, int) and isinstance(b, int) else op.Sub(a, b)


def _times(op: Any, a: Size, b: Size) -> Size:
    return a * b if isinstance(a, int) and isinstance(b, int) else op.Mul(a, b)


def _least(op: Any, a: Size, b: Size) -> Size:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else op.Min(a, b)


def _at_least_none(op: Any, a: Size) -> Size:
    return max(a, 0) if isinstance(a, int) else op.Max(a, 0)


def _start(op: Any, offset: int, columns: Size) -> Size:
    """Where a diagonal starts in its flattened matrix."""
    return offset if offset >= 0 else _times(op, columns, -offset)


def _behind(order_of: int, dim1: int, dim2: int) -> list[int]:
    """The axes in the order that puts `dim1` and `dim2` last."""
    return [*(i for i in range(order_of) if i not in (dim1, dim2)), dim1, dim2]


@register(aten.diagonal.default, any_dtype=True)
def diagonal(op: Any, self: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    order = _behind(rank(self), axis(self, dim1), axis(self, dim2))
    *outer, rows, columns = (length(op, self, i) for i in order)
    fits = _least(op, rows, _minus(op, columns, offset)) if offset >= 0 else _least(op, _plus(op, rows, offset), columns)
    count = _at_least_none(op, fits)
    start, step = _start(op, offset, columns), _plus(op, columns, 1)
    flat = op.Reshape(op.Transpose(self, perm=order), as_vector(op, [*outer, _times(op, rows, columns)]), allowzero=1)
    end = _plus(op, start, _times(op, count, step))
    return op.Slice(flat, as_vector(op, [start]), as_vector(op, [end]), int64s(op, [len(outer)]), as_vector(op, [step]))


def _on_diagonal(op: Any, value: ir.Value, whole: Sequence[Size], offset: int, dim1: int, dim2: int) -> ir.Value:
    """Zeros of sizes `whole` with `value` on a diagonal.

    Every element with `columns` zeros behind it: in a row of these, each stands one column further than the one before.
    """
    order = _behind(len(whole), dim1, dim2)
    *outer, rows, columns = (whole[i] for i in order)
    count = length(op, value, rank(value) - 1)
    n, start = len(outer), _start(op, offset, columns)
    cell = op.Reshape(value, as_vector(op, [*outer, count, 1]), allowzero=1)
    width = _times(op, count, _plus(op, columns, 1))
    row = op.Reshape(op.Pad(cell, as_vector(op, [0] * (n + 2) + [0] * (n + 1) + [columns])), as_vector(op, [*outer, width]), allowzero=1)
    total = _times(op, rows, columns)
    missing = _minus(op, _minus(op, total, start), width)
    # ONNX Runtime's Pad writes past its output where it extends one end of an axis and cuts the other (1.19.2).
    flat = op.Pad(row, as_vector(op, [0] * n + [start] + [0] * n + [_at_least_none(op, missing)]))
    if not isinstance(missing, int) or missing < 0:
        flat = op.Slice(flat, int64s(op, [0]), as_vector(op, [total]), int64s(op, [n]))
    matrix = op.Reshape(flat, as_vector(op, [*outer, rows, columns]), allowzero=1)
    back = [order.index(i) for i in range(len(whole))]
    return matrix if back == sorted(back) else op.Transpose(matrix, perm=back)


@register(aten.diagonal_backward.default, keep=("input_sizes",))
def diagonal_backward(op: Any, grad_output: ir.Value, input_sizes: Sequence[Size], offset: int, dim1: int, dim2: int) -> ir.Value:
    """diagonal_backward(Tensor grad_output, SymInt[] input_sizes, int offset, int dim1, int dim2) -> Tensor"""
    if any(isinstance(part, int) and part == 0 for part in (*input_sizes, *grad_output.shape)):  # type: ignore[misc]
        raise Unsupported("a diagonal of zero-sized tensors")
    return _on_diagonal(op, grad_output, input_sizes, offset, dim1 % len(input_sizes), dim2 % len(input_sizes))


@register(aten.diag_embed.default)
def diag_embed(op: Any, self: ir.Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> ir.Value:
    """diag_embed(Tensor self, int offset=0, int dim1=-2, int dim2=-1) -> Tensor"""
    whole = [length(op, self, i) for i in range(rank(self))]
    if any(isinstance(part, int) and part == 0 for part in whole):
        raise Unsupported("a diagonal of zero-sized tensors")
    side = _plus(op, whole.pop(), abs(offset))
    a, b = dim1 % (rank(self) + 1), dim2 % (rank(self) + 1)
    for at in sorted((a, b)):
        whole.insert(at, side)
    return _on_diagonal(op, self, whole, offset, a, b)


@register(aten.diagonal_scatter.default)
def diagonal_scatter(op: Any, self: ir.Value, src: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    whole = [length(op, self, i) for i in range(rank(self))]
    if any(isinstance(part, int) and part == 0 for part in (*whole, *src.shape)):  # type: ignore[misc]
        raise Unsupported("a diagonal of zero-sized tensors")
    a, b = axis(self, dim1), axis(self, dim2)
    mask = op.Equal(_places(op, whole[a], offset, a, rank(self)), _places(op, whole[b], 0, b, rank(self)))
    return where_(op, mask, _on_diagonal(op, src, whole, offset, a, b), self)


def _places(op: Any, count: Size, first: int, at: int, ranks: int) -> ir.Value:
    """`count` numbers from `first` on, along axis `at` of `ranks`."""
    end = _plus(op, count, first)
    stop = end if isinstance(end, ir.Value) else constant(op, end, ir.DataType.INT64)
    numbers = op.Range(constant(op, first, ir.DataType.INT64), stop, constant(op, 1, ir.DataType.INT64))
    return op.Unsqueeze(numbers, int64s(op, [i for i in range(ranks) if i != at]))
