"""Sampling at the places that a grid names (`grid_sample`), and its gradients for the image and for the grid.

Pixels are rows of channels, gathered by index and weighted: ONNX Runtime's GridSample is slower than that, and has no gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import length, rank, refuse_empty
from ort_backend.lowering.constants import constant, int64s, scalar_like
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.creation import filled
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value
_BILINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


@dataclasses.dataclass(frozen=True)
class _Neighbour:
    """One of the pixels beside each sample along one axis; every value is (N, samples).

    Attributes:
        index: Where it stands, int64; 0 where it lies outside.
        weight: Its share, 0 where it lies outside.
        side: How its share changes when the sample moves: 1 or -1, 0 where it lies outside.
    """

    index: ir.Value
    weight: ir.Value
    side: ir.Value


def _number(op: Any, number: Size, like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    return op.Cast(number, to=like.dtype) if isinstance(number, ir.Value) else scalar_like(op, number, like)


def _position(op: Any, coordinate: ir.Value, total: Size, padding_mode: int, align_corners: bool) -> tuple[ir.Value, ir.Value]:
    """Where a coordinate from -1 to 1 lies among `total` pixels, and how fast it moves with the coordinate."""
    half, one, zero = (scalar_like(op, number, coordinate) for number in (0.5, 1.0, 0.0))
    count = _number(op, total, coordinate)
    last = op.Sub(count, one)
    slope = op.Mul(last if align_corners else count, half)
    moved = op.Mul(op.Add(coordinate, one), slope)
    place = moved if align_corners else op.Sub(moved, half)
    if padding_mode == _ZEROS:
        return place, slope
    if padding_mode == _REFLECTION:
        place, turned = _reflected(op, place, last, count, align_corners)
        slope = op.Mul(slope, turned)
    inside = op.And(op.Greater(place, zero), op.Less(place, last))
    return op.Max(op.Min(place, last), zero), op.Mul(slope, op.Cast(inside, to=place.dtype))


def _reflected(op: Any, place: ir.Value, last: ir.Value, count: ir.Value, align_corners: bool) -> tuple[ir.Value, ir.Value]:
    """A place thrown back from the borders until it lies between them, and 1 or -1: which way it moves then."""
    one, two, zero = (scalar_like(op, number, place) for number in (1.0, 2.0, 0.0))
    low, span = (zero, last) if align_corners else (scalar_like(op, -0.5, place), count)
    from_low = op.Sub(place, low)
    distance = op.Abs(from_low)
    room = op.Where(op.Equal(span, zero), one, span)
    turns = op.Floor(op.Div(distance, room))
    rest = op.Sub(distance, op.Mul(turns, room))
    odd = op.Sub(turns, op.Mul(op.Floor(op.Div(turns, two)), two))
    back = op.Equal(odd, one)
    moved = op.Add(op.Where(back, op.Sub(room, rest), rest), low)
    direction = op.Mul(op.Where(op.Less(from_low, zero), op.Neg(one), one), op.Where(back, op.Neg(one), one))
    return op.Where(op.Equal(span, zero), zero, moved), direction


def _neighbour(op: Any, pixel: ir.Value, weight: ir.Value, side: float, total: Size) -> _Neighbour:
    zero = scalar_like(op, 0.0, pixel)
    last = op.Sub(_number(op, total, pixel), scalar_like(op, 1.0, pixel))
    inside = op.And(op.GreaterOrEqual(pixel, zero), op.LessOrEqual(pixel, last))
    index = op.Cast(op.Where(inside, pixel, zero), to=ir.DataType.INT64)
    return _Neighbour(index, op.Where(inside, weight, zero), op.Where(inside, scalar_like(op, side, pixel), zero))


def _neighbours(op: Any, place: ir.Value, total: Size, interpolation_mode: int) -> list[_Neighbour]:
    one = scalar_like(op, 1.0, place)
    if interpolation_mode == _NEAREST:
        return [_neighbour(op, op.Round(place), one, 0.0, total)]
    first = op.Floor(place)
    part = op.Sub(place, first)
    return [_neighbour(op, first, op.Sub(one, part), -1.0, total), _neighbour(op, op.Add(first, one), part, 1.0, total)]


@dataclasses.dataclass(frozen=True)
class _Samples:
    """What a grid asks of an image.

    Attributes:
        axes: For each spatial axis of the image, the pixels beside each sample along it.
        slopes: For each spatial axis, how fast a sample moves with its coordinate.
        sizes: The image's spatial sizes.
        batch: The image's batch size.
    """

    axes: list[list[_Neighbour]]
    slopes: list[ir.Value]
    sizes: list[Size]
    batch: Size

    def corners(self) -> list[tuple[_Neighbour, ...]]:
        """Every pixel beside a sample: one neighbour for each axis."""
        return list(itertools.product(*self.axes))

    def rows(self, op: Any, corner: Sequence[_Neighbour]) -> ir.Value:
        """(N, samples, 1) int64: where a pixel stands among the rows of all images."""
        zero, one = (constant(op, number, ir.DataType.INT64) for number in (0, 1))
        batch = self.batch if isinstance(self.batch, ir.Value) else constant(op, self.batch, ir.DataType.INT64)
        row = op.Unsqueeze(op.Range(zero, batch, one), int64s(op, [1]))
        for neighbour, total in zip(corner, self.sizes):
            count = total if isinstance(total, ir.Value) else constant(op, total, ir.DataType.INT64)
            row = op.Add(op.Mul(row, count), neighbour.index)
        return row


def _samples(op: Any, image: ir.Value, grid: ir.Value, interpolation_mode: int, padding_mode: int, align_corners: bool) -> _Samples:
    if interpolation_mode == _CUBIC:
        raise Unsupported("cubic sampling: 16 gathers and as many scatters")
    refuse_empty("samples", image, grid)
    spatial = rank(image) - 2
    totals = [length(op, image, i) for i in range(2, 2 + spatial)]
    axes, slopes = [], []
    for i, total in enumerate(totals):  # a grid names the last axis first
        coordinate = op.Gather(grid, constant(op, spatial - 1 - i, ir.DataType.INT64), axis=-1)
        place, slope = _position(op, op.Flatten(coordinate, axis=1), total, padding_mode, align_corners)
        axes.append(_neighbours(op, place, total, interpolation_mode))
        slopes.append(slope)
    return _Samples(axes, slopes, totals, length(op, image, 0))


def _as_rows(op: Any, image: ir.Value) -> ir.Value:
    """(N, C, ...) as rows of C channels, all images' pixels in order."""
    spatial = list(range(2, rank(image)))
    last = op.Transpose(image, perm=[0, *spatial, 1])
    return typed(op.Reshape(last, as_vector(op, [-1, length(op, image, 1)])), image.dtype, [None, image.shape[1]])  # type: ignore[index]


def _share(op: Any, corner: Sequence[_Neighbour], without: int = -1) -> ir.Value | None:
    """The product of the weights along all axes but one."""
    share = None
    for i, neighbour in enumerate(corner):
        if i != without:
            share = neighbour.weight if share is None else op.Mul(share, neighbour.weight)
    return share


def _column(op: Any, value: ir.Value | None) -> ir.Value:
    return op.Unsqueeze(value, int64s(op, [2]))


@register(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, promote="output")
def grid_sampler(op: Any, input: ir.Value, grid: ir.Value, interpolation_mode: int, padding_mode: int, align_corners: bool) -> ir.Value:
    """grid_sampler_2d(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) -> Tensor"""
    samples = _samples(op, input, grid, interpolation_mode, padding_mode, align_corners)
    pixels = _as_rows(op, input)
    total = None
    for corner in samples.corners():
        part = op.Mul(op.Gather(pixels, samples.rows(op, corner), axis=0), _column(op, _share(op, corner)))
        total = part if total is None else op.Add(total, part)
    shape = [length(op, input, 0), length(op, input, 1), *(length(op, grid, i) for i in range(1, rank(grid) - 1))]
    return op.Reshape(op.Transpose(total, perm=[0, 2, 1]), as_vector(op, shape))


@register(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    op: Any,
    grad_output: ir.Value,
    input: ir.Value,
    grid: ir.Value,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> Sequence[ir.Value | None]:
    """grid_sampler_2d_backward(Tensor grad_output, Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners,
    bool[2] output_mask) -> (Tensor, Tensor)
    """
    samples = _samples(op, input, grid, interpolation_mode, padding_mode, align_corners)
    grads = op.Reshape(_as_rows(op, grad_output), as_vector(op, [length(op, input, 0), -1, length(op, input, 1)]))
    return (
        _image_gradient(op, grads, input, samples) if output_mask[0] else None,
        _grid_gradient(op, grads, input, grid, samples, interpolation_mode) if output_mask[1] else None,
    )


def _image_gradient(op: Any, grads: ir.Value, image: ir.Value, samples: _Samples) -> ir.Value:
    spatial = rank(image) - 2
    assert image.dtype is not None
    total = filled(op, op.Shape(_as_rows(op, image)), 0.0, image.dtype)
    for corner in samples.corners():
        total = op.ScatterND(total, _last(op, samples.rows(op, corner)), op.Mul(grads, _column(op, _share(op, corner))), reduction="add")
    shaped = op.Reshape(total, as_vector(op, [samples.batch, *samples.sizes, length(op, image, 1)]))
    return op.Transpose(shaped, perm=[0, spatial + 1, *range(1, spatial + 1)])


def _last(op: Any, rows: ir.Value) -> ir.Value:
    return op.Unsqueeze(rows, int64s(op, [2]))


def _grid_gradient(op: Any, grads: ir.Value, image: ir.Value, grid: ir.Value, samples: _Samples, interpolation_mode: int) -> ir.Value:
    assert grid.dtype is not None
    if interpolation_mode == _NEAREST:
        return filled(op, op.Shape(grid), 0.0, grid.dtype)
    pixels = _as_rows(op, image)
    moved: list[Any] = [None] * len(samples.axes)
    for corner in samples.corners():
        product = op.ReduceSum(op.Mul(grads, op.Gather(pixels, samples.rows(op, corner), axis=0)), int64s(op, [2]), keepdims=0)
        for i, neighbour in enumerate(corner):
            part = op.Mul(op.Mul(product, _share(op, corner, without=i)), neighbour.side)
            moved[i] = part if moved[i] is None else op.Add(moved[i], part)
    along = [op.Mul(part, slope) for part, slope in zip(moved, samples.slopes)]
    return op.Reshape(op.Concat(*(_column(op, part) for part in reversed(along)), axis=2), op.Shape(grid))
