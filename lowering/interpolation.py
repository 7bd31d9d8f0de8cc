"""The weights of interpolation along one axis, in the arithmetic of PyTorch's kernels (ATen/native/UpSample.h)."""

from __future__ import annotations

from typing import Any

import numpy as np


def _step(size_in: int, size_out: int, align_corners: bool, scale: float | None, real: type) -> Any:
    """How far the source moves when the result moves by one."""
    if align_corners:
        return real(size_in - 1) / real(size_out - 1) if size_out > 1 else real(0)
    return real(1.0 / scale) if scale is not None and scale > 0 else real(size_in) / real(size_out)


def nearest_rows(kernel: str, size_in: int, size_out: int, scale: float | None, real: type = np.float32) -> np.ndarray:
    """(size_out,): where each element of the result is taken from."""
    step = _step(size_in, size_out, False, scale, real)
    half = real(0.5 if kernel == "nearest-exact" else 0)
    return np.minimum(np.floor((np.arange(size_out).astype(real) + half) * step).astype(np.int64), size_in - 1)


def weights(kernel: str, size_in: int, size_out: int, align_corners: bool, scale: float | None, real: type = np.float32) -> np.ndarray:
    """(size_out, size_in): each row makes one element of the result."""
    matrix: np.ndarray = np.zeros([size_out, size_in], dtype=real)
    rows = np.arange(size_out)
    if kernel.startswith("nearest"):
        matrix[rows, nearest_rows(kernel, size_in, size_out, scale, real)] = 1
        return matrix
    step = _step(size_in, size_out, align_corners, scale, real)
    if kernel.endswith("_aa"):
        return _antialiased(kernel, step, matrix)
    source = rows.astype(real) * step if align_corners else step * (rows.astype(real) + real(0.5)) - real(0.5)
    if kernel == "linear":
        source = np.clip(source, 0, size_in - 1)
    first = np.floor(source).astype(np.int64)
    part = source - first.astype(real)
    taps = {0: 1 - part, 1: part} if kernel == "linear" else {at: _cubic(part - real(at), -0.75) for at in (-1, 0, 1, 2)}
    for at, weight in taps.items():
        np.add.at(matrix, (rows, np.clip(first + at, 0, size_in - 1)), weight)
    return matrix


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _antialiased(kernel: str, step: Any, matrix: np.ndarray) -> np.ndarray:
    """Weights over as many elements as a step spans."""
    linear = kernel == "linear_aa"
    reach = (1 if linear else 2) * max(step, 1)
    for row in range(matrix.shape[0]):
        center = step * (row + 0.5)
        first = max(int(center - reach + 0.5), 0)
        last = min(int(center + reach + 0.5), matrix.shape[1])
        distance = (np.arange(first, last) - center + 0.5) / max(step, 1)
        weight = np.maximum(1 - np.abs(distance), 0) if linear else _cubic(distance, -0.5)
        matrix[row, first:last] = weight / weight.sum()
    return matrix
