"""Convolutions of one to three dimensions and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import rank, refuse_empty, sizes
from ort_backend.lowering.constants import int64s
from ort_backend.lowering.microsoft import microsoft
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

# Pixels of an image from which on products for each image are faster than one for all.
_LARGE_IMAGE = 512


def _per_dim(sizes: Sequence[Any], spatial: int) -> list[int]:
    """One number for each spatial dimension."""
    if any(isinstance(size, ir.Value) for size in sizes):
        raise Unsupported("strides, padding or dilation that are not constant")
    return [int(size) for size in sizes] if len(sizes) == spatial else [int(sizes[0])] * spatial


def _attributes(weight: ir.Value, stride: Any, padding: Any, dilation: Any, groups: Any) -> dict[str, Any]:
    kernel = list(weight.shape[2:])  # type: ignore[index]
    if not all(isinstance(size, int) for size in kernel):
        raise Unsupported("a kernel of unknown size")
    if isinstance(groups, ir.Value):
        raise Unsupported("a number of groups that is not constant")
    spatial = len(kernel)
    pads = _per_dim(padding, spatial)
    return {
        "kernel_shape": kernel,
        "strides": _per_dim(stride, spatial),
        "pads": pads + pads,
        "dilations": _per_dim(dilation, spatial),
        "group": groups,
    }


def _refuse_far_padding(transposed: bool, output_padding: Any, attributes: dict[str, Any]) -> None:
    """ONNX Runtime's result is another one then (1.19.2), and the convolution that is the gradient has too large a result."""
    if transposed and any(more >= stride for more, stride in zip(_per_dim(output_padding, len(attributes["strides"])), attributes["strides"])):
        raise Unsupported("output_padding of a stride or more")


def _refuse_empty(input: ir.Value, output_padding: Any, attributes: dict[str, Any]) -> None:
    """ONNX Runtime fails where padding takes all of a transposed convolution's result away (1.19.2 and 1.32.0)."""
    names = ("strides", "pads", "dilations", "kernel_shape")
    more = _per_dim(output_padding, len(attributes["strides"]))
    for size, stride, pad, dilation, taps, behind in zip(input.shape[2:], *(attributes[name] for name in names), more):  # type: ignore[index]
        if isinstance(size, int) and (size - 1) * stride - 2 * pad + dilation * (taps - 1) + behind + 1 == 0:
            raise Unsupported("a transposed convolution whose result has no elements")


@register(aten.convolution.default, promote="output")
def convolution(op, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed,
    SymInt[] output_padding, SymInt groups) -> Tensor
    """
    attributes = _attributes(weight, stride, padding, dilation, groups)
    _refuse_far_padding(transposed, output_padding, attributes)
    inputs = (input, weight) if bias is None else (input, weight, bias)
    if not transposed:
        return op.Conv(*inputs, **attributes)
    _refuse_empty(input, output_padding, attributes)
    return _transposed(op, *inputs, **attributes, output_padding=_per_dim(output_padding, len(attributes["strides"])))


def _transposed(op: Any, input: ir.Value, weight: ir.Value, *bias: ir.Value, **attributes: Any) -> ir.Value:
    """A transposed convolution; over one dimension as one over planes of height 1: see `_of_planes`."""
    if len(attributes["strides"]) != 1:
        return op.ConvTranspose(input, weight, *bias, **attributes)
    planes = [op.Unsqueeze(value, int64s(op, [2])) for value in (input, weight)]
    return op.Squeeze(op.ConvTranspose(*planes, *bias, **_of_planes(attributes)), int64s(op, [2]))


@register(aten.convolution_backward.default, requires=("com.microsoft::ConvGrad",))
def convolution_backward_fused(
    op, grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride, SymInt[] padding,
    SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    attributes = _attributes(weight, stride, padding, dilation, groups)
    _refuse_far_padding(transposed, output_padding, attributes)
    if not transposed:
        bias = ir.Value(type=weight.type, shape=ir.Shape([weight.shape[0]]))
        likes = [like if wanted else None for like, wanted in zip((input, weight, bias), output_mask)]
        if len(attributes["strides"]) == 1:
            return _as_planes(op, grad_output, input, weight, likes, attributes)
        # For each group but the first, the kernel clears as much memory as all groups have: past the end of the input's gradient, except in
        # its code for two dimensions (1.19.2).
        if groups != 1 and len(attributes["strides"]) != 2 and output_mask[0]:
            raise Unsupported("ConvGrad writes past its output for grouped convolutions over other than two dimensions")
        return _conv_grad(op, grad_output, input, weight, likes, attributes)
    # The transposed convolution is the gradient of a convolution: its own gradient is that convolution.
    grad_input = op.Conv(grad_output, weight, **attributes) if output_mask[0] else None
    grad_weight = None
    if output_mask[1]:
        write = _as_planes if len(attributes["strides"]) == 1 else _conv_grad
        _, grad_weight, _ = write(op, input, grad_output, weight, [None, weight, None], attributes)
    return grad_input, grad_weight, _bias_gradient(op, grad_output) if output_mask[2] else None


def _conv_grad(op: Any, grad_output: ir.Value, input: ir.Value, weight: ir.Value, likes: list[Any], attributes: dict[str, Any]) -> list[Any]:
    return list(microsoft(op, "ConvGrad", grad_output, input, weight, like=likes, **attributes))


def _as_planes(op: Any, grad_output: ir.Value, input: ir.Value, weight: ir.Value, likes: list[Any], attributes: dict[str, Any]) -> list[Any]:
    """`ConvGrad` of a convolution over one dimension, as one over planes of height 1: see `_of_planes`."""
    grad_output, input, weight = (op.Unsqueeze(value, int64s(op, [2])) for value in (grad_output, input, weight))
    high = [None if like is None else ir.Value(type=like.type, shape=_with_height(like)) for like in likes]
    grad_input, grad_weight, grad_bias = _conv_grad(op, grad_output, input, weight, high, _of_planes(attributes))
    return [None if value is None else op.Squeeze(value, int64s(op, [2])) for value in (grad_input, grad_weight)] + [grad_bias]


def _of_planes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a convolution over one dimension for planes of height 1.

    ONNX Runtime's code for pixels under a filter, and that for their sums, is fast in two dimensions: in one, signals of 32 to 512 channels took
    transposed convolutions 1.7 to 3.8 times as long, gradients 1.2 to 3.6 times (1.19.2; AMD EPYC of family 25, model 17).
    """
    (before, after), neutral = attributes["pads"], {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}
    return {**attributes, "pads": [0, before, 0, after], **{name: [one, *attributes[name]] for name, one in neutral.items() if name in attributes}}


def _with_height(value: ir.Value) -> ir.Shape | None:
    if value.shape is None or value.shape.rank() < 3:
        return value.shape
    return ir.Shape([*value.shape[:2], 1, *value.shape[2:]])


@register(aten.convolution_backward.default)
def convolution_backward(op, grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask):
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride, SymInt[] padding,
    SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    attributes = _attributes(weight, stride, padding, dilation, groups)
    _refuse_far_padding(transposed, output_padding, attributes)
    grad_input = grad_weight = None
    if not transposed and is_pointwise(attributes["kernel_shape"], attributes["strides"], attributes["pads"], groups):
        refuse_empty("the gradient of a convolution", grad_output, input)
        if output_mask[0]:
            grad_input = op.Conv(grad_output, op.Transpose(weight, perm=[1, 0, *range(2, rank(weight))]))
        if output_mask[1]:
            grad_weight = op.Unsqueeze(_product_of_pixels(op, grad_output, input), int64s(op, range(2, rank(weight))))
        return grad_input, grad_weight, _bias_gradient(op, grad_output) if output_mask[2] else None
    if output_mask[0]:
        grad_input = op.Conv(grad_output, weight, **attributes) if transposed else _input_gradient(op, grad_output, input, weight, attributes)
    if output_mask[1]:
        over, of = (input, grad_output) if transposed else (grad_output, input)
        grad_weight = _weight_gradient(op, over, of, weight, attributes)
    return grad_input, grad_weight, _bias_gradient(op, grad_output) if output_mask[2] else None


def is_pointwise(kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], groups: int) -> bool:
    """Whether a convolution is one product of each pixel's channels: its gradients are products as well."""
    return groups == 1 and {*kernel, *strides} == {1} and not any(pads)


def _product_of_pixels(op: Any, grad_output: ir.Value, input: ir.Value) -> ir.Value:
    """The sum over all images and pixels of the gradient's channels times the input's: (results, channels).

    Of large images in a batch of products, else in one, of channels that are laid out first: the batch takes onnxruntime 1.32.0 0.65 to 0.95 of the
    time of the one for images of 28 x 28 and more, 1.0 to 1.1 for 14 x 14, up to 4 for 4 x 4 (AMD EPYC of family 25, model 17). With the input's
    gradient this takes 0.7 to 0.95 of PyTorch's time.
    """
    known = sizes(input)
    if known is not None and math.prod(known[2:]) >= _LARGE_IMAGE:
        rows = [op.Reshape(tensor, int64s(op, [0, 0, -1])) for tensor in (grad_output, input)]
        return op.ReduceSum(op.MatMul(rows[0], op.Transpose(rows[1], perm=[0, 2, 1])), int64s(op, [0]), keepdims=0)
    first = [op.Transpose(tensor, perm=[1, 0, *range(2, rank(tensor))]) for tensor in (grad_output, input)]
    return op.Gemm(*(op.Reshape(tensor, int64s(op, [0, -1])) for tensor in first), transB=1)


def _input_gradient(op: Any, grad_output: ir.Value, input: ir.Value, weight: ir.Value, attributes: dict[str, Any]) -> ir.Value:
    """The transposed convolution, without padding and as long as a stride can make it, cut to the input's size."""
    spatial = len(attributes["strides"])
    pads = attributes["pads"][:spatial]
    longest = {**attributes, "pads": [0] * (2 * spatial), "output_padding": [stride - 1 for stride in attributes["strides"]]}
    full = _transposed(op, grad_output, weight, **longest)
    ends = op.Add(op.Shape(input, start=2), int64s(op, pads))
    return op.Slice(full, int64s(op, pads), ends, int64s(op, range(2, 2 + spatial)))


def _weight_gradient(op: Any, grad_output: ir.Value, input: ir.Value, weight: ir.Value, attributes: dict[str, Any]) -> ir.Value:
    """A convolution in which batch and channels have changed places, and strides and dilations too."""
    groups, kernel = attributes["group"], attributes["kernel_shape"]
    spatial = len(kernel)
    flipped = {"strides": attributes["dilations"], "dilations": attributes["strides"], "pads": attributes["pads"], "group": groups}
    made = op.Conv(_channels_first(op, input, groups, True), _channels_first(op, grad_output, groups, False), **flipped)
    # A stride that does not divide the input leaves rows behind the kernel's own.
    cut = op.Slice(made, int64s(op, [0] * spatial), int64s(op, kernel), int64s(op, range(2, 2 + spatial)))
    return op.Transpose(cut, perm=[1, 0, *range(2, 2 + spatial)])


def _channels_first(op: Any, tensor: ir.Value, groups: int, groups_inside: bool) -> ir.Value:
    """(N, groups channels, ...) as (channels, groups N, ...), or as (groups channels, N, ...)."""
    spatial = list(range(2, tensor.shape.rank()))  # type: ignore[union-attr]
    if groups == 1 or not groups_inside:
        return op.Transpose(tensor, perm=[1, 0, *spatial])
    channels = tensor.shape[1]  # type: ignore[index]
    if not isinstance(channels, int):
        raise Unsupported("an unknown number of channels")
    rest = op.Shape(tensor, start=2)
    split = op.Reshape(tensor, op.Concat(int64s(op, [0, groups, channels // groups]), rest, axis=0))
    swapped = op.Transpose(split, perm=[2, 1, 0, *(axis + 1 for axis in spatial)])
    return op.Reshape(swapped, op.Concat(int64s(op, [channels // groups, -1]), rest, axis=0))


def _bias_gradient(op: Any, grad_output: ir.Value) -> ir.Value:
    return op.ReduceSum(grad_output, int64s(op, [0, *range(2, grad_output.shape.rank())]), keepdims=0)  # type: ignore[union-attr]
