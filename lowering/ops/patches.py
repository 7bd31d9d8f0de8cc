"""Patches of an image as columns (`unfold`), and columns added up to an image again (`fold`), which are each other's gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.axes import length, rank, refuse_empty, times
from ort_backend.lowering.axis_windows import Windows, added, cut
from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value
# Places of a patch from which on it is cut along one axis, then along the other. Of frames of 1,024 samples, 256 apart, slices took eight times as
# long, and a transposed convolution, whose kernel has the square of the places, ten times; of patches of 16 x 16 pixels side by side two or three
# times, of 14 x 14, 8 apart, as long. Of 7 x 7, 2 apart, they take two thirds of the time (a half with the plain package).
_MANY = 64


def _pair(numbers: Sequence[int]) -> list[int]:
    if any(isinstance(number, ir.Value) for number in numbers):
        raise Unsupported("patches of a size that is not known")
    return [int(numbers[0])] * 2 if len(numbers) == 1 else [int(number) for number in numbers]


def _count(op: Any, total: Size, kernel: int, dilation: int, padding: int, stride: int) -> Size:
    """How many patches fit along an axis."""
    room = 2 * padding - dilation * (kernel - 1) - 1
    if isinstance(total, int):
        return (total + room) // stride + 1
    number = {name: constant(op, value, ir.DataType.INT64) for name, value in {"room": room, "stride": stride, "one": 1}.items()}
    return op.Add(op.Div(op.Add(total, number["room"]), number["stride"]), number["one"])


def _end(op: Any, start: int, count: Size, stride: int) -> Size:
    """Behind the last of `count` elements that are `stride` apart."""
    if isinstance(count, int):
        return start + (count - 1) * stride + 1
    return op.Add(op.Mul(count, constant(op, stride, ir.DataType.INT64)), constant(op, start - stride + 1, ir.DataType.INT64))


@register(aten.im2col.default)
def im2col(op: Any, self: ir.Value, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]) -> ir.Value:
    """im2col(Tensor self, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor"""
    refuse_empty("patches", self)
    kernel, dilations, pads, strides = (_pair(numbers) for numbers in (kernel_size, dilation, padding, stride))
    ranks = rank(self)
    *lead, channels, height, width = (length(op, self, i) for i in range(ranks))
    counts = [_count(op, *numbers) for numbers in zip((height, width), kernel, dilations, pads, strides)]
    both = [Windows(*numbers) for numbers in zip(kernel, dilations, pads, strides, counts)]
    if _are_many(both):
        columns = cut(op, self, [*lead, channels, height, width], ranks - 1, both[1])
        if both[1].are_blocks:
            columns = op.Transpose(columns, perm=_order(ranks + 1, ranks - 1, ranks))
        columns = cut(op, columns, [*lead, channels, height, kernel[1], counts[1]], ranks - 2, both[0])
        columns = op.Transpose(columns, perm=_order(ranks + 2, ranks - 1 - both[0].are_blocks, ranks))
        return op.Reshape(columns, as_vector(op, [*lead, times(op, channels, kernel[0] * kernel[1]), times(op, *counts)]))
    zeros = [0] * (ranks - 2)
    image = op.Pad(self, int64s(op, [*zeros, *pads, *zeros, *pads])) if any(pads) else self
    axes = int64s(op, [ranks - 2, ranks - 1])
    parts = []
    for place in itertools.product(*(range(k) for k in kernel)):
        starts = [at * d for at, d in zip(place, dilations)]
        ends = as_vector(op, [_end(op, start, count, s) for start, count, s in zip(starts, counts, strides)])
        parts.append(op.Unsqueeze(op.Slice(image, int64s(op, starts), ends, axes, int64s(op, strides)), int64s(op, [ranks - 2])))
    together = op.Concat(*parts, axis=ranks - 2) if len(parts) > 1 else parts[0]
    return op.Reshape(together, as_vector(op, [*lead, times(op, channels, len(parts)), times(op, *counts)]))


def _are_many(both: Sequence[Windows]) -> bool:
    return both[0].size * both[1].size >= _MANY and all(windows.are_regular for windows in both)


def _order(ranks: int, source: int, to: int) -> list[int]:
    """Axes in order, but for one that moves: of any other order ONNX Runtime finds every element apart, and took four times as long for two."""
    order = [axis for axis in range(ranks) if axis != source]
    return [*order[:to], source, *order[to:]]


@register(aten.col2im.default)
def col2im(
    op: Any,
    self: ir.Value,
    output_size: Sequence[Size],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> ir.Value:
    """col2im(Tensor self, SymInt[2] output_size, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor

    A transposed convolution for small patches, whose kernel puts each of its channels, which are the places of a patch, where it belongs.
    """
    if any(isinstance(part, ir.Value) for part in output_size):
        raise Unsupported("patches added up to an image of a size that is not known")
    refuse_empty("patches", self)
    kernel, dilations, pads, strides = (_pair(numbers) for numbers in (kernel_size, dilation, padding, stride))
    area = kernel[0] * kernel[1]
    sizes: list[int] = [int(part) for part in output_size]  # type: ignore[arg-type]
    counts = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, d, p, s in zip(sizes, kernel, dilations, pads, strides)]
    *lead, columns, _ = (length(op, self, i) for i in range(rank(self)))
    channels = columns // area if isinstance(columns, int) else op.Div(columns, constant(op, area, ir.DataType.INT64))
    both = [Windows(*numbers) for numbers in zip(kernel, dilations, pads, strides, counts)]
    if _are_many(both):
        at = len(lead) + 1
        patches = op.Reshape(self, as_vector(op, [*lead, channels, *kernel, *counts]))
        patches = op.Transpose(patches, perm=_order(at + 4, at + 2, at + 1 - both[0].are_blocks))
        patches = added(op, patches, [*lead, channels, *both[0].axes, kernel[1], counts[1]], at, both[0], sizes[0])
        if both[1].are_blocks:
            patches = op.Transpose(patches, perm=_order(at + 3, at + 2, at + 1))
        return added(op, patches, [*lead, channels, sizes[0], *both[1].axes], at + 1, both[1], sizes[1])
    planes = typed(op.Reshape(self, as_vector(op, [-1, area, *counts])), self.dtype, [None, area, *counts])
    assert self.dtype is not None
    places = constant(op, np.eye(area).reshape(area, 1, *kernel), self.dtype)
    missing = [(size + 2 * p - d * (k - 1) - 1) % s for size, k, d, p, s in zip(sizes, kernel, dilations, pads, strides)]  # that no patch reaches
    image = op.ConvTranspose(planes, places, kernel_shape=kernel, strides=strides, dilations=dilations, pads=[*pads, *pads], output_padding=missing)
    return op.Reshape(image, as_vector(op, [*lead, channels, *sizes]))
