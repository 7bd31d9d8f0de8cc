"""Convolutions of one to three dimensions and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import int64s
from ort_backend.lowering.microsoft import microsoft
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten


def _per_dim(sizes: Sequence[Any], spatial: int) -> list[int]:
    """One number for each spatial dimension."""
    if any(isinstance(size, ir.Value) for size in sizes):
        raise Unsupported("strides, padding or dilation that are not constant")
    return [int(size) for size in sizes] if len(sizes) == spatial else [int(sizes[0])] * spatial


def _attributes(weight: ir.Value, stride: Any, padding: Any, dilation: Any, groups: int) -> dict[str, Any]:
    kernel = list(weight.shape[2:])  # type: ignore[index]
    if not all(isinstance(size, int) for size in kernel):
        raise Unsupported("a kernel of unknown size")
    spatial = len(kernel)
    pads = _per_dim(padding, spatial)
    return {
        "kernel_shape": kernel,
        "strides": _per_dim(stride, spatial),
        "pads": pads + pads,
        "dilations": _per_dim(dilation, spatial),
        "group": groups,
    }


@register(aten.convolution.default, promote="output")
def convolution(op, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed,
    SymInt[] output_padding, SymInt groups) -> Tensor"""
    attributes = _attributes(weight, stride, padding, dilation, groups)
    inputs = (input, weight) if bias is None else (input, weight, bias)
    if not transposed:
        return op.Conv(*inputs, **attributes)
    return op.ConvTranspose(*inputs, **attributes, output_padding=_per_dim(output_padding, len(attributes["strides"])))


@register(aten.convolution_backward.default, requires=("com.microsoft::ConvGrad",))
def convolution_backward(op, grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask):
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride, SymInt[] padding,
    SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""
    attributes = _attributes(weight, stride, padding, dilation, groups)
    if not transposed:
        bias = ir.Value(type=weight.type, shape=ir.Shape([weight.shape[0]]))
        likes = [like if wanted else None for like, wanted in zip((input, weight, bias), output_mask)]
        return microsoft(op, "ConvGrad", grad_output, input, weight, like=likes, **attributes)
    # The transposed convolution is the gradient of a convolution: its own gradient is that convolution.
    grad_input = op.Conv(grad_output, weight, **attributes) if output_mask[0] else None
    grad_weight = None
    if output_mask[1]:
        _, grad_weight, _ = microsoft(op, "ConvGrad", input, grad_output, weight, like=[None, weight, None], **attributes)
    return grad_input, grad_weight, _bias_gradient(op, grad_output) if output_mask[2] else None


def _bias_gradient(op: Any, grad_output: ir.Value) -> ir.Value:
    return op.ReduceSum(grad_output, int64s(op, [0, *range(2, grad_output.shape.rank())]), keepdims=0)  # type: ignore[union-attr]
