"""The backward of dropout. The forward draws random numbers: PyTorch does that, in front of the session."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import constant
from ort_backend.lowering.fast_loops.masks import LARGE
from ort_backend.lowering.microsoft import microsoft
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten


@register(aten.native_dropout_backward.default, requires=("com.microsoft::DropoutGrad",), promote="output", keep=("mask",))
def native_dropout_backward_fused(op, grad_output, mask, scale):
    """native_dropout_backward(Tensor grad_output, Tensor mask, float scale) -> Tensor"""
    if grad_output.dtype == ir.DataType.DOUBLE:
        raise Unsupported("the kernel's scale is float32")
    if op.builder.root.device_type == "cpu" and math.prod(size if isinstance(size, int) else LARGE for size in mask.shape) >= LARGE:
        raise Unsupported("a mask that is dequantized takes a third of the kernel's time (`fast_loops.masks`)")
    if scale <= 1:
        raise Unsupported("nothing or everything was dropped")  # the kernel does not look at the mask then
    return microsoft(op, "DropoutGrad", grad_output, mask, constant(op, 1 - 1 / scale, ir.DataType.FLOAT), like=grad_output)


@register(aten.native_dropout_backward.default, device="cuda", promote="output", keep=("mask",))
def native_dropout_backward_cuda(op, grad_output, mask, scale):
    """native_dropout_backward(Tensor grad_output, Tensor mask, float scale) -> Tensor"""
    dtype = grad_output.dtype
    if dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return native_dropout_backward(op, grad_output, mask, scale)
    # PyTorch's kernel multiplies in float32: in bfloat16 the scale of p = 0.1 would be 0.16 % too small.
    factor = op.Mul(op.Cast(mask, to=ir.DataType.FLOAT), float(scale))
    return op.Cast(op.Mul(op.Cast(grad_output, to=ir.DataType.FLOAT), factor), to=dtype)


@register(aten.native_dropout_backward.default, promote="output", keep=("mask",))
def native_dropout_backward(op, grad_output, mask, scale):
    """native_dropout_backward(Tensor grad_output, Tensor mask, float scale) -> Tensor"""
    return op.Mul(grad_output, op.Mul(op.Cast(mask, to=grad_output.dtype), float(scale)))
