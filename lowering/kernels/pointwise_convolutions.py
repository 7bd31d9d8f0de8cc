"""Gradients of convolutions with filters of one pixel, in bfloat16 on the CPU, as the matrix products that they are.

oneDNN lays out the filters and their gradient anew for its kernels, which takes longer than the products where there are many channels and few
pixels, and has slow ones where strides leave pixels out. Both gradients take, of oneDNN's time (AMD EPYC of family 25, model 17; torch 2.13), with
strides of 2 0.31 to 0.75, else, where that of the filters alone is a product, 0.40 to 0.98; but 1.2 for 16 channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ort_backend.lowering.kernels import depthwise
from ort_backend.lowering.kernels.dense_products import mkl_is_at_home, processor_multiplies_bfloat16

aten = torch.ops.aten

_LEAST_CHANNELS = 32


def convolution_backward(grad: Tensor, image: Tensor, weight: Tensor, bias_sizes: Any, *settings: Any) -> tuple[Tensor | None, ...]:
    """`aten::convolution_backward`, here or as `depthwise` calls it."""
    stride, padding, _, transposed, _, groups, mask = settings
    if not (mask[1] and _is_pointwise(image, weight, padding, transposed, groups) and grad.numel() > 0 and _products_are_faster()):
        return depthwise.convolution_backward(grad, image, weight, bias_sizes, *settings)
    steps = [*stride] * (image.dim() - 2) if len(stride) == 1 else [*stride]
    seen = (slice(None), slice(None), *(slice(None, None, step) for step in steps))  # the pixels that the filters see
    is_strided = math.prod(steps) > 1
    of_bias = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
    of_filters = (_rows(grad) @ _rows(image[seen] if is_strided else image).T).view(weight.shape)
    of_image = None
    if mask[0] and is_strided:
        columns = grad.flatten(2).transpose(1, 2).flatten(0, 1) @ weight.flatten(1)
        of_image = torch.zeros_like(image, memory_format=torch.contiguous_format)
        of_image[seen] = columns.view(grad.shape[0], -1, image.shape[1]).transpose(1, 2).view(*image.shape[:2], *grad.shape[2:])
    elif mask[0]:
        of_image = aten.convolution_backward.default(grad, image, weight, bias_sizes, *settings[:-1], [True, False, False])[0]
    return of_image, of_filters, of_bias


def _is_pointwise(image: Tensor, weight: Tensor, padding: Any, transposed: bool, groups: int) -> bool:
    is_dense = image.is_cpu and image.dtype is torch.bfloat16 and not transposed and groups == 1 and not any(padding)
    return is_dense and math.prod(weight.shape[2:]) == 1 and min(weight.shape[:2]) >= _LEAST_CHANNELS


def _products_are_faster() -> bool:
    return torch._C._get_mkldnn_enabled() and processor_multiplies_bfloat16() and not mkl_is_at_home()  # Intel's were not measured


def _rows(images: Tensor) -> Tensor:
    """(C, N * pixels), of (N, C, ...)."""
    return images.flatten(2).transpose(0, 1).flatten(1)
