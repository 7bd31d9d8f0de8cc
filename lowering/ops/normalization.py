"""Layer normalization, beside its backward, and what other normalizations share with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.constants import constant, int64s, scalar_like
from ort_backend.lowering.microsoft import microsoft, typed
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten


def filled(op: Any, number: float, size: Sequence[int | ir.Value], like: ir.Value) -> ir.Value:
    """A constant that repeats a number, of the dtype of `like`."""
    if not all(isinstance(part, int) for part in size):
        raise Unsupported("normalization over dimensions of unknown size without a weight")
    return constant(op, np.full(list(size), number), like.dtype)  # type: ignore[arg-type]


def sum_over(op: Any, tensor: ir.Value, axes: Sequence[int], keepdims: bool = False) -> ir.Value:
    """The sum over some axes; the tensor itself over none."""
    return op.ReduceSum(tensor, int64s(op, axes), keepdims=int(keepdims)) if axes else tensor


def mean_over(op: Any, tensor: ir.Value, axes: Sequence[int], keepdims: bool = True) -> ir.Value:
    """The mean over some axes."""
    return op.ReduceMean(tensor, int64s(op, axes), keepdims=int(keepdims))


def other_dims(input: ir.Value) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, input.shape.rank())]  # type: ignore[union-attr]


def per_channel(op: Any, vector: ir.Value, like: ir.Value) -> ir.Value:
    """A vector over channels in the shape that broadcasts over `like` (N, C, ...)."""
    spatial = like.shape.rank() - 2  # type: ignore[union-attr]
    return op.Unsqueeze(vector, int64s(op, list(range(1, 1 + spatial)))) if spatial else vector


def rsqrt(op: Any, variance: ir.Value, eps: float) -> ir.Value:
    """1 / deviation."""
    return op.Reciprocal(op.Sqrt(op.Add(variance, scalar_like(op, eps, variance))))


_HALF = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def as_single(op: Any, *values: ir.Value | None) -> list[Any]:
    """The values, those in half precision as float32: what statistics are in PyTorch's kernels for CUDA. (Elsewhere all are when they come here.)"""
    return [op.Cast(value, to=ir.DataType.FLOAT) if value is not None and value.dtype in _HALF else value for value in values]


def refuse_double(input: ir.Value) -> None:
    """Raises Unsupported for float64, for which the fused kernels are not precise enough."""
    if input.dtype == ir.DataType.DOUBLE:
        raise Unsupported("the fused kernels keep their statistics in float32")


def refuse_single(sizes: Sequence[Any]) -> None:
    """Raises Unsupported where the product of the normalized sizes is known to be 1."""
    if all(not isinstance(size, ir.Value) for size in sizes) and math.prod(sizes) == 1:
        raise Unsupported("the fused kernel does not normalise single elements")


# Elements from which on the mean and deviation of a row by ONNX Runtime's LayerNormalization, which adds one number after the other, are off by 1e-5.
LONG = 32768


def needs_primitives(op: Any, input: ir.Value, dims: int) -> bool:
    """Whether rows, of so many last dimensions, are too precise or too long for LayerNormalization, whose mean and deviation are sums in float32.

    Or are single elements, which its kernel for CUDA refuses as it runs (1.19.2).
    """
    sizes = [size for size in input.shape[-dims:] if isinstance(size, int)]  # type: ignore[index]
    is_single = len(sizes) == dims and math.prod(sizes) == 1
    return input.dtype == ir.DataType.DOUBLE or math.prod(sizes) >= LONG or (is_single and op.builder.device_type != "cpu")


# -- layer norm


@register(aten.native_layer_norm.default)
def native_layer_norm(op, input, normalized_shape, weight, bias, eps):
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"""
    dims = len(normalized_shape)
    if needs_primitives(op, input, dims):
        return layer_norm_by_primitives(op, input, dims, weight, bias, eps)
    weight = filled(op, 1.0, normalized_shape, input) if weight is None else weight
    inputs = (input, weight) if bias is None else (input, weight, bias)
    return op.LayerNormalization(*inputs, axis=-dims, epsilon=eps, _outputs=3)


def layer_norm_by_primitives(op: Any, input: ir.Value, dims: int, weight: ir.Value | None, bias: ir.Value | None, eps: float) -> list[ir.Value]:
    """(result, mean, 1 / deviation) of rows of the last `dims` dimensions, the statistics with these dimensions kept."""
    input, weight, bias = as_single(op, input, weight, bias)
    axes = list(range(-dims, 0))
    mean = mean_over(op, input, axes)
    centred = op.Sub(input, mean)
    rstd = rsqrt(op, mean_over(op, op.Mul(centred, centred), axes), eps)
    out = op.Mul(centred, rstd)
    out = out if weight is None else op.Mul(out, weight)
    return [out if bias is None else op.Add(out, bias), mean, rstd]


# -- root mean square norm


@register(aten._fused_rms_norm.default, requires=("com.microsoft::SimplifiedLayerNormalizationGrad",))
def fused_rms_norm(op, input, normalized_shape, weight, eps):
    """_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"""
    _refuse_other_rms_norms(op, input, normalized_shape, weight, eps)
    normal, root = op.SimplifiedLayerNormalization(input, weight, axis=-1, epsilon=eps, _outputs=2)
    return typed(normal, input.dtype, input.shape), typed(root, input.dtype, [*input.shape[:-1], 1])


@register(aten._fused_rms_norm_backward.default, requires=("com.microsoft::SimplifiedLayerNormalizationGrad",))
def fused_rms_norm_backward(op, grad_out, input, normalized_shape, rstd, weight, output_mask):
    """_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight, bool[2] output_mask) ->
    (Tensor, Tensor)
    """
    _refuse_other_rms_norms(op, input, normalized_shape, weight, 0.0)
    # The kernel writes both.
    results = microsoft(op, "SimplifiedLayerNormalizationGrad", grad_out, input, weight, rstd, like=(input, weight), axis=-1)
    return [result if wanted else None for result, wanted in zip(results, output_mask)]


def _refuse_other_rms_norms(op: Any, input: ir.Value, sizes: Sequence[Any], weight: ir.Value | None, eps: float | None) -> None:
    """Raises Unsupported for all but norms of float32 over the last dimension, with a weight."""
    if len(sizes) != 1 or weight is None or eps is None or input.dtype != ir.DataType.FLOAT or weight.dtype != input.dtype:
        raise Unsupported("another norm than one of float32 over the last dimension, with a weight")
    if needs_primitives(op, input, 1):
        raise Unsupported("rows that the fused kernel is not for")


@register(aten.native_layer_norm_backward.default, requires=("com.microsoft::LayerNormalizationGrad",))
def native_layer_norm_backward_fused(op, grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    """native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight,
    Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    refuse_double(input)
    refuse_single(normalized_shape)
    scale = filled(op, 1.0, normalized_shape, input) if weight is None else weight
    mean, rstd = as_single(op, mean, rstd)
    # The kernel writes all three.
    results = microsoft(op, "LayerNormalizationGrad", grad_out, input, scale, mean, rstd, like=(input, scale, scale), axis=-len(normalized_shape))
    return [result if wanted else None for result, wanted in zip(results, output_mask)]


@register(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(op, grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    """native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight,
    Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    grad_out, input, mean, rstd, weight = as_single(op, grad_out, input, mean, rstd, weight)
    inner = list(range(-len(normalized_shape), 0))
    outer = list(range(input.shape.rank() - len(normalized_shape)))
    normal = op.Mul(op.Sub(input, mean), rstd)
    scaled = grad_out if weight is None else op.Mul(grad_out, weight)
    along = op.Mul(normal, mean_over(op, op.Mul(scaled, normal), inner))
    grad_input = op.Mul(op.Sub(op.Sub(scaled, mean_over(op, scaled, inner)), along), rstd)
    grad_weight = sum_over(op, op.Mul(grad_out, normal), outer) if output_mask[1] else None
    return grad_input if output_mask[0] else None, grad_weight, sum_over(op, grad_out, outer) if output_mask[2] else None
