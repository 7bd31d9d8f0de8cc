"""Dense convolutions of 3 x 3 pixels in float32 on the CPU: which kernels run them and their gradients.

ONNX Runtime writes the pixels under the filter side by side, image by image, and multiplies; so it reads the filters anew for each image, and small
planes, whose pixels do not fill the columns that its kernels take at once, cost as much as larger ones. oneDNN lays filters and pictures out in
blocks of channels first, which pays from some work on.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import convolution_of
from ort_backend.lowering.symbolic import hint

aten = torch.ops.aten

# Microseconds that either takes for each of what `_counts` counts: least squares of relative errors over 97 shapes of stride 1 and 24 of stride 2,
# batches of 1 to 32, planes of 2 x 2 to 56 x 56, 16 to 512 channels (AMD EPYC of family 25, model 17; onnxruntime-training 1.19.2, torch 2.13);
# median errors are 1 to 6 %. The faster kernel by these numbers takes at most 1.007 of the time of the faster one of the two in the mean, ONNX
# Runtime's 1.27 and 1.26 (stride 1), 1.15 and 1.04.
_TIMES: dict[tuple[Any, int], tuple[tuple[float, ...], tuple[float, ...]]] = {
    (aten.convolution.default, 1): ((28, 0.03e-5, 1.8e-5, 0.1e-4, 2.2e-4, 0, 0), (72, 1.51e-5, 0, 0, 0, 2.3e-4, 5.6e-4)),
    (aten.convolution_backward.default, 1): ((28, 1.93e-5, 1.9e-5, 3.5e-4, 5.5e-4, 0, 0), (124, 3.53e-5, 0, 0, 0, 9e-4, 8.1e-4)),
    (aten.convolution.default, 2): ((14, 0, 1.77e-5, 0, 5.4e-4, 0, 0), (84, 1.75e-5, 0, 0, 0, 1.4e-4, 1.8e-4)),
    (aten.convolution_backward.default, 2): ((18, 1.51e-5, 2.16e-5, 3.5e-4, 7.3e-4, 0, 0), (145, 3.96e-5, 0, 0, 0, 13.4e-4, 10.7e-4)),
}
_COLUMNS = 16  # that ONNX Runtime's kernels multiply at once

# What a program gains must be more than the kernels' times vary.
_VARIES = 1.05
_BLOCK = 16  # channels


def is_faster_in_pytorch(node: fx.Node, margin: float = 0) -> bool | None:
    """Whether PyTorch's kernels run such a convolution, or its backward, faster than ONNX Runtime's, by `margin` microseconds.

    None for any other node, also for other numbers of channels than 16, 32, ... Symbolic sizes count as their example.
    """
    one = convolution_of(node)
    if one is None or one.weight.dtype is not torch.float32 or one.transposed or one.groups != 1 or {*one.dilation} != {1}:
        return None
    times = _TIMES.get((node.target, one.stride[0])) if len({*one.stride}) == 1 else None
    if times is None or tuple(one.weight.shape[2:]) != (3, 3):
        return None
    if any(not isinstance(channels, int) or channels % _BLOCK for channels in one.weight.shape[:2]):
        return None
    counts = _counts(*([hint(size) for size in tensor.shape] for tensor in (one.image, one.result)))
    here, there = (sum(a * b for a, b in zip(each, counts, strict=True)) for each in times)
    return here > _VARIES * there + margin


def _counts(before: list[int], behind: list[int]) -> tuple[int, ...]:
    """Once; multiplications; those with full columns; numbers of the filters of all images; under these; of the filters; of both pictures."""
    images, pixels, filters = before[0], math.prod(behind[2:]), 9 * before[1] * behind[1]
    full = math.ceil(pixels / _COLUMNS) * _COLUMNS
    under = 9 * before[1] * images * pixels
    return 1, images * pixels * filters, images * full * filters, images * filters, under, filters, math.prod(before) + math.prod(behind)
