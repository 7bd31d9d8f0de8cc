"""Simulated quantisation: values rounded to a grid and back, the mask of those inside its range, and the gradients of learned grids.

Rounding is to the even neighbour, in the order of PyTorch's kernels: the forward rounds before it adds the zero point, the learned gradients after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import rank
from ort_backend.lowering.constants import int64s, negated, scalar_like
from ort_backend.lowering.registry import register

aten = torch.ops.aten


def _along(op: Any, parameter: ir.Value, like: ir.Value, at: int) -> ir.Value:
    """A value per channel, as it broadcasts against `like`; at -1: the single value of a 1-d tensor, or a 0-d one."""
    if parameter.dtype != like.dtype:
        parameter = op.Cast(parameter, to=like.dtype)
    shape = [] if at < 0 else [1 if i != at else -1 for i in range(rank(like))]
    return op.Reshape(parameter, int64s(op, shape))


def _rounded(op: Any, value: ir.Value, scale: ir.Value, zero_point: ir.Value, quant_min: int, *, zero_point_first: bool) -> tuple[ir.Value, ir.Value]:
    """The grid's number of each value before it is limited, `quant_min - 1` for NaN (which PyTorch makes the smallest integer), and 1 / scale."""
    inverse = op.Reciprocal(scale)
    moved = op.Mul(value, inverse)
    number = op.Round(op.Add(zero_point, moved)) if zero_point_first else op.Add(zero_point, op.Round(moved))
    return op.Where(op.IsNaN(number), scalar_like(op, quant_min - 1, value), number), inverse


def _inside(op: Any, number: ir.Value, quant_min: int, quant_max: int) -> ir.Value:
    low, high = scalar_like(op, quant_min, number), scalar_like(op, quant_max, number)
    return op.And(op.GreaterOrEqual(number, low), op.LessOrEqual(number, high))


def _back(op: Any, number: ir.Value, scale: ir.Value, zero_point: ir.Value, quant_min: int, quant_max: int) -> ir.Value:
    limited = op.Clip(number, scalar_like(op, quant_min, number), scalar_like(op, quant_max, number))
    return op.Mul(op.Sub(limited, zero_point), scale)


def _fake_quantized(op: Any, value: ir.Value, scale: ir.Value, zero_point: ir.Value, quant_min: int, quant_max: int) -> tuple[ir.Value, ir.Value]:
    number, _ = _rounded(op, value, scale, zero_point, quant_min, zero_point_first=False)
    return _back(op, number, scale, zero_point, quant_min, quant_max), _inside(op, number, quant_min, quant_max)


@register(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize_per_tensor(op: Any, self: ir.Value, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Sequence[ir.Value]:
    """fake_quantize_per_tensor_affine_cachemask(Tensor self, float scale, int zero_point, int quant_min, int quant_max) ->
    (Tensor output, Tensor mask)
    """
    return _fake_quantized(op, self, scalar_like(op, scale, self), scalar_like(op, zero_point, self), quant_min, quant_max)


@register(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_per_tensor_of_tensors(
    op: Any, self: ir.Value, scale: ir.Value, zero_point: ir.Value, fake_quant_enabled: ir.Value, quant_min: int, quant_max: int
) -> Sequence[ir.Value]:
    """_fake_quantize_per_tensor_affine_cachemask_tensor_qparams(Tensor self, Tensor scale, Tensor zero_point, Tensor fake_quant_enabled,
    int quant_min, int quant_max) -> (Tensor output, Tensor mask)
    """
    made, mask = _fake_quantized(op, self, _along(op, scale, self, -1), _along(op, zero_point, self, -1), quant_min, quant_max)
    enabled = op.Cast(op.Reshape(fake_quant_enabled, int64s(op, [])), to=ir.DataType.BOOL)
    return op.Where(enabled, made, self), op.Or(mask, negated(op, enabled))


@register(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_per_channel(
    op: Any, self: ir.Value, scale: ir.Value, zero_point: ir.Value, axis: int, quant_min: int, quant_max: int
) -> Sequence[ir.Value]:
    """fake_quantize_per_channel_affine_cachemask(Tensor self, Tensor scale, Tensor zero_point, int axis, int quant_min, int quant_max) ->
    (Tensor output, Tensor mask)
    """
    at = axis % rank(self)
    return _fake_quantized(op, self, _along(op, scale, self, at), _along(op, zero_point, self, at), quant_min, quant_max)


# -- grids that are learned


def _limited(op: Any, zero_point: ir.Value, quant_min: int, quant_max: int) -> ir.Value:
    return op.Clip(zero_point, scalar_like(op, quant_min, zero_point), scalar_like(op, quant_max, zero_point))


@register(aten._fake_quantize_learnable_per_tensor_affine.default)
def fake_quantize_learnable_per_tensor(
    op: Any, self: ir.Value, scale: ir.Value, zero_point: ir.Value, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> ir.Value:
    """_fake_quantize_learnable_per_tensor_affine(Tensor self, Tensor scale, Tensor zero_point, int quant_min, int quant_max,
    float grad_factor=1.) -> Tensor
    """
    whole = _limited(op, op.Round(_along(op, zero_point, self, -1)), quant_min, quant_max)
    return _fake_quantized(op, self, _along(op, scale, self, -1), whole, quant_min, quant_max)[0]


@register(aten._fake_quantize_learnable_per_channel_affine.default)
def fake_quantize_learnable_per_channel(
    op: Any, self: ir.Value, scale: ir.Value, zero_point: ir.Value, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> ir.Value:
    """_fake_quantize_learnable_per_channel_affine(Tensor self, Tensor scale, Tensor zero_point, int axis, int quant_min, int quant_max,
    float grad_factor=1.) -> Tensor
    """
    at = axis % rank(self)
    whole = _limited(op, op.Round(_along(op, zero_point, self, at)), quant_min, quant_max)
    return _fake_quantized(op, self, _along(op, scale, self, at), whole, quant_min, quant_max)[0]


def _learned_gradients(
    op: Any, grad: ir.Value, value: ir.Value, scale: ir.Value, zero_point: ir.Value, at: int, limits: tuple[int, int], grad_factor: float
) -> Sequence[ir.Value]:
    quant_min, quant_max = limits
    step, whole = _along(op, scale, value, at), _along(op, zero_point, value, at)
    if at < 0:  # here, and not in the forward, PyTorch adds a half and cuts off
        nearest = _limited(op, op.Add(whole, scalar_like(op, 0.5, whole)), *limits)
        whole = op.Cast(op.Cast(nearest, to=ir.DataType.INT64), to=value.dtype)
    else:
        whole = _limited(op, op.Round(whole), *limits)
    number, inverse = _rounded(op, value, step, whole, quant_min, zero_point_first=True)
    inside = _inside(op, number, *limits)
    low, high = (op.Sub(scalar_like(op, limit, value), whole) for limit in limits)
    below = op.Less(number, scalar_like(op, quant_min, value))
    error = op.Mul(op.Sub(_back(op, number, step, whole, *limits), value), inverse)
    by_step = op.Where(inside, error, op.Where(below, low, high))
    by_zero = op.Where(inside, scalar_like(op, 0.0, value), op.Neg(step))
    factor = scalar_like(op, grad_factor, value)
    sums = [op.Mul(op.Mul(grad, each), factor) for each in (by_step, by_zero)]
    if at < 0:
        totals = [op.Reshape(op.ReduceSum(each, keepdims=0), int64s(op, [1])) for each in sums]
    else:
        others = int64s(op, [i for i in range(rank(value)) if i != at])
        totals = [op.ReduceSum(each, others, keepdims=0) if rank(value) > 1 else each for each in sums]
    return op.Mul(grad, op.Cast(inside, to=grad.dtype)), *totals


@register(aten._fake_quantize_learnable_per_tensor_affine_backward.default)
def fake_quantize_learnable_per_tensor_backward(
    op: Any, grad: ir.Value, self: ir.Value, scale: ir.Value, zero_point: ir.Value, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Sequence[ir.Value]:
    """_fake_quantize_learnable_per_tensor_affine_backward(Tensor grad, Tensor self, Tensor scale, Tensor zero_point, int quant_min,
    int quant_max, float grad_factor=1.) -> (Tensor, Tensor, Tensor)
    """
    return _learned_gradients(op, grad, self, scale, zero_point, -1, (quant_min, quant_max), grad_factor)


@register(aten._fake_quantize_learnable_per_channel_affine_backward.default)
def fake_quantize_learnable_per_channel_backward(
    op: Any,
    grad: ir.Value,
    self: ir.Value,
    scale: ir.Value,
    zero_point: ir.Value,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Sequence[ir.Value]:
    """_fake_quantize_learnable_per_channel_affine_backward(Tensor grad, Tensor self, Tensor scale, Tensor zero_point, int axis, int quant_min,
    int quant_max, float grad_factor=1.) -> (Tensor, Tensor, Tensor)
    """
    return _learned_gradients(op, grad, self, scale, zero_point, axis % rank(self), (quant_min, quant_max), grad_factor)
