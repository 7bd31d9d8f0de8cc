"""Convolutions of pictures that lie in memory pixel by pixel, all channels of one beside each other: (N, H, W, C), or (N, L, C) for sequences.

ONNX Runtime's operators take (N, C, H, W) alone. oneDNN has kernels for both orders; its depthwise ones take the channels side by side, and read
planes of 32 x 32 numbers, which share their place in the first cache, ten to twenty times as fast in this one (4 x 256 planes: 0.4 ms and 8.1, the
gradient 1.2 and 12.3; AMD EPYC of family 25, model 17, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ort_backend.lowering.kernels import depthwise

aten = torch.ops.aten

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define(
    "convolution_channels_last(Tensor image, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "SymInt groups) -> Tensor"
)
_library.define(
    "convolution_channels_last_backward(Tensor grad, Tensor image, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, SymInt groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
)
CONVOLUTION = torch.ops.ort_training.convolution_channels_last.default
CONVOLUTION_BACKWARD = torch.ops.ort_training.convolution_channels_last_backward.default


def to_last(dims: int) -> list[int]:
    """The permutation of (N, C, ...) that gives (N, ..., C)."""
    return [0, *range(2, dims), 1]


def to_first(dims: int) -> list[int]:
    """The permutation of (N, ..., C) that gives (N, C, ...)."""
    return [0, dims - 1, *range(1, dims - 1)]


def _picture(tensor: Tensor) -> Tensor:
    """(N, C, H, W) in this memory; of a sequence (N, C, 1, L)."""
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    return tensor.permute(to_first(tensor.dim()))


def _unpicture(picture: Tensor, dims: int) -> Tensor:
    last = picture.permute(to_last(picture.dim())).contiguous()
    return last.squeeze(1) if dims == 3 else last


def _settings(dims: int, stride: Sequence[Any], padding: Sequence[Any], dilation: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    return ([1, *stride], [0, *padding], [1, *dilation]) if dims == 3 else (stride, padding, dilation)


@torch.library.impl(_library, "convolution_channels_last", "CompositeExplicitAutograd")
def _convolution(
    image: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[Any], padding: Sequence[Any], dilation: Sequence[Any], groups: int
) -> Tensor:
    dims = image.dim()
    stride, padding, dilation = _settings(dims, stride, padding, dilation)
    weight = weight.unsqueeze(2) if dims == 3 else weight
    return _unpicture(depthwise.convolution(_picture(image), weight, bias, stride, padding, dilation, False, [0] * len(stride), groups), dims)


@torch.library.impl(_library, "convolution_channels_last_backward", "CompositeExplicitAutograd")
def _convolution_backward(
    grad: Tensor, image: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, groups: int, output_mask: Any
) -> tuple[Tensor | None, ...]:
    dims = image.dim()
    stride, padding, dilation = _settings(dims, stride, padding, dilation)
    filters = weight.unsqueeze(2) if dims == 3 else weight
    settings = (bias_sizes, stride, padding, dilation, False, [0] * len(stride), groups, output_mask)
    of_image, of_filters, of_bias = depthwise.convolution_backward(_picture(grad), _picture(image), filters, *settings)
    return None if of_image is None else _unpicture(of_image, dims), None if of_filters is None else of_filters.reshape(weight.shape), of_bias


@torch.library.register_fake("ort_training::convolution_channels_last", lib=_library)
def _(
    image: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[Any], padding: Sequence[Any], dilation: Sequence[Any], groups: int
) -> Tensor:
    dims = image.dim()
    made = aten.convolution.default(image.permute(to_first(dims)), weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return image.new_empty([made.shape[d] for d in to_last(dims)])


@torch.library.register_fake("ort_training::convolution_channels_last_backward", lib=_library)
def _(
    grad: Tensor, image: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, groups: int, output_mask: Any
) -> tuple[Tensor | None, ...]:
    made = (image.new_empty(image.shape), weight.new_empty(weight.shape), grad.new_empty(grad.shape[-1:]))
    return tuple(one if wanted else None for one, wanted in zip(made, output_mask))


# What a node calls: without PyTorch's dispatcher.
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {CONVOLUTION: _convolution, CONVOLUTION_BACKWARD: _convolution_backward}
