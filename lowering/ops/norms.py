"""Norms of vectors along axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axes, rank
from ort_backend.lowering.constants import negated, scalar_like
from ort_backend.lowering.ops.reduction import Dims, extreme, reduce_along, typed_like
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten


@register(aten.linalg_vector_norm.default, promote="output")
def linalg_vector_norm(
    op: Any, self: ir.Value, ord: int | float = 2, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> ir.Value:
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    at = axes(self, dim)
    if isinstance(ord, ir.Value):
        raise Unsupported("a norm of symbolic order")
    if rank(self) == 0 and ord != 0:
        return op.Abs(self)
    if ord == 2:
        return euclidean_norm(op, self, at, keepdim)
    if ord == 1:
        return sum_of_magnitudes(op, self, at, keepdim)
    if ord == 0:
        nonzero = negated(op, op.Equal(self, scalar_like(op, 0.0, self)))
        return reduce_along(op, "ReduceSum", typed_like(op.Cast(nonzero, to=self.dtype), self), at, keepdim)
    absolute = typed_like(op.Abs(self), self)
    if math.isinf(ord):
        return extreme(op, "ReduceMax" if ord > 0 else "ReduceMin", absolute, at, keepdim)
    powers = typed_like(op.Pow(absolute, scalar_like(op, ord, self)), self)
    return op.Pow(reduce_along(op, "ReduceSum", powers, at, keepdim), scalar_like(op, 1 / ord, self))


def sum_of_magnitudes(op: Any, value: ir.Value, at: Sequence[int], keepdim: bool) -> ir.Value:
    """The 1-norm along axes. ReduceL1 of float64 has no kernel, and what ONNX Runtime writes for it ends the process where nothing is (1.19.2)."""
    if value.dtype == ir.DataType.DOUBLE or _sums_faster(value, at):
        return reduce_along(op, "ReduceSum", typed_like(op.Abs(value), value), at, keepdim)
    return reduce_along(op, "ReduceL1", value, at, keepdim)


def euclidean_norm(op: Any, value: ir.Value, at: Sequence[int], keepdim: bool) -> ir.Value:
    """The 2-norm along axes. ONNX writes ReduceL2 of float64, for which ORT's CPU provider has no kernel, with a root in float32 (opset 18)."""
    if _sums_faster(value, at):
        return op.Sqrt(reduce_along(op, "ReduceSum", typed_like(op.Mul(value, value), value), at, keepdim))
    if value.dtype == ir.DataType.DOUBLE:
        return op.Sqrt(reduce_along(op, "ReduceSumSquare", value, at, keepdim))
    return reduce_along(op, "ReduceL2", value, at, keepdim)


def _sums_faster(value: ir.Value, at: Sequence[int]) -> bool:
    """Whether ONNX Runtime's ReduceSum is to add up what another node makes: it has loops of its own along some axes, other reductions have not.

    A million numbers take it 0.2 to 0.5 ms with that node, ReduceL2 and ReduceL1 0.4 to 0.9 along rows, 0.7 to 6 along columns, where they add one
    number to the next. Along all axes these take 0.1 ms, and the two nodes 0.3 (1.19.2 and 1.32.0, AMD EPYC of family 25).
    """
    return len(at) < rank(value) and value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)


@register(aten.dist.default, promote="output")
def dist(op: Any, self: ir.Value, other: ir.Value, p: int | float = 2) -> ir.Value:
    """dist(Tensor self, Tensor other, Scalar p=2) -> Tensor"""
    return linalg_vector_norm(op, op.Sub(self, other), p)
