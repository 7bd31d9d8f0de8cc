"""Pooling and its gradients.

`MaxPoolGrad` and `AveragePoolGrad` are not used: without declared shapes they bring the process down (onnxruntime-training 1.19.2), they have
no CUDA kernel, and scattering (max) and a transposed convolution over single planes (average) are no slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.axes import element_count
from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

# Elements of a window from which on it is meant to cover a plane whatever its size, with `ceil_mode`: EfficientNet of transformers has 1280 x 1280.
_COVERS_PLANES = 4096


def _per_dim(sizes: Sequence[int], spatial: int) -> list[int]:
    return [int(size) for size in sizes] if len(sizes) == spatial else [int(sizes[0])] * spatial


def _static(tensor: ir.Value, spatial: int) -> list[int] | None:
    """The sizes of the pooled dimensions, if they are known."""
    sizes = list(tensor.shape[-spatial:])  # type: ignore[index]
    return [int(size) for size in sizes] if all(isinstance(size, int) for size in sizes) else None


def _window(tensor: ir.Value, spatial: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> dict[str, Any]:
    """The attributes of an ONNX pooling node. What `ceil_mode` adds is padding behind, for ONNX's own `ceil_mode` may add a window too many."""
    kernel, pads, dilations = _per_dim(kernel_size, spatial), _per_dim(padding, spatial), _per_dim(dilation, spatial)
    strides = _per_dim(stride, spatial) if stride else kernel
    window = {"kernel_shape": kernel, "strides": strides, "pads": pads + pads, "dilations": dilations}
    if not ceil_mode:
        return window
    sizes = _static(tensor, spatial)
    if sizes is None:
        if math.prod(kernel) >= _COVERS_PLANES:  # planes would be padded to that
            raise Unsupported("a large window over planes of unknown sizes, with ceil_mode")
        # ONNX has the same windows where none of them can start in the padding behind.
        if all(s + p <= d * (k - 1) + 1 for s, p, d, k in zip(strides, pads, dilations, kernel)):
            return {**window, "ceil_mode": 1}
        raise Unsupported("ceil_mode with sizes that are not known")
    # What of a window lies beyond the padding holds nothing, and counts for nothing.
    kernel = window["kernel_shape"] = [min(k, (size + 2 * p - 1) // d + 1) for size, k, p, d in zip(sizes, kernel, pads, dilations)]
    spans = [size + 2 * p - d * (k - 1) - 1 for size, k, p, d in zip(sizes, kernel, pads, dilations)]
    starts = [math.ceil(span / s) * s for span, s in zip(spans, strides)]
    inside = [start < size + p for start, size, p in zip(starts, sizes, pads)]  # PyTorch drops a window that starts in the padding behind
    behind = [p + (start - span if ok else 0) for p, start, span, ok in zip(pads, starts, spans, inside)]
    if all(p < k for p, k in zip(behind, kernel)):  # as ONNX Runtime demands
        return {**window, "pads": pads + behind}
    if not all(inside):
        raise Unsupported("ceil_mode with more padding than ONNX Runtime takes")
    return {**window, "ceil_mode": 1}


def _batched(op: Any, tensor: ir.Value, spatial: int) -> ir.Value:
    """(C, ...) as (1, C, ...)."""
    if tensor.shape.rank() == spatial + 2:  # type: ignore[union-attr]
        return tensor
    return typed(op.Unsqueeze(tensor, int64s(op, [0])), tensor.dtype, [1, *tensor.shape])  # type: ignore[misc]


def _unbatched(op: Any, result: ir.Value, tensor: ir.Value, spatial: int) -> ir.Value:
    return result if tensor.shape.rank() == spatial + 2 else op.Squeeze(result, int64s(op, [0]))  # type: ignore[union-attr]


def _refuse_on_device(op: Any, window: dict[str, Any], spatial: int) -> None:
    """cuDNN's poolings are padded behind as in front, and have no gaps: those of 1.19.2 take what an ONNX node says of the front, and do not see
    that a window is dilated (wrong averages, seen on an H200; wrong maxima, on an H100).

    Raises:
        Unsupported: on a CUDA device, where a window is padded otherwise, or dilated.
    """
    if op.builder.device_type == "cpu":
        return
    if any(gap != 1 for gap in window.get("dilations", ())):
        raise Unsupported("a dilated window, on a device")
    if "ceil_mode" in window or window["pads"][:spatial] != window["pads"][spatial:]:
        raise Unsupported("more padding behind than in front, on a device")


def max_pool(op: Any, self: ir.Value, spatial: int, window: dict[str, Any]) -> tuple[ir.Value, ir.Value]:
    """The maxima of windows, and where in its plane each stands."""
    _refuse_on_device(op, window, spatial)
    batched = _batched(op, self, spatial)
    out, flat_indices = op.MaxPool(batched, **window, _outputs=2)
    # ONNX counts through the whole tensor, PyTorch within each plane.
    plane = op.ReduceProd(op.Shape(self, start=-spatial), keepdims=0) if _static(self, spatial) is None else math.prod(_static(self, spatial))  # type: ignore[arg-type]
    indices = _unbatched(op, op.Mod(flat_indices, plane), self, spatial)
    indices.meta["flat_indices"] = flat_indices
    return _unbatched(op, out, self, spatial), indices


@register(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(op, self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    """max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) ->
    (Tensor, Tensor)
    """
    return max_pool(op, self, 2, _window(self, 2, kernel_size, stride, _list(padding), _list(dilation), ceil_mode))


@register(aten.max_pool3d_with_indices.default)
def max_pool3d_with_indices(op, self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    """max_pool3d_with_indices(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, int[3] dilation=1, bool ceil_mode=False) ->
    (Tensor, Tensor)
    """
    return max_pool(op, self, 3, _window(self, 3, kernel_size, stride, _list(padding), _list(dilation), ceil_mode))


def _list(sizes: int | Sequence[int]) -> Sequence[int]:
    return [sizes] if isinstance(sizes, int) else sizes


def scatter_maxima(op: Any, grad_output: ir.Value, self: ir.Value, indices: ir.Value, spatial: int) -> ir.Value:
    """Adds each entry of the gradient where the maximum stood."""
    size = op.Shape(self)
    flat = indices.meta.get("flat_indices")
    if flat is not None:
        grad, index = (op.Reshape(tensor, int64s(op, [-1])) for tensor in (grad_output, flat))
        shape, axis = op.Unsqueeze(element_count(op, self), int64s(op, [0])), 0
    else:
        lead = op.Shape(self, start=0, end=-spatial)
        rows = op.Concat(lead, op.ReduceProd(op.Shape(indices, start=-spatial), keepdims=1), axis=0)
        grad, index, axis = op.Reshape(grad_output, rows), op.Reshape(indices, rows), self.shape.rank() - spatial  # type: ignore[union-attr]
        shape = op.Concat(lead, op.ReduceProd(op.Shape(self, start=-spatial), keepdims=1), axis=0)
    zeros = op.ConstantOfShape(shape, value=ir.tensor([0.0], dtype=grad_output.dtype))
    return op.Reshape(op.ScatterElements(zeros, index, grad, axis=axis, reduction="add"), size)


@register(aten.max_pool2d_with_indices_backward.default, promote="output", keep=("indices",))
def max_pool2d_with_indices_backward(op, grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    """max_pool2d_with_indices_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation,
    bool ceil_mode, Tensor indices) -> Tensor
    """
    return scatter_maxima(op, grad_output, self, indices, 2)


@register(aten.max_pool3d_with_indices_backward.default, promote="output", keep=("indices",))
def max_pool3d_with_indices_backward(op, grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    """max_pool3d_with_indices_backward(Tensor grad_output, Tensor self, int[3] kernel_size, int[3] stride, int[3] padding, int[3] dilation,
    bool ceil_mode, Tensor indices) -> Tensor
    """
    return scatter_maxima(op, grad_output, self, indices, 3)


# -- average


def _counted(window: dict[str, Any], spatial: int, count_include_pad: bool, divisor_override: int | None) -> str:
    """What windows are divided by: their full size ("whole"), what they cover without padding ("inside"), or with the padding that was asked for,
    but without what `ceil_mode` adds ("padded").
    """
    pads, behind = window["pads"][:spatial], window["pads"][spatial:]
    if divisor_override or (count_include_pad and pads == behind):
        return "whole"  # for a divisor only the sum matters
    return "padded" if count_include_pad and any(pads) else "inside"


def _avg_pool(op: Any, self: ir.Value, spatial: int, window: dict[str, Any], count_include_pad: bool, divisor_override: int | None) -> ir.Value:
    if "ceil_mode" in window:
        return _avg_pool_rounded_up(op, self, spatial, window, count_include_pad, divisor_override)
    _refuse_on_device(op, window, spatial)
    counted = _counted(window, spatial, count_include_pad, divisor_override)
    window = {name: value for name, value in window.items() if name != "dilations"}
    out = op.AveragePool(_batched(op, self, spatial), **window, count_include_pad=int(counted != "inside"))
    whole = math.prod(window["kernel_shape"])
    if divisor_override:
        out = op.Mul(out, whole / divisor_override)
    if counted == "padded":
        counts = _counts(_static(self, spatial), _pooled(self, spatial, window), window, window["pads"])  # type: ignore[arg-type]
        out = op.Mul(out, constant(op, whole / counts, self.dtype))  # type: ignore[arg-type]
    return _unbatched(op, out, self, spatial)


def _avg_pool_rounded_up(
    op: Any, self: ir.Value, spatial: int, window: dict[str, Any], count_include_pad: bool, divisor_override: int | None
) -> ir.Value:
    """With `ceil_mode`, of planes of unknown sizes: padded behind until the windows fit, and divided by what each covers of the plane."""
    kernel, strides, pads = window["kernel_shape"], window["strides"], window["pads"][:spatial]
    plane = op.Shape(self, start=-spatial)
    # One window less than there are: (size + 2 pad - kernel) / stride, rounded up.
    steps = op.Div(op.Add(plane, int64s(op, [2 * p - k + s - 1 for p, k, s in zip(pads, kernel, strides)])), int64s(op, strides))
    behind = op.Sub(op.Add(op.Mul(steps, int64s(op, strides)), int64s(op, [k - p for k, p in zip(kernel, pads)])), plane)
    padded = op.Pad(_batched(op, self, spatial), op.Concat(int64s(op, [0, 0, *pads, 0, 0]), behind, axis=0))
    mean = op.AveragePool(padded, kernel_shape=kernel, strides=strides, count_include_pad=1)
    whole = math.prod(kernel)
    if divisor_override:
        return _unbatched(op, op.Mul(mean, whole / divisor_override), self, spatial)
    counts = _counts_of(op, op.Shape(mean, start=-spatial), plane, window, spatial, self, pads if count_include_pad else [0] * spatial)
    return _unbatched(op, op.Div(op.Mul(mean, float(whole)), counts), self, spatial)


def _pooled(self: ir.Value, spatial: int, window: dict[str, Any]) -> list[int]:
    """The sizes of the result."""
    kernel, strides, pads = window["kernel_shape"], window["strides"], window["pads"]
    sizes = _static(self, spatial)
    return [(size + p + more - k) // s + 1 for size, k, s, p, more in zip(sizes, kernel, strides, pads, pads[spatial:])]  # type: ignore[arg-type]


@register(aten.avg_pool2d.default)
def avg_pool2d(op, self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, bool count_include_pad=True,
    int? divisor_override=None) -> Tensor
    """
    window = _window(self, 2, kernel_size, stride, _list(padding), [1], ceil_mode)
    return _avg_pool(op, self, 2, window, count_include_pad, divisor_override)


@register(aten.avg_pool3d.default)
def avg_pool3d(op, self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """avg_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, bool ceil_mode=False, bool count_include_pad=True,
    int? divisor_override=None) -> Tensor
    """
    window = _window(self, 3, kernel_size, stride, _list(padding), [1], ceil_mode)
    return _avg_pool(op, self, 3, window, count_include_pad, divisor_override)


def _avg_pool_backward(
    op: Any, grad_output: ir.Value, self: ir.Value, spatial: int, window: dict[str, Any], count_include_pad: bool, divisor_override: int | None
) -> ir.Value:
    """Spreads each entry over its window: a transposed convolution of single planes with a window of equal weights."""
    sizes = _static(self, spatial)
    if sizes is None or "ceil_mode" in window:
        return _spread(op, grad_output, self, spatial, window, count_include_pad, divisor_override)
    counted = _counted(window, spatial, count_include_pad, divisor_override)
    kernel, strides, pads, pooled = window["kernel_shape"], window["strides"], window["pads"][:spatial], _pooled(self, spatial, window)
    if counted == "whole" or not any(window["pads"]):
        weight, grad = 1 / (divisor_override or math.prod(kernel)), grad_output
    else:
        counts = _counts(sizes, pooled, window, pads if counted == "padded" else [0] * spatial)
        weight, grad = 1.0, op.Div(grad_output, constant(op, counts, grad_output.dtype))  # type: ignore[arg-type]
    planes = typed(op.Reshape(grad, int64s(op, [-1, 1, *pooled])), self.dtype, [None, 1, *pooled])
    if all(s == 1 for s in strides):
        return op.Reshape(_sums_of_windows(op, planes, kernel, pads, weight), op.Shape(self))
    missing = [size - ((n - 1) * s - 2 * p + k) for size, n, s, p, k in zip(sizes, pooled, strides, pads, kernel)]
    spread = op.ConvTranspose(
        planes,
        constant(op, np.full([1, 1, *kernel], weight), self.dtype),  # type: ignore[arg-type]
        kernel_shape=kernel,
        strides=strides,
        pads=[*pads, *(p + max(-more, 0) for p, more in zip(pads, missing))],
        output_padding=[max(more, 0) for more in missing],
    )
    return op.Reshape(spread, op.Shape(self))


def _sums_of_windows(op: Any, planes: ir.Value, kernel: Sequence[int], pads: Sequence[int], weight: float) -> ir.Value:
    """The same without a stride: what is spread over an element comes from a window around it. As averages of these it takes a tenth (7 x 7) to a
    fourth (3 x 3) of the time of a transposed convolution, in three dimensions a fiftieth.
    """
    around = [k - 1 - p for k, p in zip(kernel, pads)]
    averages = op.AveragePool(planes, kernel_shape=kernel, pads=[*around, *around], count_include_pad=1)
    whole = weight * math.prod(kernel)
    return averages if math.isclose(whole, 1) else op.Mul(averages, whole)


def _spread(
    op: Any, grad_output: ir.Value, self: ir.Value, spatial: int, window: dict[str, Any], count_include_pad: bool, divisor_override: int | None
) -> ir.Value:
    """The same for planes of unknown sizes: what the windows cover, extended or cut to the plane."""
    kernel, strides, pads = window["kernel_shape"], window["strides"], window["pads"][:spatial]
    pooled, plane = op.Shape(grad_output, start=-spatial), op.Shape(self, start=-spatial)
    weight = 1 / (divisor_override or math.prod(kernel))
    if not divisor_override and ("ceil_mode" in window or (any(pads) and not count_include_pad)):
        counts = _counts_of(op, pooled, plane, window, spatial, grad_output, pads if count_include_pad else [0] * spatial)
        grad_output, weight = op.Div(grad_output, counts), 1.0
    planes = typed(op.Reshape(grad_output, op.Concat(int64s(op, [-1, 1]), pooled, axis=0)), self.dtype, [None, 1, *[None] * spatial])
    if all(s == 1 for s in strides) and "ceil_mode" not in window:
        return op.Reshape(_sums_of_windows(op, planes, kernel, pads, weight), op.Shape(self))
    ones = constant(op, np.full([1, 1, *kernel], weight), self.dtype)  # type: ignore[arg-type]
    covered = op.ConvTranspose(planes, ones, kernel_shape=kernel, strides=strides)
    missing = op.Max(op.Sub(op.Add(plane, int64s(op, pads)), op.Shape(covered, start=2)), int64s(op, [0]))
    extended = op.Pad(covered, op.Concat(int64s(op, [0] * (spatial + 4)), missing, axis=0))
    inside = op.Slice(extended, int64s(op, pads), op.Add(plane, int64s(op, pads)), int64s(op, range(2, 2 + spatial)))
    return op.Reshape(inside, op.Shape(self))


def _counts_of(op: Any, pooled: ir.Value, plane: ir.Value, window: dict[str, Any], spatial: int, like: ir.Value, edges: Sequence[int]) -> ir.Value:
    """How many elements each window covers, of the input and of as much padding around it as `edges` says, in `like`'s dtype."""
    counts = None
    zero, one = (constant(op, number, ir.DataType.INT64) for number in (0, 1))
    for i, (kernel, stride, pad, edge) in enumerate(zip(window["kernel_shape"], window["strides"], window["pads"], edges)):
        count, total = (op.Gather(sizes, constant(op, i, ir.DataType.INT64)) for sizes in (pooled, plane))
        start = op.Sub(op.Mul(op.Range(zero, count, one), constant(op, stride, ir.DataType.INT64)), constant(op, pad, ir.DataType.INT64))
        end = op.Add(total, constant(op, edge, ir.DataType.INT64)) if edge else total
        along = op.Sub(op.Min(op.Add(start, constant(op, kernel, ir.DataType.INT64)), end), op.Max(start, constant(op, -edge, ir.DataType.INT64)))
        along = op.Unsqueeze(along, int64s(op, range(1, spatial - i))) if i < spatial - 1 else along
        counts = along if counts is None else op.Mul(counts, along)
    return op.Cast(counts, to=like.dtype)


def _counts(sizes: list[int], pooled: list[int], window: dict[str, Any], edges: Sequence[int]) -> np.ndarray:
    """How many elements each window covers, of the input and of as much padding around it as `edges` says."""
    counts = np.ones([], dtype=np.int64)
    for size, n, k, s, p, edge in zip(sizes, pooled, window["kernel_shape"], window["strides"], window["pads"], edges):
        start = np.arange(n) * s - p
        counts = np.multiply.outer(counts, np.minimum(start + k, size + edge) - np.maximum(start, -edge))
    return counts


@register(aten.avg_pool2d_backward.default, promote="output")
def avg_pool2d_backward(op, grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    """avg_pool2d_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, bool ceil_mode,
    bool count_include_pad, int? divisor_override) -> Tensor
    """
    window = _window(self, 2, kernel_size, stride, _list(padding), [1], ceil_mode)
    return _avg_pool_backward(op, grad_output, self, 2, window, count_include_pad, divisor_override)


@register(aten.avg_pool3d_backward.default, promote="output")
def avg_pool3d_backward(op, grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    """avg_pool3d_backward(Tensor grad_output, Tensor self, int[3] kernel_size, int[3] stride, int[3] padding, bool ceil_mode,
    bool count_include_pad, int? divisor_override) -> Tensor
    """
    window = _window(self, 3, kernel_size, stride, _list(padding), [1], ceil_mode)
    return _avg_pool_backward(op, grad_output, self, 3, window, count_include_pad, divisor_override)
