"""Weight normalization's backward; its forward is decomposed."""

from __future__ import annotations

import torch

from ort_backend.lowering.constants import int64s
from ort_backend.lowering.registry import register

aten = torch.ops.aten


@register(aten._weight_norm_interface_backward.default)
def weight_norm_interface_backward(op, grad_w, saved_v, saved_g, saved_norms, dim):
    """_weight_norm_interface_backward(Tensor grad_w, Tensor saved_v, Tensor saved_g, Tensor saved_norms, int dim) -> (Tensor, Tensor)"""
    rank = saved_v.shape.rank()
    axes = [axis for axis in range(rank) if axis != dim % rank]
    shape = int64s(op, [-1 if axis == dim % rank else 1 for axis in range(rank)])
    norms, g = op.Reshape(saved_norms, shape), op.Reshape(saved_g, shape)
    along = op.Mul(grad_w, saved_v)
    grad_g = op.Div(op.ReduceSum(along, int64s(op, axes), keepdims=1) if axes else along, norms)
    grad_v = op.Mul(op.Sub(grad_w, op.Mul(saved_v, op.Div(grad_g, norms))), op.Div(g, norms))
    return grad_v, op.Reshape(grad_g, op.Shape(saved_g))
