"""Depthwise convolutions on the CPU, where each channel has a filter of its own: which kernels run them, and a faster gradient.

ONNX Runtime takes one plane of one image after the other: its time follows their number as well as that of the pixels. oneDNN's kernels take the
channels side by side. Its gradient of the filters, fast for 3 x 3, is a plain loop for all others (oneDNN's `ref:any` in `ONEDNN_VERBOSE=1`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ort_backend.lowering.fx_nodes import convolution_of
from ort_backend.lowering.kernels.dense_products import processor_multiplies_bfloat16
from ort_backend.lowering.symbolic import hint

aten = torch.ops.aten


def is_faster_in_pytorch(node: fx.Node, margin: float = 0) -> bool:
    """Whether a node is a depthwise convolution, or its backward, that PyTorch's kernels, called as here, run faster than ONNX Runtime's.

    Symbolic sizes count as their example. The times, in microseconds, are lines through those of 160 shapes: filters of 3, 5 and 7 pixels, strides
    of 1 and 2, planes of 2 x 2 to 56 x 56, batches of 1 to 32; some sequences (AMD EPYC of family 25, model 17; onnxruntime-training 1.19.2, torch
    2.13). The one for PyTorch has 40 for the node, and must be less by `margin`.
    """
    one = convolution_of(node)
    if one is None or not _is_depthwise(one.image, one.weight, one.transposed, one.groups):
        return False
    size, filter_size = [hint(n) for n in one.image.shape], one.weight.shape[2:]
    planes, taps = size[0] * size[1], math.prod(filter_size)
    pixels = planes * math.prod(map(hint, one.result.shape[2:]))
    if node.target is aten.convolution.default:
        return 0.2 * planes + 0.22e-3 * taps * pixels > 100 + 0.8e-3 * pixels + margin
    here = 150 + 1.3e-3 * pixels if _has_kernel(size[2:], filter_size, one.dilation) else 260 + 4e-3 * pixels
    return (0.2 + 0.018 * taps) * planes + 0.6e-3 * taps * pixels > here + margin


def _is_depthwise(image: Tensor, weight: Tensor, transposed: bool, groups: int, dtype: torch.dtype = torch.float32) -> bool:
    channels = image.shape[1]
    return not transposed and 3 <= image.dim() <= 4 and image.dtype is dtype and tuple(weight.shape[:2]) == (channels, 1) and groups == channels


def _has_kernel(size: Any, filter_size: Any, dilation: Any) -> bool:
    """Whether oneDNN has a kernel for the gradient of the filters: not for planes of 1 or 2 pixels either."""
    return all(one == 3 for one in filter_size) and all(one == 1 for one in dilation) and min(size) > 2


def convolution(
    image: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> Tensor:
    """`aten::convolution`, behind a border of zeros where oneDNN makes none."""
    is_depthwise = image.is_cpu and _is_depthwise(image, weight, transposed, groups)
    if is_depthwise and _needs_border(image, padding) and _border_pays(image, weight.shape, stride, padding, dilation):
        image, padding = _with_border(image, padding)
    return torch.convolution(image, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _needs_border(image: Tensor, padding: Sequence[int], widest: int = 6) -> bool:
    """Whether oneDNN has a plain loop for an image with this padding: its kernels take borders of up to 6 pixels, no wider than the image.

    8 x 144 sequences of 100 numbers and filters of 31 took 2.5 ms, behind a border of zeros 0.2.
    """
    return not all(border <= min(widest, plane) for border, plane in zip(_for_each(padding, image), image.shape[2:]))


def _border_pays(image: Tensor, filters: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether a plane with its border has no more than half as many pixels as oneDNN's loop has products: numbers of the filter, for each pixel of
    the result. (Not as many: the pages of new memory can cost more than what is written there.)

    Filters spread out beyond small planes, as in DeepLab, have more: for 4 x 512 planes of 4 x 4 and filters of 3 x 3 numbers 36 pixels apart
    the loop takes 0.6 ms, zeros around the planes 55.
    """
    steps, borders, distances = (_for_each(numbers, image) for numbers in (stride, padding, dilation))
    wide = [plane + 2 * border for plane, border in zip(image.shape[2:], borders)]
    result = [(size - distance * (taps - 1) - 1) // step + 1 for size, distance, taps, step in zip(wide, distances, filters[2:], steps)]
    return 2 * math.prod(wide) <= math.prod(filters[2:]) * math.prod(result)


def _with_border(image: Tensor, padding: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
    """The image with zeros around it, and the padding that remains."""
    padding = _for_each(padding, image)
    return torch.nn.functional.pad(image, [border for border in reversed(padding) for _ in range(2)]), [0] * len(padding)


def _for_each(numbers: Sequence[int], image: Tensor) -> Sequence[int]:
    """One number for each dimension of a plane: an operator may get one for all."""
    return numbers if len(numbers) == image.dim() - 2 else [*numbers] * (image.dim() - 2)


def convolution_backward(
    grad: Tensor,
    image: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Any,
) -> tuple[Tensor | None, ...]:
    """`aten::convolution_backward`, with `filter_gradient` where oneDNN has no kernel for it."""
    call, settings = aten.convolution_backward.default, (bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
    is_fast_type = image.dtype is torch.bfloat16 and processor_multiplies_bfloat16()
    is_slow = (
        (mask[1] or mask[2])
        and image.is_cpu
        and image.numel() > 0
        and torch._C._get_mkldnn_enabled()
        and _is_depthwise(image, weight, transposed, groups, torch.bfloat16 if is_fast_type else torch.float32)
        and not _has_kernel(image.shape[2:], weight.shape[2:], dilation)
    )
    if not is_slow:
        return call(grad, image, weight, *settings, mask)
    of_image = call(grad, image, weight, *settings, [True, False, False])[0] if mask[0] else None
    of_bias = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None  # which the operator works out together with that of the filters
    if not mask[1]:
        of_filters = None
    elif _needs_border(image, padding) and not _border_pays(image, weight.shape, stride, padding, dilation):
        of_filters = call(grad, image, weight, *settings, [False, True, False])[1]
    else:
        of_filters = filter_gradient(grad, image, weight.shape, stride, padding, dilation)
    return of_image, of_filters, of_bias


def filter_gradient(grad: Tensor, image: Tensor, shape: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """The gradient of a depthwise convolution's filters: a depthwise convolution itself, of each plane with the gradient that arrives there, in
    which strides and dilations have changed places; then summed over the images.

    PyTorch takes 5 to 25 times as long: for 2 x 96 planes of 28 x 28 and filters of 7 x 7 5.8 ms, this 0.3; in bfloat16 4.8 and 0.25 on a processor
    with instructions for it (AMD EPYC of family 26), where each image's part is rounded before they are added.

    Args:
        grad: Gradient of the result, (N, C, ...).
        image: The convolution's input, (N, C, ...).
        shape: Of the filters, (C, 1, ...).
        stride: The convolution's, one number or one for each dimension of a plane.
        padding: Likewise.
        dilation: Likewise.
    """
    images, channels = image.shape[:2]
    # Where distances become strides oneDNN's kernels take narrower borders: for 4 x 256 planes of 16 x 16, numbers 6 apart, 3.4 ms become 1.2.
    if _needs_border(image, padding, 6 if {*_for_each(dilation, image)} == {1} else 3):
        image, padding = _with_border(image, padding)
    planes, filters = image.reshape(1, images * channels, *image.shape[2:]), grad.reshape(images * channels, 1, *grad.shape[2:])
    steps, distances = _for_each(stride, image), _for_each(dilation, image)
    found = torch.convolution(planes, filters, None, distances, padding, steps, False, [0] * len(padding), images * channels)
    for d, taken in enumerate(shape[2:], 2):  # a stride that does not divide the image leaves some behind
        found = found.narrow(d, 0, taken)
    return found.reshape(images, *shape).sum(0)
