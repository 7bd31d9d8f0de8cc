"""Interpolation (`upsample_*`) and its gradients: every mode is linear in its input, one axis at a time.

An axis is resized by a matrix product with the interpolation's weights, its gradient by the transposed matrix: as fast as PyTorch's kernels up to a
few hundred elements along the axis, and many times faster than ONNX Runtime's Resize (cubic) or index operators. Longer axes gather rows and
weight them. A NaN or an infinity therefore spreads along its row and column in the modes that average; `nearest` only moves elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.axes import length, rank, refuse_empty
from ort_backend.lowering.constants import constant, int64s, scalar_like
from ort_backend.lowering.interpolation import nearest_rows, weights
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.creation import filled
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value
Scales = Sequence[float | ir.Value | None]

_MATRIX_UP_TO = 256  # elements along the axis that is read
_TAPS_UP_TO = 16  # elements that one element of the result is made of, where rows are gathered


# -- one axis


def _resized(op: Any, value: ir.Value, at: int, matrix: np.ndarray) -> ir.Value:
    """`value` with axis `at` multiplied by a constant (new, old) matrix."""
    if matrix.shape[0] == matrix.shape[1] and np.array_equal(matrix, np.eye(len(matrix))):
        return value
    taps = int(np.count_nonzero(matrix, axis=1).max(initial=0))
    if matrix.shape[1] > _MATRIX_UP_TO and taps <= _TAPS_UP_TO:
        return _by_rows(op, value, at, matrix, taps)
    assert value.dtype is not None
    return along_axis(op, value, at, constant(op, matrix, value.dtype), constant(op, matrix.T.copy(), value.dtype), matrix.shape[0])


def along_axis(op: Any, value: ir.Value, at: int, matrix: ir.Value, transposed: ir.Value, new: Size) -> ir.Value:
    """`value` with axis `at` multiplied by a matrix, which is given both ways."""
    last = rank(value) - 1
    refuse_empty("matrix products", value)
    if at == last:
        made = op.MatMul(value, transposed)
    elif at == last - 1:
        made = op.MatMul(matrix, value)
    else:  # what lies behind the axis as one
        lead = [length(op, value, i) for i in range(at + 1)]
        flat = typed(op.Reshape(value, as_vector(op, [*lead, -1])), value.dtype, [*value.shape[: at + 1], None])  # type: ignore[index]
        made = op.Reshape(op.MatMul(matrix, flat), as_vector(op, [*lead[:-1], new, *(length(op, value, i) for i in range(at + 1, last + 1))]))
    return _with_size(made, value, at, new)


def _by_rows(op: Any, value: ir.Value, at: int, matrix: np.ndarray, taps: int) -> ir.Value:
    """The same as a sum of weighted rows: gathering along the last axis is slow, so that it goes to the one before."""
    if at == rank(value) - 1:
        return _moved(op, _by_rows(op, _moved(op, value, at, at - 1), at - 1, matrix, taps), at - 1, at)
    order = np.argsort(matrix == 0, axis=1, kind="stable")[:, :taps]  # the places that are not zero first
    chosen = np.take_along_axis(matrix, order, axis=1)
    order = np.where(chosen == 0, order[:, :1], order)
    parts = []
    for tap in range(taps):
        weight = constant(op, chosen[:, tap].reshape([-1] + [1] * (rank(value) - at - 1)), value.dtype)  # type: ignore[arg-type]
        parts.append(op.Mul(op.Gather(value, int64s(op, order[:, tap].tolist()), axis=at), weight))
    return _with_size(_sum(op, parts), value, at, matrix.shape[0])


def _sum(op: Any, parts: Sequence[ir.Value]) -> ir.Value:
    total = parts[0]
    for part in parts[1:]:
        total = op.Add(total, part)
    return total


def _with_size(made: Any, value: ir.Value, at: int, new: Size) -> ir.Value:
    known = new if isinstance(new, int) else None
    return typed(made, value.dtype, [known if i == at else part for i, part in enumerate(value.shape)])  # type: ignore[arg-type]


# -- sizes that are not known


def _range(op: Any, count: Size, like: ir.Value) -> ir.Value:
    end = count if isinstance(count, ir.Value) else constant(op, count, ir.DataType.INT64)
    return op.Cast(op.Range(constant(op, 0, ir.DataType.INT64), end, constant(op, 1, ir.DataType.INT64)), to=like.dtype)


def _as_float(op: Any, count: Size, like: ir.Value) -> ir.Value:
    return op.Cast(count, to=like.dtype) if isinstance(count, ir.Value) else scalar_like(op, count, like)


def _sources(op: Any, kernel: str, size_in: Size, size_out: Size, align_corners: bool, scale: Any, like: ir.Value) -> ir.Value:
    """(size_out,): where each element of the result lies among those it is made of, in `like`'s floating dtype."""
    if isinstance(scale, ir.Value):
        raise Unsupported("a scale factor that is not known")
    one, half = scalar_like(op, 1.0, like), scalar_like(op, 0.5, like)
    there, here = _as_float(op, size_in, like), _as_float(op, size_out, like)
    if align_corners:
        step = op.Div(op.Sub(there, one), op.Max(op.Sub(here, one), one))
    else:
        step = scalar_like(op, 1.0 / scale, like) if scale is not None and scale > 0 else op.Div(there, here)
    place = _range(op, size_out, like)
    if kernel in ("linear", "cubic") and not align_corners:
        return op.Sub(op.Mul(step, op.Add(place, half)), half)
    return op.Mul(step, op.Add(place, half) if kernel == "nearest-exact" else place)


def _hat_matrix(op: Any, size_in: Size, size_out: Size, align_corners: bool, scale: Any, like: ir.Value) -> ir.Value:
    """(size_out, size_in): the weights of linear interpolation, which fall off from the source by one per element."""
    source = _sources(op, "linear", size_in, size_out, align_corners, scale, like)
    zero, one = scalar_like(op, 0.0, like), scalar_like(op, 1.0, like)
    inside = op.Max(op.Min(source, op.Sub(_as_float(op, size_in, like), one)), zero)
    distance = op.Abs(op.Sub(op.Unsqueeze(inside, int64s(op, [1])), _range(op, size_in, like)))
    return op.Max(op.Sub(one, distance), zero)


def _cubic_matrix(op: Any, size_in: Size, size_out: Size, align_corners: bool, scale: Any, like: ir.Value) -> ir.Value:
    """(size_out, size_in): the weights of cubic interpolation; what lies outside counts for the element at the edge."""
    source = op.Unsqueeze(_sources(op, "cubic", size_in, size_out, align_corners, scale, like), int64s(op, [1]))
    first = op.Floor(source)
    part, places = op.Sub(source, first), _range(op, size_in, like)
    last = op.Sub(_as_float(op, size_in, like), scalar_like(op, 1.0, like))
    parts = []
    for at in (-1.0, 0.0, 1.0, 2.0):
        place = op.Max(op.Min(op.Add(first, scalar_like(op, at, like)), last), scalar_like(op, 0.0, like))
        chosen = op.Cast(op.Equal(place, places), to=like.dtype)
        parts.append(op.Mul(chosen, _cubic_weight(op, op.Abs(op.Sub(part, scalar_like(op, at, like))), near=at in (0.0, 1.0), a=-0.75)))
    return _sum(op, parts)


def _cubic_weight(op: Any, x: ir.Value, *, near: bool, a: float) -> ir.Value:
    """The weight of an element at a distance of at most one (`near`), or of one to two."""
    result, *rest = [scalar_like(op, number, x) for number in ((a + 2, -(a + 3), 0.0, 1.0) if near else (a, -5 * a, 8 * a, -4 * a))]
    for number in rest:
        result = op.Add(op.Mul(result, x), number)
    return result


def _nearest_rows(op: Any, kernel: str, size_in: Size, size_out: Size, scale: Any, like: ir.Value) -> ir.Value:
    """(size_out,) int64: where each element of the result is taken from."""
    if isinstance(size_in, int) and isinstance(size_out, int):
        real = np.float64 if like.dtype == ir.DataType.DOUBLE else np.float32
        return int64s(op, nearest_rows(kernel, size_in, size_out, scale, real).tolist())
    if like.dtype != ir.DataType.DOUBLE:
        like = constant(op, 0.0, ir.DataType.FLOAT)
    source = op.Cast(op.Floor(_sources(op, kernel, size_in, size_out, False, scale, like)), to=ir.DataType.INT64)
    return op.Min(source, op.Sub(size_in, constant(op, 1, ir.DataType.INT64)) if isinstance(size_in, ir.Value) else size_in - 1)


# -- all axes


def _forward(op: Any, value: ir.Value, kernel: str, output_size: Sequence[Size], align_corners: bool, scales: Scales) -> ir.Value:
    _refuse_integers(value)
    first = rank(value) - len(output_size)
    for i in reversed(range(len(output_size))):
        value = _one_axis(op, value, first + i, kernel, length(op, value, first + i), output_size[i], align_corners, scales[i], back=False)
    return value


def _backward(op: Any, grad: ir.Value, kernel: str, input_size: Sequence[Size], align_corners: bool, scales: Scales) -> ir.Value:
    _refuse_integers(grad)
    first = rank(grad) - len(scales)
    for i in range(len(scales)):
        grad = _one_axis(op, grad, first + i, kernel, input_size[first + i], length(op, grad, first + i), align_corners, scales[i], back=True)
    return grad


def _refuse_integers(value: ir.Value) -> None:
    if not value.dtype.is_floating_point():  # type: ignore[union-attr]
        raise Unsupported("interpolated integers are rounded")


def _one_axis(op: Any, value: ir.Value, at: int, kernel: str, there: Size, here: Size, align_corners: bool, scale: Any, *, back: bool) -> ir.Value:
    """Resizes one axis from `there` to `here` elements, or takes its gradient `back`."""
    if isinstance(there, int) and isinstance(here, int):
        real = np.float64 if value.dtype == ir.DataType.DOUBLE else np.float32
        matrix = weights(kernel, there, here, align_corners, scale, real)
        return _resized(op, value, at, matrix.T if back else matrix)
    write = {"linear": _hat_matrix, "cubic": _cubic_matrix}.get(kernel)
    if write is None:
        raise Unsupported(f"{kernel} interpolation of dynamic sizes")
    matrix_of = write(op, there, here, align_corners, scale, value)
    turned = op.Transpose(matrix_of, perm=[1, 0])
    return along_axis(op, value, at, turned, matrix_of, there) if back else along_axis(op, value, at, matrix_of, turned, here)


def _nearest_forward(op: Any, value: ir.Value, kernel: str, output_size: Sequence[Size], scales: Scales) -> ir.Value:
    last = rank(value) - 1
    axes = range(last + 1 - len(output_size), last + 1)
    if len(axes) == 1:
        return _taken(op, value, last, kernel, output_size[0], scales[0])
    # Gathering along the last axis is slow: it goes to the place before, first of all, while the others are short.
    turned = _moved(op, value, last, last - 1)
    value = _moved(op, _taken(op, turned, last - 1, kernel, output_size[-1], scales[-1]), last - 1, last)
    for at, new, scale in zip(axes[:-1], output_size, scales):
        value = _taken(op, value, at, kernel, new, scale)
    return value


def _taken(op: Any, value: ir.Value, at: int, kernel: str, new: Size, scale: Any) -> ir.Value:
    rows = _nearest_rows(op, kernel, length(op, value, at), new, scale, value)
    return _with_size(op.Gather(value, rows, axis=at), value, at, new)


def _moved(op: Any, value: ir.Value, source: int, destination: int) -> ir.Value:
    order = [i for i in range(rank(value)) if i != source]
    order.insert(destination, source)
    return typed(op.Transpose(value, perm=order), value.dtype, [value.shape[i] for i in order])  # type: ignore[index]


def _nearest_backward(op: Any, grad: ir.Value, kernel: str, input_size: Sequence[Size], scales: Scales) -> ir.Value:
    spatial = len(scales)
    first = rank(grad) - spatial
    factors = [_factor(input_size[first + i], length(op, grad, first + i), scales[i]) for i in range(spatial)]
    if all(factor is not None for factor in factors):
        cells: list[Size] = [*input_size[:first]]
        for i, factor in enumerate(factors):
            cells += [input_size[first + i], factor]  # type: ignore[list-item]
        return op.ReduceSum(op.Reshape(grad, as_vector(op, cells)), int64s(op, range(first + 1, first + 2 * spatial, 2)), keepdims=0)
    for i in range(spatial):
        at = first + i
        there, here = input_size[at], length(op, grad, at)
        if isinstance(there, int) and isinstance(here, int):
            grad = _one_axis(op, grad, at, kernel, there, here, False, scales[i], back=True)
        else:
            grad = _rows_back(op, grad, at, _nearest_rows(op, kernel, there, here, scales[i], grad), there)
    return grad


def _factor(there: Size, here: Size, scale: Any) -> int | None:
    """How many elements of the result each element of the input becomes, if that is one number."""
    if isinstance(there, int) and isinstance(here, int):
        exact = there > 0 and here % there == 0 and (scale is None or scale == here // there)
        return here // there if exact else None
    return int(scale) if isinstance(scale, (int, float)) and scale >= 1 and scale == int(scale) else None


def _rows_back(op: Any, grad: ir.Value, at: int, rows: ir.Value, there: Size) -> ir.Value:
    """Adds each row of the gradient to the row that it was taken from."""
    front = _moved(op, grad, at, 0) if at else grad
    zeros = filled(op, [there, *(length(op, front, i) for i in range(1, rank(front)))], 0.0, grad.dtype)  # type: ignore[arg-type]
    total = op.ScatterND(zeros, op.Unsqueeze(rows, int64s(op, [1])), front, reduction="add")
    total = typed(total, grad.dtype, [there if isinstance(there, int) else None, *front.shape[1:]])  # type: ignore[index]
    return _moved(op, total, 0, at) if at else total


# -- the operators


def _resize(kernel: str) -> tuple[Callable[..., ir.Value], Callable[..., ir.Value], Callable[..., ir.Value]]:
    def one(op, self, output_size, align_corners, scales=None):
        """upsample_linear1d(Tensor self, SymInt[1] output_size, bool align_corners, float? scales=None) -> Tensor"""
        return _forward(op, self, kernel, output_size, align_corners, [scales])

    def two(op, self, output_size, align_corners, scales_h=None, scales_w=None):
        """upsample_bilinear2d(Tensor self, SymInt[2] output_size, bool align_corners, float? scales_h=None, float? scales_w=None) -> Tensor"""
        return _forward(op, self, kernel, output_size, align_corners, [scales_h, scales_w])

    def three(op, self, output_size, align_corners, scales_d=None, scales_h=None, scales_w=None):
        """upsample_trilinear3d(Tensor self, SymInt[3] output_size, bool align_corners, float? scales_d=None, float? scales_h=None,
        float? scales_w=None) -> Tensor
        """
        return _forward(op, self, kernel, output_size, align_corners, [scales_d, scales_h, scales_w])

    return one, two, three


def _resize_backward(kernel: str) -> tuple[Callable[..., ir.Value], Callable[..., ir.Value], Callable[..., ir.Value]]:
    def one(op, grad_output, output_size, input_size, align_corners, scales=None):
        """upsample_linear1d_backward(Tensor grad_output, SymInt[1] output_size, SymInt[3] input_size, bool align_corners, float? scales=None) ->
        Tensor
        """
        return _backward(op, grad_output, kernel, input_size, align_corners, [scales])

    def two(op, grad_output, output_size, input_size, align_corners, scales_h=None, scales_w=None):
        """upsample_bilinear2d_backward(Tensor grad_output, SymInt[2] output_size, SymInt[4] input_size, bool align_corners,
        float? scales_h=None, float? scales_w=None) -> Tensor
        """
        return _backward(op, grad_output, kernel, input_size, align_corners, [scales_h, scales_w])

    def three(op, grad_output, output_size, input_size, align_corners, scales_d=None, scales_h=None, scales_w=None):
        """upsample_trilinear3d_backward(Tensor grad_output, SymInt[3] output_size, SymInt[5] input_size, bool align_corners,
        float? scales_d=None, float? scales_h=None, float? scales_w=None) -> Tensor
        """
        return _backward(op, grad_output, kernel, input_size, align_corners, [scales_d, scales_h, scales_w])

    return one, two, three


def _nearest(kernel: str) -> tuple[Callable[..., ir.Value], Callable[..., ir.Value], Callable[..., ir.Value]]:
    def one(op, self, output_size, scales=None):
        """upsample_nearest1d(Tensor self, SymInt[1] output_size, float? scales=None) -> Tensor"""
        return _nearest_forward(op, self, kernel, output_size, [scales])

    def two(op, self, output_size, scales_h=None, scales_w=None):
        """upsample_nearest2d(Tensor self, SymInt[2] output_size, float? scales_h=None, float? scales_w=None) -> Tensor"""
        return _nearest_forward(op, self, kernel, output_size, [scales_h, scales_w])

    def three(op, self, output_size, scales_d=None, scales_h=None, scales_w=None):
        """upsample_nearest3d(Tensor self, SymInt[3] output_size, float? scales_d=None, float? scales_h=None, float? scales_w=None) -> Tensor"""
        return _nearest_forward(op, self, kernel, output_size, [scales_d, scales_h, scales_w])

    return one, two, three


def _nearest_gradient(kernel: str) -> tuple[Callable[..., ir.Value], Callable[..., ir.Value], Callable[..., ir.Value]]:
    def one(op, grad_output, output_size, input_size, scales=None):
        """upsample_nearest1d_backward(Tensor grad_output, SymInt[1] output_size, SymInt[3] input_size, float? scales=None) -> Tensor"""
        return _nearest_backward(op, grad_output, kernel, input_size, [scales])

    def two(op, grad_output, output_size, input_size, scales_h=None, scales_w=None):
        """upsample_nearest2d_backward(Tensor grad_output, SymInt[2] output_size, SymInt[4] input_size, float? scales_h=None,
        float? scales_w=None) -> Tensor
        """
        return _nearest_backward(op, grad_output, kernel, input_size, [scales_h, scales_w])

    def three(op, grad_output, output_size, input_size, scales_d=None, scales_h=None, scales_w=None):
        """upsample_nearest3d_backward(Tensor grad_output, SymInt[3] output_size, SymInt[5] input_size, float? scales_d=None,
        float? scales_h=None, float? scales_w=None) -> Tensor
        """
        return _nearest_backward(op, grad_output, kernel, input_size, [scales_d, scales_h, scales_w])

    return one, two, three


for _kernel, _names in (
    ("linear", ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")),
    ("cubic", (None, "upsample_bicubic2d", None)),
    ("linear_aa", (None, "_upsample_bilinear2d_aa", None)),
    ("cubic_aa", (None, "_upsample_bicubic2d_aa", None)),
):
    for _name, _forward_of, _backward_of in zip(_names, _resize(_kernel), _resize_backward(_kernel)):
        if _name is not None:
            register(getattr(aten, _name).default)(_forward_of)
            register(getattr(aten, f"{_name}_backward").default)(_backward_of)
for _kernel, _stem in (("nearest", "upsample_nearest"), ("nearest-exact", "_upsample_nearest_exact")):
    for _spatial, _forward_of, _backward_of in zip((1, 2, 3), _nearest(_kernel), _nearest_gradient(_kernel)):
        register(getattr(aten, f"{_stem}{_spatial}d").default, any_dtype=True)(_forward_of)
        register(getattr(aten, f"{_stem}{_spatial}d_backward").default)(_backward_of)
