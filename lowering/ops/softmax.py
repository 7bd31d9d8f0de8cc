"""Softmax and its logarithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, length, may_be_zero, rank, size
from ort_backend.lowering.constants import constant, int64s, scalar_like
from ort_backend.lowering.dtypes import to_ir
from ort_backend.lowering.microsoft import microsoft, typed
from ort_backend.lowering.ops.loss import RowGradient
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import reshape

aten = torch.ops.aten


def _along(op: Any, write: Callable[..., ir.Value], *tensors: ir.Value) -> ir.Value:
    """Calls `write` on tensors of at least one dimension."""
    if tensors[0].shape.rank():  # type: ignore[union-attr]
        return write(*tensors)
    return op.Squeeze(write(*(op.Unsqueeze(tensor, int64s(op, [0])) for tensor in tensors)), int64s(op, [0]))


def _merged(op: Any, kernel: Callable[..., ir.Value], x: ir.Value, dim: int) -> ir.Value:
    """`kernel(x)` along `dim`, with what lies behind it as one dimension.

    ONNX Runtime's kernels exchange `dim` with the last dimension, and take up to four times as long where another stands between.
    """
    at = axis(x, dim)
    if rank(x) - at <= 2 or any(map(may_be_zero, x.shape)):  # type: ignore[arg-type]
        return kernel(x, axis=at)
    sizes = [length(op, x, i) for i in range(rank(x))]
    merged = reshape(op, x, [*sizes[: at + 1], -1])
    return reshape(op, kernel(merged, axis=at), sizes)


def _softmax(op: Any, x: ir.Value, dim: int) -> ir.Value:
    """In float64 on a device by primitives: the kernel there takes its exponentials in float32 (1.19.2, seen on an H100)."""
    if x.dtype != ir.DataType.DOUBLE or op.builder.device_type == "cpu":
        return _merged(op, op.Softmax, x, dim)
    at = int64s(op, [dim])
    powers = op.Exp(op.Sub(x, op.ReduceMax(x, at, keepdims=1)))
    return op.Div(powers, op.ReduceSum(powers, at, keepdims=1))


@register(aten._softmax.default, promote="output")
def softmax(op, self, dim, half_to_float):
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    return _along(op, lambda x: _softmax(op, x, dim), self)


@register(aten._softmax_backward_data.default, requires=("com.microsoft::SoftmaxGrad_13",))
def softmax_backward_fused(op, grad_output, output, dim, input_dtype):
    """_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    shape = output.shape
    is_last = dim % max(shape.rank(), 1) == shape.rank() - 1
    if shape.rank() and not is_last and not (shape.is_static() and 0 not in shape):
        # The CPU kernel transposes, and ends the process with a division by zero where there is no element (1.19.2).
        raise Unsupported("SoftmaxGrad of a tensor that may be empty, along another dimension than the last")
    return _along(op, lambda g, y: microsoft(op, "SoftmaxGrad_13", g, y, like=y, axis=dim), grad_output, output)


@register(aten._softmax_backward_data.default)
def softmax_backward(op, grad_output, output, dim, input_dtype):
    """_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""

    def write(g: ir.Value, y: ir.Value) -> ir.Value:
        gy = op.Mul(g, y)
        return op.Sub(gy, op.Mul(y, op.ReduceSum(gy, int64s(op, [dim]), keepdims=1)))

    return _along(op, write, grad_output, output)


@register(aten._log_softmax.default, promote="output")
def log_softmax(op, self, dim, half_to_float):
    """_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor

    ONNX Runtime's kernel of float64 passes over NaN, and over infinities.
    """

    def write(x: ir.Value) -> ir.Value:
        if x.dtype != ir.DataType.DOUBLE:
            return _merged(op, op.LogSoftmax, x, dim)
        if size(x, dim) == 0:  # ONNX Runtime's ReduceMax takes none of nothing
            return x
        at = int64s(op, [dim])
        highest = op.ReduceMax(x, at, keepdims=1)
        shifted = op.Sub(x, highest)
        return op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), at, keepdims=1)))

    return _along(op, write, self)


@register(aten._log_softmax_backward_data.default)
def log_softmax_backward(op, grad_output, output, dim, input_dtype):
    """_log_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor

    Primitives, for LogSoftmaxGrad_13 takes 7.8 ms where they take 2.2 (256 x 8192, CPU). Behind `nll_loss`, whose gradient has one entry
    a row, neither the sum nor that gradient is needed: 1.5 ms for both, where SoftmaxCrossEntropyLossInternalGrad takes 6.1.
    """
    row = RowGradient.of(grad_output)
    if row is not None and row.axis == dim % max(output.shape.rank(), 1):
        return row.add_to(op, op.Mul(op.Exp(output), op.Neg(row.value)))

    def write(g: ir.Value, y: ir.Value) -> ir.Value:
        return op.Sub(g, op.Mul(op.Exp(y), op.ReduceSum(g, int64s(op, [dim]), keepdims=1)))

    return _along(op, write, grad_output, output)


def _is_above_infinity(op: Any, x: ir.Value, dim: int) -> ir.Value:
    """1 for rows of which a number is not -inf, else 0. Of nothing but -inf CUDA's ReduceMax makes the least finite number (1.19.2, an H100)."""
    lowest = scalar_like(op, -np.inf, x)
    if op.builder.device_type == "cpu":
        return op.Cast(op.Greater(op.ReduceMax(x, int64s(op, [dim]), keepdims=1), lowest), to=x.dtype)
    assert x.dtype is not None
    above = typed(op.Cast(op.Greater(x, lowest), to=x.dtype), x.dtype, x.shape)
    return op.ReduceMax(above, int64s(op, [dim]), keepdims=1)


@register(aten._safe_softmax.default)
def safe_softmax(op, self, dim, dtype=None):
    """_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor"""
    if dtype is not None and to_ir(dtype) != self.dtype:
        self = op.Cast(self, to=to_ir(dtype))

    def write(x: ir.Value) -> ir.Value:
        if size(x, dim) == 0:
            return x
        # A row of -inf becomes one of equal finite numbers, and then 0. Where over the whole tensor would take far longer.
        assert x.dtype is not None
        alive = _is_above_infinity(op, x, dim)
        lowest = constant(op, float(np.finfo(x.dtype.numpy()).min), x.dtype)
        return op.Mul(_softmax(op, typed(op.Max(x, lowest), x.dtype, x.shape), dim), alive)

    return _along(op, write, self)
