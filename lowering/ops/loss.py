"""Losses: negative log likelihood, of logits of two classes, and those that are quadratic near zero and linear beyond. Others are decomposed."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import element_count, length
from ort_backend.lowering.constants import as_int64, int64s, negated, scalar_like
from ort_backend.lowering.kernels.logit_gradients import BFLOAT16_LOGIT_GRADIENT
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.indexing import from_front
from ort_backend.lowering.ops.pointwise import log1p
from ort_backend.lowering.ops.reduction import mean
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define(
    "cross_entropy_backward(Tensor grad_output, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, "
    "Tensor total_weight, Tensor? uniform=None) -> Tensor"
)
CROSS_ENTROPY_BACKWARD = torch.ops.ort_training.cross_entropy_backward.default

Size = int | ir.Value

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's Reduction


@dataclasses.dataclass(frozen=True)
class RowGradient:
    """The gradient of a negative log likelihood: one entry for each row along `axis`, zero elsewhere.

    Attributes:
        index: Where the entry stands, int64, of size 1 along `axis`.
        value: The entry, of the same shape.
        axis: The class dimension.
    """

    index: ir.Value
    value: ir.Value
    axis: int

    @staticmethod
    def of(value: ir.Value) -> RowGradient | None:
        """What `value` was written from, if it is such a gradient."""
        return value.meta.get("row_gradient")

    def add_to(self, op: Any, tensor: ir.Value) -> ir.Value:
        """`tensor` with the entries added."""
        return op.ScatterElements(tensor, self.index, self.value, axis=self.axis, reduction="add")


def _rows(op: Any, self: ir.Value, target: ir.Value, weight: ir.Value | None, ignore_index: Size) -> tuple[ir.Value, ir.Value, ir.Value, int]:
    """(index, counted, weight of each row, class axis): the targets with the class dimension, ignored ones pointing at class 0."""
    rank = self.shape.rank()  # type: ignore[union-attr]
    axis = 0 if rank == 1 else 1
    target = as_int64(op, target)
    if rank > 1 or not target.shape.rank():  # type: ignore[union-attr]
        target = op.Unsqueeze(target, int64s(op, [axis]))
    counted = negated(op, op.Equal(target, scalar_like(op, ignore_index, target)))
    index = op.Where(counted, target, scalar_like(op, 0, target))
    if weight is None:
        return index, counted, op.Cast(counted, to=self.dtype), axis
    return index, counted, op.Where(counted, op.Gather(weight, index, axis=0), scalar_like(op, 0.0, self)), axis


@register(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(op, self, target, weight, reduction, ignore_index):
    """nll_loss_forward(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index) -> (Tensor output, Tensor total_weight)"""
    index, counted, weights, axis = _rows(op, self, target, weight, ignore_index)
    picked = op.GatherElements(self, from_front(op, index), axis=axis)
    # An ignored row may hold -inf at class 0: choose, do not multiply by zero.
    losses = op.Neg(op.Mul(op.Where(counted, picked, scalar_like(op, 0.0, self)), weights))
    if reduction == _NONE:
        if self.shape.rank() > 1:
            return op.Squeeze(losses, int64s(op, [axis])), scalar_like(op, 0.0, self)
        losses = losses if target.shape.rank() else op.Squeeze(losses, int64s(op, [axis]))
        return losses, op.ReduceSum(weights, keepdims=0)
    total_weight = op.ReduceSum(weights, keepdims=0)
    loss = op.ReduceSum(losses, keepdims=0)
    return (op.Div(loss, total_weight) if reduction == _MEAN else loss), total_weight


def _row_gradient(
    op: Any,
    grad_output: ir.Value,
    self: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    reduction: int,
    ignore_index: Size,
    total_weight: ir.Value,
) -> RowGradient:
    index, counted, weights, axis = _rows(op, self, target, weight, ignore_index)
    if reduction == _MEAN:
        grad_output = op.Div(grad_output, total_weight)
    elif reduction == _NONE and (self.shape.rank() > 1 or not target.shape.rank()):  # type: ignore[union-attr]
        grad_output = op.Unsqueeze(grad_output, int64s(op, [axis]))
    # Without a counted row the division gives nan or inf, which no row may see.
    entry = op.Where(counted, op.Neg(op.Mul(weights, grad_output)), scalar_like(op, 0.0, self))
    return RowGradient(index, typed(entry, self.dtype, index.shape), axis)


@register(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(op, grad_output, self, target, weight, reduction, ignore_index, total_weight):
    """nll_loss_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index,
    Tensor total_weight) -> Tensor
    """
    row = _row_gradient(op, grad_output, self, target, weight, reduction, ignore_index, total_weight)
    zeros = op.ConstantOfShape(op.Shape(self), value=ir.tensor([0.0], dtype=self.dtype))
    result = row.add_to(op, typed(zeros, self.dtype, self.shape))
    result.meta["row_gradient"] = row
    return result


@register(CROSS_ENTROPY_BACKWARD)
def cross_entropy_backward(op, grad_output, log_probabilities, target, weight, reduction, ignore_index, total_weight, uniform=None):
    """ort_training::cross_entropy_backward(Tensor grad_output, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction,
    SymInt ignore_index, Tensor total_weight, Tensor? uniform=None) -> Tensor

    `passes.cross_entropy` writes it: the gradient of the logits, the probabilities times each row's weight and less it at the target. `uniform` is
    added to the gradient of every class's logarithm, one number a row: that of smoothed labels.
    """
    row = _row_gradient(op, grad_output, log_probabilities, target, weight, reduction, ignore_index, total_weight)
    probabilities = op.Exp(log_probabilities)
    if uniform is None:
        return row.add_to(op, op.Mul(probabilities, op.Neg(row.value)))
    classes = length(op, log_probabilities, row.axis)
    count = op.Cast(classes, to=uniform.dtype) if isinstance(classes, ir.Value) else float(classes)
    return row.add_to(op, op.Sub(uniform, op.Mul(probabilities, op.Add(row.value, op.Mul(uniform, count)))))


@register(BFLOAT16_LOGIT_GRADIENT)
def bfloat16_logit_gradient(op, grad_output, log_probabilities, target, weight, reduction, ignore_index, total_weight):
    """ort_training::bfloat16_logit_gradient(Tensor grad_output, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction,
    SymInt ignore_index, Tensor total_weight) -> Tensor
    """
    made = cross_entropy_backward(op, grad_output, log_probabilities, target, weight, reduction, ignore_index, total_weight)
    return op.Cast(made, to=ir.DataType.BFLOAT16)


def _cross_entropy_backward(
    grad_output: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    uniform: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator in PyTorch: where a dtype has no kernels in ONNX Runtime."""
    rank = log_probabilities.dim()
    likelihood = aten.nll_loss2d_backward if rank > 2 else aten.nll_loss_backward
    gradient = likelihood(grad_output, log_probabilities, target, weight, reduction, ignore_index, total_weight)
    gradient = gradient if uniform is None else gradient + uniform
    return aten._log_softmax_backward_data(gradient, log_probabilities, 1 if rank > 1 else 0, log_probabilities.dtype)


_library.impl("cross_entropy_backward", _cross_entropy_backward, "CompositeExplicitAutograd")


@register(aten.binary_cross_entropy_with_logits.default, promote="output")
def binary_cross_entropy_with_logits(op, self, target, weight=None, pos_weight=None, reduction=_MEAN):
    """binary_cross_entropy_with_logits(Tensor self, Tensor target, Tensor? weight=None, Tensor? pos_weight=None, int reduction=Mean) -> Tensor"""
    zero, one = scalar_like(op, 0.0, self), scalar_like(op, 1.0, self)
    likelihood = op.Sub(op.Min(self, zero), log1p(op, op.Exp(op.Neg(op.Abs(self)))))  # the logarithm of the sigmoid
    if pos_weight is not None:
        likelihood = op.Mul(op.Add(op.Mul(op.Sub(pos_weight, one), target), one), likelihood)
    loss = op.Sub(op.Mul(op.Sub(one, target), self), likelihood)
    return _reduced(op, loss if weight is None else op.Mul(loss, weight), reduction)


# Quadratic up to a width and linear beyond: c (|d| - c / 2) with c = min(|d|, width), which has no branch for `Where` to take.


@register(aten.smooth_l1_loss.default, promote="output")
def smooth_l1_loss(op, self, target, reduction=_MEAN, beta=1.0):
    """smooth_l1_loss(Tensor self, Tensor target, int reduction=Mean, float beta=1.0) -> Tensor"""
    if beta == 0:
        return _reduced(op, op.Abs(op.Sub(self, target)), reduction)
    return _reduced(op, _quadratic_then_linear(op, self, target, beta, 1.0), reduction)


@register(aten.smooth_l1_loss_backward.default, promote="output")
def smooth_l1_loss_backward(op, grad_output, self, target, reduction, beta):
    """smooth_l1_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction, float beta) -> Tensor"""
    if beta == 0:
        raise Unsupported("a width of 0")
    difference = op.Sub(self, target)
    slope = difference if beta == 1 else op.Div(difference, scalar_like(op, beta, difference))
    return op.Mul(_spread(op, grad_output, difference, reduction), _clipped(op, slope, 1.0))


@register(aten.huber_loss.default, promote="output")
def huber_loss(op, self, target, reduction=_MEAN, delta=1.0):
    """huber_loss(Tensor self, Tensor target, int reduction=Mean, float delta=1.0) -> Tensor"""
    return _reduced(op, _quadratic_then_linear(op, self, target, delta, delta), reduction)


@register(aten.huber_loss_backward.default, promote="output")
def huber_loss_backward(op, grad_output, self, target, reduction, delta):
    """huber_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction, float delta) -> Tensor"""
    difference = op.Sub(self, target)
    return op.Mul(_spread(op, grad_output, difference, reduction), _clipped(op, difference, delta))


def _quadratic_then_linear(op: Any, self: ir.Value, target: ir.Value, width: float, slope: float) -> ir.Value:
    """`slope` is that of the linear part."""
    distance = op.Abs(op.Sub(self, target))
    near = op.Min(distance, scalar_like(op, width, distance))
    factor = near if slope == width else op.Mul(near, scalar_like(op, slope / width, near))
    return op.Mul(factor, op.Sub(distance, op.Mul(near, scalar_like(op, 0.5, near))))


def _clipped(op: Any, value: ir.Value, width: float) -> ir.Value:
    return op.Clip(value, scalar_like(op, -width, value), scalar_like(op, width, value))


def _reduced(op: Any, loss: ir.Value, reduction: int) -> ir.Value:
    if reduction == _NONE:
        return loss
    return mean(op, loss) if reduction == _MEAN else op.ReduceSum(loss, keepdims=0)


def _spread(op: Any, gradient: ir.Value, of: ir.Value, reduction: int) -> ir.Value:
    """The gradient of each element's loss, of that of what they were reduced to."""
    return op.Div(gradient, op.Cast(element_count(op, of), to=gradient.dtype)) if reduction == _MEAN else gradient
