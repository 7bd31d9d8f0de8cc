"""Products of groups of rows with a matrix each: the experts of a mixture, over tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import length, rank, size
from ort_backend.lowering.constants import int64s, scalar_like
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

MAX_GROUPS = 256  # two or three nodes each


def _groups(offs: ir.Value) -> int:
    count = size(offs, 0)
    if count is None or not 0 < count <= MAX_GROUPS:
        raise Unsupported(f"a number of groups that is dynamic, 0, or above {MAX_GROUPS}")
    return count


def _parts(op: Any, tensor: ir.Value, offs: ir.Value, at: int) -> Sequence[ir.Value]:
    """`tensor` cut along axis `at` where the groups end, and the rest that belongs to none; `offs` holds their ends, (groups,)."""
    ends = op.Cast(offs, to=ir.DataType.INT64)
    bounds = op.Concat(int64s(op, [0]), ends, as_vector(op, [length(op, tensor, at)]), axis=0)
    count = _groups(offs)
    sizes = op.Sub(op.Slice(bounds, int64s(op, [1]), int64s(op, [count + 2])), op.Slice(bounds, int64s(op, [0]), int64s(op, [count + 1])))
    return op.Split(tensor, sizes, axis=at, _outputs=count + 1)


def _matrices(op: Any, stacked: ir.Value, count: int) -> list[ir.Value]:
    """The matrices of a (count, n, m) tensor, (1, n, m) each."""
    return [stacked] if count == 1 else list(op.Split(stacked, num_outputs=count, axis=0, _outputs=count))


def _swapped(op: Any, matrix: ir.Value) -> ir.Value:
    """A (1, n, m) matrix transposed."""
    return op.Transpose(matrix, perm=[0, 2, 1])


def _rows_by_matrices(op: Any, rows: ir.Value, matrices: Sequence[ir.Value], offs: ir.Value, width: int | ir.Value) -> ir.Value:
    """(n, k) rows in groups, each times its (1, k, width) matrix: (n, width), zeros in the rows behind the last group."""
    *parts, rest = _parts(op, rows, offs, 0)
    products = [op.MatMul(part, matrix) for part, matrix in zip(parts, matrices, strict=True)]  # (1, rows of the group, width)
    behind = op.Expand(scalar_like(op, 0, rows), op.Concat(int64s(op, [1]), op.Shape(rest, start=0, end=1), as_vector(op, [width]), axis=0))
    return op.Squeeze(op.Concat(*products, behind, axis=1), int64s(op, [0]))


def _outer_products(op: Any, left: Sequence[ir.Value], right: Sequence[ir.Value], shared: int) -> ir.Value:
    """(k, n_g) times (n_g, m) for each group g, stacked: (groups, k, m). A group without rows makes zeros.

    ONNX Runtime's MatMul may leave a sum over nothing unwritten (1.19.2): a row of zeros is added to every group.
    """
    pads_left, pads_right = ([0, 0, 0, 1], [0, 0, 1, 0])
    products = [op.MatMul(op.Pad(a, int64s(op, pads_left)), op.Pad(b, int64s(op, pads_right))) for a, b in zip(left, right, strict=True)]
    stacked = [op.Unsqueeze(product, int64s(op, [0])) for product in products]
    return op.Concat(*stacked, axis=0) if shared > 1 else stacked[0]


# transformers' operator for float32: one group of rows after another. It exists once transformers has been imported.


@register("transformers::grouped_mm_fallback", keep=("offs",))
def grouped_mm_fallback(op, input, weight, offs):
    """grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor"""
    return _rows_by_matrices(op, input, _matrices(op, weight, _groups(offs)), offs, length(op, weight, 2))


@register("transformers::grouped_mm_fallback_backward", keep=("offs",))
def grouped_mm_fallback_backward(op, input, weight, offs, grad_output):
    """grouped_mm_fallback_backward(Tensor input, Tensor weight, Tensor offs, Tensor grad_output) -> (Tensor, Tensor)"""
    count = _groups(offs)
    transposed = [_swapped(op, matrix) for matrix in _matrices(op, weight, count)]
    grad_input = _rows_by_matrices(op, grad_output, transposed, offs, length(op, weight, 1))
    left = [op.Transpose(part, perm=[1, 0]) for part in _parts(op, input, offs, 0)[:count]]
    return grad_input, _outer_products(op, left, _parts(op, grad_output, offs, 0)[:count], count)


# PyTorch's own, which transformers takes for bfloat16.


@register(aten._grouped_mm.default, promote="output", keep=("offs",))
def grouped_mm(op, self, mat2, offs=None, bias=None, out_dtype=None):
    """_grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"""
    if offs is None or bias is not None:
        raise Unsupported("no offsets, or a bias")
    count, ranks = _groups(offs), (rank(self), rank(mat2))
    if ranks == (2, 3):
        return _rows_by_matrices(op, self, _matrices(op, mat2, count), offs, length(op, mat2, 2))
    if ranks == (2, 2):
        return _outer_products(op, _parts(op, self, offs, 1)[:count], _parts(op, mat2, offs, 0)[:count], count)
    raise Unsupported("groups of columns")
