"""Group normalization: layer normalization of (N, groups, the rest), with the affine part for each channel."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import refuse_empty
from ort_backend.lowering.constants import int64s
from ort_backend.lowering.microsoft import microsoft, typed
from ort_backend.lowering.ops.normalization import (
    as_single,
    layer_norm_by_primitives,
    mean_over,
    needs_primitives,
    other_dims,
    per_channel,
    refuse_double,
    refuse_single,
    sum_over,
)
from ort_backend.lowering.registry import register
from ort_backend.lowering.symbolic import reshape

aten = torch.ops.aten


def _grouped(op: Any, tensor: ir.Value, N: Any, group: int) -> ir.Value:
    refuse_empty("groups", tensor)
    grouped = reshape(op, tensor, [N, group, -1])
    sizes: Any = tensor.shape[1:]  # type: ignore[index]
    row = math.prod(sizes) // group if all(isinstance(size, int) for size in sizes) else None
    return typed(grouped, tensor.dtype, [tensor.shape[0], group, row])  # type: ignore[index]


def _ones_behind(op: Any, grouped: ir.Value) -> ir.Value:
    """Ones of the size of the last dimension."""
    size = op.Shape(grouped, start=2, end=3)
    return typed(op.ConstantOfShape(size, value=ir.tensor([1.0], dtype=grouped.dtype)), grouped.dtype, [None])


@register(aten.native_group_norm.default)
def native_group_norm(op, input, weight, bias, N, C, HxW, group, eps):
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, float eps) ->
    (Tensor, Tensor, Tensor)
    """
    grouped = _grouped(op, input, N, group)
    if needs_primitives(op, grouped, 1):
        weight, bias = as_single(op, weight, bias)
        out, mean, rstd = layer_norm_by_primitives(op, grouped, 1, None, None, eps)
    else:
        out, mean, rstd = op.LayerNormalization(grouped, _ones_behind(op, grouped), axis=-1, epsilon=eps, _outputs=3)
    out = typed(op.Reshape(out, op.Shape(input)), out.dtype, input.shape)
    if weight is not None:
        out = op.Mul(out, per_channel(op, weight, input))
    if bias is not None:
        out = op.Add(out, per_channel(op, bias, input))
    return out, *(op.Squeeze(value, int64s(op, [2])) for value in (mean, rstd))


def _group_norm_inputs(op: Any, grad_out: ir.Value, input: ir.Value, weight: Any, N: Any, group: int) -> tuple[ir.Value, ir.Value]:
    scaled = grad_out if weight is None else op.Mul(grad_out, per_channel(op, weight, input))
    return _grouped(op, typed(scaled, input.dtype, input.shape) if weight is not None else scaled, N, group), _grouped(op, input, N, group)


def _group_norm_affine(op: Any, grad_out: Any, x: Any, mean: Any, rstd: Any, input: Any, mask: Any) -> tuple[ir.Value | None, ir.Value | None]:
    """The gradients of weight and bias; `x` is the grouped input, `mean` and `rstd` broadcast over it."""
    grad_out, x, mean, rstd = as_single(op, grad_out, x, mean, rstd)
    axes = other_dims(input)
    grad_weight = None
    if mask[1]:
        normal = typed(op.Reshape(op.Mul(op.Sub(x, mean), rstd), op.Shape(input)), x.dtype, input.shape)
        grad_weight = sum_over(op, op.Mul(grad_out, normal), axes)
    return grad_weight, sum_over(op, grad_out, axes) if mask[2] else None


@register(aten.native_group_norm_backward.default, requires=("com.microsoft::LayerNormalizationGrad",))
def native_group_norm_backward_fused(op, grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    """native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N, SymInt C, SymInt HxW,
    int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    refuse_double(input)
    refuse_single([C, HxW, 1 / group])
    g, x = _group_norm_inputs(op, grad_out, input, weight, N, group)
    mean, rstd = (typed(op.Unsqueeze(value, int64s(op, [2])), value.dtype, [*value.shape, 1]) for value in as_single(op, mean, rstd))
    grad_input = None
    if output_mask[0]:
        ones = _ones_behind(op, x)
        grad_input, _, _ = microsoft(op, "LayerNormalizationGrad", g, x, ones, mean, rstd, like=(x, ones, ones), axis=-1)
        grad_input = op.Reshape(grad_input, op.Shape(input))
    return grad_input, *_group_norm_affine(op, grad_out, x, mean, rstd, input, output_mask)


@register(aten.native_group_norm_backward.default)
def native_group_norm_backward(op, grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    """native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N, SymInt C, SymInt HxW,
    int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    grad_out, input, mean, rstd, weight = as_single(op, grad_out, input, mean, rstd, weight)
    g, x = _group_norm_inputs(op, grad_out, input, weight, N, group)
    mean, rstd = (op.Unsqueeze(value, int64s(op, [2])) for value in (mean, rstd))
    grad_input = None
    if output_mask[0]:
        normal = op.Mul(op.Sub(x, mean), rstd)
        along = op.Mul(normal, mean_over(op, op.Mul(g, normal), [2]))
        grad_input = op.Reshape(op.Mul(op.Sub(op.Sub(g, mean_over(op, g, [2])), along), rstd), op.Shape(input))
    return grad_input, *_group_norm_affine(op, grad_out, x, mean, rstd, input, output_mask)
