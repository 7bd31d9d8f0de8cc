"""Distances between the rows of two matrices, in every norm, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import rank, sizes
from ort_backend.lowering.constants import int64s, negated, scalar_like
from ort_backend.lowering.ops.norms import euclidean_norm, sum_of_magnitudes
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

_DIFFERENCES_UP_TO = 1 << 20  # held at a time: PyTorch's kernel needs no memory for them, and is faster where there are more


def _differences(op: Any, x1: ir.Value, x2: ir.Value) -> ir.Value:
    """(..., rows of x1, rows of x2, columns)."""
    first, second = sizes(x1), sizes(x2)
    if first is None or second is None:
        raise Unsupported("distances between unknown numbers of rows: PyTorch's kernel needs no memory for their differences")
    batch = torch.broadcast_shapes(first[:-2], second[:-2])
    count = math.prod([*batch, first[-2], second[-2], first[-1]])
    if count == 0:
        raise Unsupported("distances of zero-sized tensors")
    if count > _DIFFERENCES_UP_TO:
        raise Unsupported("so many distances that PyTorch's kernel, which needs no memory for the differences, is faster")
    return op.Sub(op.Unsqueeze(x1, int64s(op, [-2])), op.Unsqueeze(x2, int64s(op, [-3])))


@register(aten._cdist_forward.default)
def cdist_forward(op: Any, x1: ir.Value, x2: ir.Value, p: float, compute_mode: int | None) -> ir.Value:
    """_cdist_forward(Tensor x1, Tensor x2, float p, int? compute_mode) -> Tensor"""
    apart = _differences(op, x1, x2)
    last = int64s(op, [-1])
    if p == 0:
        return op.ReduceSum(op.Cast(negated(op, op.Equal(apart, scalar_like(op, 0.0, apart))), to=apart.dtype), last, keepdims=0)
    if p == 1:
        return sum_of_magnitudes(op, apart, [rank(apart) - 1], keepdim=False)
    if p == 2:
        return euclidean_norm(op, apart, [rank(apart) - 1], keepdim=False)
    if math.isinf(p):
        return op.ReduceMax(op.Abs(apart), last, keepdims=0)
    return op.Pow(op.ReduceSum(op.Pow(op.Abs(apart), scalar_like(op, p, apart)), last, keepdims=0), scalar_like(op, 1 / p, apart))


@register(aten._cdist_backward.default)
def cdist_backward(op: Any, grad: ir.Value, x1: ir.Value, x2: ir.Value, p: float, cdist: ir.Value) -> ir.Value:
    """_cdist_backward(Tensor grad, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor

    The gradient for `x1`; of a distance of zero it is zero.
    """
    if rank(x1) != rank(grad) or rank(x2) != rank(grad):
        raise Unsupported("distances of broadcast batches")
    if p == 0:
        raise Unsupported("zeros, whatever the gradient: ONNX Runtime would make them in the forward")
    apart = _differences(op, x1, x2)
    zero, one = scalar_like(op, 0.0, apart), scalar_like(op, 1.0, apart)
    outer, distance = (op.Unsqueeze(value, int64s(op, [-1])) for value in (grad, cdist))
    if p == 1:
        each = op.Mul(op.Sign(apart), outer)
    elif math.isinf(p):
        each = op.Mul(op.Mul(op.Sign(apart), outer), op.Cast(op.Equal(op.Abs(apart), distance), to=apart.dtype))
    else:
        none = op.Equal(distance, zero)
        share = op.Div(outer, op.Where(none, one, op.Pow(distance, scalar_like(op, p - 1, apart)) if p != 2 else distance))
        far = op.Abs(apart)
        if p < 1:  # where nothing lies apart, the power is infinite
            far = op.Where(op.Equal(far, zero), one, far)
        size = apart if p == 2 else op.Mul(op.Sign(apart), op.Pow(far, scalar_like(op, p - 1, apart)))
        # A distance of zero is one of sizes of zero, which are finite: it is chosen among the distances, a column for each.
        each = op.Mul(size, op.Where(none, zero, share)) if p > 1 else op.Where(none, zero, op.Mul(size, share))
    return op.ReduceSum(each, int64s(op, [-2]), keepdims=0)
