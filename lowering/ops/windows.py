"""Windows along an axis (`Tensor.unfold`), and windows added up, which are each other's gradients.

Both go by blocks of as many neighbours as length and distance of the windows are multiples of, and not by elements: of 251 windows of 512 samples,
128 apart, of 8 recordings ONNX Runtime copies blocks in 0.2 ms, samples in 7. Windows one apart have no such neighbours along the last axis: they
are rows of the whole (`_slid`). Of 19,905 windows of 96 numbers of 2 series, with a product and their gradient, elements took 24 ms, rows 15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, length, rank
from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.ops.shape import dim_name
from ort_backend.lowering.registry import register
from ort_backend.lowering.symbolic import as_vector, name_of, reshape

aten = torch.ops.aten

Size = int | ir.Value

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_FEW, _MANY = 16, 32  # elements of a window up to which, and windows from which on, they are copied as shifted rows


@register(aten.unfold.default, any_dtype=True)
def unfold(op: Any, self: ir.Value, dimension: int, size: int, step: int) -> ir.Value:
    """unfold(Tensor self, int dimension, int size, int step) -> Tensor"""
    if rank(self) == 0:
        return op.Reshape(self, int64s(op, [1])) if size == 1 else op.Reshape(self, int64s(op, [0]), allowzero=1)
    at = axis(self, dimension)
    last = [*(i for i in range(rank(self) + 1) if i != at + 1), at + 1]
    sizes = [length(op, self, i) for i in range(rank(self))]
    before, total, behind = sizes[:at], sizes[at], sizes[at + 1 :]
    if _tiles(total, size, step):
        return op.Transpose(reshape(op, self, [*before, total // size, size, *behind]), perm=last)
    block = _block(total, size, step)
    if isinstance(total, int) and step == 1 and 1 < size <= _FEW and at + 1 == rank(self) and total - size >= _MANY:
        return op.Transpose(_shifted(op, self, at, size, total), perm=[*range(at), at + 1, at])
    if at + 1 == rank(self) and self.dtype in _FLOATS and _slides(total, size, step):
        return op.Transpose(_slid(op, self, sizes, size), perm=[*range(at), at + 1, at])
    if isinstance(total, int) and block > 1:
        covered = _covered(total, size, step)
        part = self if covered == total else op.Slice(self, int64s(op, [0]), int64s(op, [covered]), int64s(op, [at]))
        blocks = op.Reshape(part, as_vector(op, [*before, covered // block, block, *behind]), allowzero=1)
        gathered = op.Gather(blocks, _windows(op, covered // block, size // block, step // block), axis=at)
        gathered = op.Reshape(gathered, as_vector(op, [*before, (covered - size) // step + 1, size, *behind]), allowzero=1)
    else:
        gathered = op.Gather(self, _windows(op, total, size, step), axis=at)
    return gathered if at + 1 == rank(self) else op.Transpose(gathered, perm=last)


def _shifted(op: Any, value: ir.Value, at: int, size: int, total: int) -> ir.Value:
    """The first element of every window, the second, and so on, each of them a row: windows one element apart are copied so, and not by elements."""
    ends = [(i, total - size + 1 + i) for i in range(size)]
    parts = [op.Slice(value, int64s(op, [start]), int64s(op, [end]), int64s(op, [at])) for start, end in ends]
    return op.Concat(*(op.Unsqueeze(part, int64s(op, [at])) for part in parts), axis=at)


def _slides(total: Size, size: int, step: int) -> TypeGuard[int]:
    """Whether windows are one element apart, and so many that a row of the whole axis for each of their elements is at most twice as much."""
    return isinstance(total, int) and step == 1 and 1 < size <= total - size + 1


def _slid(op: Any, value: ir.Value, sizes: Sequence[Size], size: int) -> ir.Value:
    """As `_shifted`, along the last axis. Where the axis is repeated, row after row, rows of one element more begin one element later each."""
    *before, total = sizes
    assert isinstance(total, int)
    ends = int64s(op, [len(before)])
    rows = op.Expand(op.Unsqueeze(value, ends), as_vector(op, [*before, size + 1, total]))
    flat = op.Reshape(rows, as_vector(op, [*before, (size + 1) * total]), allowzero=1)
    longer = reshape(op, op.Slice(flat, int64s(op, [0]), int64s(op, [size * (total + 1)]), ends), [*before, size, total + 1])
    return op.Slice(longer, int64s(op, [0]), int64s(op, [total - size + 1]), int64s(op, [len(before) + 1]))


def _slid_back(op: Any, grad_in: ir.Value, sizes: Sequence[Size], size: int) -> ir.Value:
    """The gradient of `_slid`, of windows along the axis before the last: the sum of the rows."""
    *before, total = sizes
    assert isinstance(total, int)
    at = len(before)
    rows = op.Transpose(grad_in, perm=[*range(at), at + 1, at])
    longer = op.Pad(rows, int64s(op, [0] * (2 * at + 3) + [size]))
    flat = op.Reshape(longer, as_vector(op, [*before, size * (total + 1)]), allowzero=1)
    flat = op.Slice(flat, int64s(op, [0]), int64s(op, [size * total]), int64s(op, [at]))
    return op.ReduceSum(reshape(op, flat, [*before, size, total]), int64s(op, [at]), keepdims=0)


def _tiles(total: Size, size: int, step: int) -> TypeGuard[int]:
    """Whether windows cover an axis once."""
    return isinstance(total, int) and total > 0 and size == step and total % size == 0


def _block(total: Size, size: int, step: int) -> int:
    """How many neighbours every window has together, or none of them."""
    return math.gcd(size, step) if isinstance(total, int) and size > 0 else 1


def _covered(total: int, size: int, step: int) -> int:
    """Where the last window ends."""
    return (total - size) // step * step + size


def _windows(op: Any, total: Size, size: int, step: int) -> ir.Value:
    """The positions along an axis that each window covers, one row per window."""
    if not isinstance(total, ir.Value):
        return constant(op, torch.arange(total).unfold(0, size, step).numpy(), ir.DataType.INT64)
    zero, width = constant(op, 0, ir.DataType.INT64), constant(op, step, ir.DataType.INT64)
    starts = op.Range(zero, op.Sub(total, size - 1), width)
    return op.Add(op.Unsqueeze(starts, int64s(op, [1])), constant(op, list(range(size)), ir.DataType.INT64))


@register(aten.unfold_backward.default)
def unfold_backward(op: Any, grad_in: ir.Value, input_sizes: Sequence[Size], dim: int, size: int, step: int) -> ir.Value:
    """unfold_backward(Tensor grad_in, SymInt[] input_sizes, int dim, int size, int step) -> Tensor"""
    if not input_sizes:
        return op.Reshape(grad_in, int64s(op, []))
    at, ranks = dim % len(input_sizes), len(input_sizes)
    total = input_sizes[at]
    if _tiles(total, size, step) and dim_name(grad_in, at) != 1:
        back = [*range(at + 1), ranks, *range(at + 1, ranks)]
        return reshape(op, op.Transpose(grad_in, perm=back), input_sizes)
    if any(dim_name(grad_in, i) == 1 != name_of(part) for i, part in enumerate(input_sizes) if i != at):
        # One row of windows for all, as `istft` has it.
        windows = op.Shape(grad_in, start=at, end=at + 1)
        grad_in = op.Expand(grad_in, op.Concat(*_around(op, input_sizes, at, windows), int64s(op, [size]), axis=0))
    if at + 1 == ranks and grad_in.dtype in _FLOATS and _slides(total, size, step):
        return _slid_back(op, grad_in, input_sizes, size)
    block = _block(total, size, step)
    places = _covered(total, size, step) // block if isinstance(total, int) and block > 1 else total
    numbers = op.Reshape(_windows(op, places, size // block, step // block), int64s(op, [-1, 1]))
    in_blocks = op.Reshape(grad_in, op.Concat(op.Shape(grad_in, end=ranks), int64s(op, [size // block, block]), axis=0), allowzero=1)
    # Windows first, so that every block is a row that gradients are added to.
    order = [at, ranks, *(i for i in range(ranks) if i != at), ranks + 1]
    row = [*(part for i, part in enumerate(input_sizes) if i != at), block]
    updates = op.Reshape(op.Transpose(in_blocks, perm=order), op.Concat(op.Shape(numbers, end=1), as_vector(op, row), axis=0), allowzero=1)
    zeros = op.Expand(constant(op, 0, grad_in.dtype), as_vector(op, [places, *row]))  # type: ignore[arg-type]
    added = op.ScatterND(zeros, numbers, updates, reduction="add")
    back = [*range(1, at + 1), 0, ranks, *range(at + 1, ranks)]
    covered = places * block if isinstance(places, int) else places
    together = op.Reshape(op.Transpose(added, perm=back), as_vector(op, [*input_sizes[:at], covered, *input_sizes[at + 1 :]]), allowzero=1)
    if covered is total or covered == total:
        return together
    assert isinstance(covered, int) and isinstance(total, int)
    return op.Pad(together, int64s(op, [0] * (ranks + at) + [total - covered] + [0] * (ranks - 1 - at)))


def _around(op: Any, sizes: Sequence[Size], at: int, middle: ir.Value) -> list[ir.Value]:
    """Sizes as 1-d tensors to join, one of them replaced."""
    before, behind = sizes[:at], sizes[at + 1 :]
    return [*([as_vector(op, before)] if before else []), middle, *([as_vector(op, behind)] if behind else [])]
