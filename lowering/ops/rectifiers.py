"""Activations in pieces: rectifiers, and what is cut off or shrunk, each beside its backward.

Kernels that branch on the data lose by far to arithmetic with a mask, see `activation`.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import scalar_like
from ort_backend.lowering.ops.activation import refuse_symbolic
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

# One pass where Greater and Cast are two. Required by name, so that the other form beside it takes over where a provider lacks the kernel.
_STEP = ("::HardSigmoid",)
_STEEP = 3.0e38


def _mask(op: Any, condition: ir.Value, like: ir.Value) -> ir.Value:
    """1 where `condition` holds and 0 elsewhere, in `like`'s dtype."""
    return op.Cast(condition, to=like.dtype)


def _positive(op: Any, x: ir.Value) -> ir.Value:
    """1 where `x` is positive (and not denormal) and 0 elsewhere: a hard sigmoid as steep as float32 allows."""
    if x.dtype != ir.DataType.FLOAT:
        raise Unsupported("HardSigmoid has a float32 kernel only")
    return op.HardSigmoid(x, alpha=_STEEP, beta=0.0)


def _softshrink_rounds() -> bool:
    """Whether this PyTorch's softshrink rounds its edge to half precision, as hardshrink does: 2.15.0 does, 2.13.0 does not."""
    x = torch.tensor([0.3], dtype=torch.bfloat16, device="cpu")
    return not torch.nn.functional.softshrink(x, 0.3).any()


def _refuse_lost_sign(slope: Any, is_result: bool) -> None:
    if is_result and not isinstance(slope, ir.Value) and slope < 0:
        raise Unsupported("the result does not say which elements were negative; PyTorch's kernel has an error")


@register(aten.relu.default)
def relu(op, self):
    """relu(Tensor self) -> Tensor"""
    return op.Relu(self) if self.dtype in _FLOATS else op.Max(self, scalar_like(op, 0, self))


@register(aten.threshold_backward.default, requires=_STEP, promote="output")
def threshold_backward_step(op, grad_output, self, threshold):
    """threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor"""
    if isinstance(threshold, ir.Value) or threshold != 0:
        raise Unsupported("a threshold other than 0")
    return op.Mul(grad_output, _positive(op, self))


@register(aten.threshold_backward.default, promote="output")
def threshold_backward(op, grad_output, self, threshold):
    """threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor"""
    return op.Mul(grad_output, _mask(op, op.Greater(self, scalar_like(op, threshold, self)), grad_output))


@register(aten.leaky_relu.default)
def leaky_relu(op, self, negative_slope=0.01):
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    if isinstance(negative_slope, ir.Value) or negative_slope < 0:
        return op.Add(op.Relu(self), op.Mul(op.Min(self, scalar_like(op, 0.0, self)), scalar_like(op, negative_slope, self)))
    if negative_slope == 0:
        return op.Relu(self)
    scaled = op.Mul(self, scalar_like(op, negative_slope, self))  # LeakyRelu and PRelu branch on the data, the one in 1.19.2, the other in 1.32.0
    return op.Max(self, scaled) if negative_slope <= 1 else op.Min(self, scaled)


@register(aten.leaky_relu_backward.default, requires=_STEP, promote="output")
def leaky_relu_backward_step(op, grad_output, self, negative_slope, self_is_result):
    """leaky_relu_backward(Tensor grad_output, Tensor self, Scalar negative_slope, bool self_is_result) -> Tensor"""
    if isinstance(negative_slope, ir.Value) or not 0 <= negative_slope <= 1:
        raise Unsupported("a slope outside [0, 1]")
    return op.Mul(grad_output, op.Max(_positive(op, self), scalar_like(op, float(negative_slope), self)))


@register(aten.leaky_relu_backward.default, promote="output")
def leaky_relu_backward(op, grad_output, self, negative_slope, self_is_result):
    """leaky_relu_backward(Tensor grad_output, Tensor self, Scalar negative_slope, bool self_is_result) -> Tensor"""
    _refuse_lost_sign(negative_slope, self_is_result)
    positive, slope = _mask(op, op.Greater(self, scalar_like(op, 0.0, self)), grad_output), scalar_like(op, negative_slope, grad_output)
    step = op.Sub(1.0, slope) if isinstance(negative_slope, ir.Value) else 1.0 - negative_slope
    return op.Mul(grad_output, op.Add(op.Mul(positive, step), slope))


@register(aten.hardtanh.default)
def hardtanh(op, self, min_val=-1, max_val=1):
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    return op.Clip(self, scalar_like(op, min_val, self), scalar_like(op, max_val, self))


@register(aten.hardtanh_backward.default, promote="output")
def hardtanh_backward(op, grad_output, self, min_val, max_val):
    """hardtanh_backward(Tensor grad_output, Tensor self, Scalar min_val, Scalar max_val) -> Tensor"""
    inside = op.And(op.Greater(self, scalar_like(op, min_val, self)), op.Less(self, scalar_like(op, max_val, self)))
    return op.Mul(grad_output, _mask(op, inside, grad_output))


@register(aten.hardsigmoid.default)
def hardsigmoid(op, self):
    """hardsigmoid(Tensor self) -> Tensor"""
    if self.dtype == ir.DataType.FLOAT:
        return op.HardSigmoid(self, alpha=1 / 6, beta=0.5)
    return op.Clip(op.Add(op.Mul(self, 1 / 6), 0.5), scalar_like(op, 0.0, self), scalar_like(op, 1.0, self))


@register(aten.hardsigmoid_backward.default, promote="output")
def hardsigmoid_backward(op, grad_output, self):
    """hardsigmoid_backward(Tensor grad_output, Tensor self) -> Tensor"""
    inside = op.Less(op.Abs(self), scalar_like(op, 3.0, self))
    return op.Mul(grad_output, op.Mul(_mask(op, inside, grad_output), scalar_like(op, 1 / 6, grad_output)))


@register(aten.hardswish.default)
def hardswish(op, self):
    """hardswish(Tensor self) -> Tensor"""
    return op.Mul(self, hardsigmoid(op, self))


@register(aten.hardswish_backward.default, promote="output")
def hardswish_backward(op, grad_output, self):
    """hardswish_backward(Tensor grad_output, Tensor self) -> Tensor"""
    # relu6(x + 3) / 6, and x / 6 more where that is not flat: the same less 1 / 2, which is finite where x is not
    inside = _mask(op, op.Less(op.Abs(self), scalar_like(op, 3.0, self)), grad_output)
    gate = hardsigmoid(op, self)
    return op.Mul(grad_output, op.Add(gate, op.Mul(op.Sub(gate, scalar_like(op, 0.5, gate)), inside)))


@register(aten.hardshrink.default, promote="inputs")  # `lambd` is rounded to half precision first, as in PyTorch
def hardshrink(op, self, lambd=0.5):
    """hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    return hardshrink_backward(op, self, self, lambd)


@register(aten.hardshrink_backward.default, promote="inputs")
def hardshrink_backward(op, grad_out, self, lambd):
    """hardshrink_backward(Tensor grad_out, Tensor self, Scalar lambd) -> Tensor"""
    return op.Mul(grad_out, _mask(op, op.Greater(op.Abs(self), scalar_like(op, lambd, self)), grad_out))


@register(aten.softshrink_backward.default, promote="inputs")
def softshrink_backward(op, grad_output, self, lambd):
    """softshrink_backward(Tensor grad_output, Tensor self, Scalar lambd) -> Tensor"""
    return hardshrink_backward(op, grad_output, self, lambd)


@register(aten.softshrink.default, promote="inputs" if _softshrink_rounds() else None)
def softshrink(op, self, lambd=0.5):
    """softshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    refuse_symbolic(lambd)
    return op.Sub(self, op.Clip(self, scalar_like(op, -lambd, self), scalar_like(op, lambd, self)))


@register(aten.celu.default)
def celu(op, self, alpha=1.0):
    """celu(Tensor self, Scalar alpha=1.0) -> Tensor"""
    refuse_symbolic(alpha)
    return elu(op, self, alpha, 1, 1 / alpha)


@register(aten.elu.default)
def elu(op, self, alpha=1, scale=1, input_scale=1):
    """elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor"""
    refuse_symbolic(alpha, scale, input_scale)
    zero = scalar_like(op, 0.0, self)
    negative = op.Sub(op.Exp(op.Mul(op.Min(self, zero), float(input_scale))), 1.0)
    return op.Add(op.Mul(op.Relu(self), float(scale)), op.Mul(negative, float(alpha * scale)))


@register(aten.elu_backward.default, promote="output")
def elu_backward(op, grad_output, alpha, scale, input_scale, is_result, self_or_result):
    """elu_backward(Tensor grad_output, Scalar alpha, Scalar scale, Scalar input_scale, bool is_result, Tensor self_or_result) -> Tensor"""
    refuse_symbolic(alpha, scale, input_scale)
    _refuse_lost_sign(alpha, is_result)
    x, below = self_or_result, op.Min(self_or_result, scalar_like(op, 0.0, self_or_result))
    raised = op.Add(below, float(alpha * scale)) if is_result else op.Mul(op.Exp(op.Mul(below, float(input_scale))), float(alpha * scale))
    slope = op.Mul(raised, float(input_scale))
    step = float(scale - alpha * scale * input_scale)  # by which the slope jumps at 0
    if step:
        slope = op.Add(slope, op.Mul(_mask(op, op.Greater(x, scalar_like(op, 0.0, x)), x), step))
    return op.Mul(grad_output, slope)


@register(aten._prelu_kernel.default, promote="output")
def prelu_kernel(op, self, weight):
    """_prelu_kernel(Tensor self, Tensor weight) -> Tensor"""
    return op.Add(op.Relu(self), op.Mul(weight, op.Min(self, scalar_like(op, 0.0, self))))


@register(aten._prelu_kernel_backward.default, requires=_STEP, promote="output")
def prelu_kernel_backward_step(op, grad_output, self, weight):
    """_prelu_kernel_backward(Tensor grad_output, Tensor self, Tensor weight) -> (Tensor, Tensor)"""
    return _prelu_gradients(op, grad_output, self, weight, _positive(op, self))


@register(aten._prelu_kernel_backward.default, promote="output")
def prelu_kernel_backward(op, grad_output, self, weight):
    """_prelu_kernel_backward(Tensor grad_output, Tensor self, Tensor weight) -> (Tensor, Tensor)"""
    return _prelu_gradients(op, grad_output, self, weight, _mask(op, op.Greater(self, scalar_like(op, 0.0, self)), grad_output))


def _prelu_gradients(op: Any, grad_output: ir.Value, self: ir.Value, weight: ir.Value, positive: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Those of the input and, element by element, of the weight; `positive` is 1 where the input is, and 0 elsewhere.

    A backward of 1 M elements takes 1.3 ms of processor time, where PyTorch's kernel, which branches on the data, takes 4.8.
    """
    slope = op.Add(positive, op.Mul(op.Sub(1.0, positive), weight))  # exactly 1 or the weight, also of a large one
    return op.Mul(grad_output, slope), op.Mul(grad_output, op.Min(self, scalar_like(op, 0.0, self)))
