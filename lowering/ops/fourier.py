"""Discrete Fourier transforms as products with matrices of sines and cosines.

ONNX Runtime's own DFT is not used (1.19.2): it takes 10 to 150 times PyTorch's time, and errs by 1e-2 where the length is no power of two.
A long transform is taken apart into two of about the square root of its length (Cooley and Tukey, "An Algorithm for the Machine Calculation of
Complex Fourier Series", 1965): with n = b n1 + n2, k = k1 + a k2, and N = a b,

    X[k] = sum over n2 of w_N^(n2 k1) (sum over n1 of x[n] w_a^(n1 k1)) w_b^(n2 k2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.axes import axis, length, rank
from ort_backend.lowering.complex_numbers import Complex, from_real
from ort_backend.lowering.constants import constant, int64s, named_constant
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.complex_arithmetic import bilinear
from ort_backend.lowering.registry import Unsupported, register_complex
from ort_backend.lowering.symbolic import as_double, as_vector

aten = torch.ops.aten

Size = int | ir.Value

_DIRECT_UP_TO = 64  # lengths that are one product
_MATRIX_UP_TO = 1024  # a longer one without factors would be too large a matrix


@register_complex(aten._fft_c2c.default)
def fft_c2c(op: Any, self: Complex, dim: Sequence[int], normalization: int, forward: bool) -> Complex:
    """_fft_c2c(Tensor self, SymInt[] dim, int normalization, bool forward) -> Tensor"""
    write = _Transforms(op, self.dtype, -1 if forward else 1, normalization)
    for d in dim:
        self = write.along(self, axis(self.real, d))
    return self


@register_complex(aten._fft_r2c.default)
def fft_r2c(op: Any, self: ir.Value, dim: Sequence[int], normalization: int, onesided: bool) -> Complex:
    """_fft_r2c(Tensor self, int[] dim, int normalization, bool onesided) -> Tensor"""
    assert self.dtype is not None
    write = _Transforms(op, self.dtype, -1, normalization)
    last = write.along(from_real(op, self), axis(self, dim[-1]), onesided=onesided)
    return fft_c2c(op, last, dim[:-1], normalization, True)


@register_complex(aten._fft_c2r.default)
def fft_c2r(op: Any, self: Complex, dim: Sequence[int], normalization: int, last_dim_size: Size) -> ir.Value:
    """_fft_c2r(Tensor self, int[] dim, int normalization, SymInt last_dim_size) -> Tensor"""
    half = fft_c2c(op, self, dim[:-1], normalization, False)
    write = _Transforms(op, self.dtype, 1, normalization)
    return write.real_along(half, axis(self.real, dim[-1]), last_dim_size)


@dataclasses.dataclass(frozen=True)
class _Transforms:
    """Writes transforms of one kind.

    Attributes:
        op: The builder.
        dtype: The dtype of the parts.
        sign: Of the exponent: -1 forward, 1 backward.
        normalization: ATen's `fft_norm_mode`: 0 none, 1 divides by the root of the length, 2 by the length.
    """

    op: Any
    dtype: ir.DataType
    sign: int
    normalization: int

    def along(self, value: Complex, at: int, onesided: bool = False) -> Complex:
        """The transform along an axis; `onesided`: only its first N // 2 + 1 results."""
        count = length(self.op, value.real, at)
        if isinstance(count, ir.Value):
            results = self._half(count) if onesided else count
            sizes = (count, results) if at == rank(value.real) - 1 else (results, count)
            return self._typed(self._product(self._dynamic_matrix(count, *sizes), value, at), value.real, at, None)
        kept = count // 2 + 1 if onesided else count
        return self._typed(self._steps_along(value, at, count, kept), value.real, at, kept)

    def real_along(self, half: Complex, at: int, count: Size) -> ir.Value:
        """The real transform along an axis that holds N // 2 + 1 numbers, the others being their conjugates."""
        if isinstance(count, ir.Value):
            weights, is_last = self._dynamic_weights(count), at == rank(half.real) - 1
            matrix = self._dynamic_matrix(count, self._half(count), count) if is_last else self._dynamic_matrix(count, count, self._half(count))
            weights = self.op.Unsqueeze(weights, int64s(self.op, [1])) if is_last else weights
            return self._product(matrix.map(lambda part: self.op.Mul(part, weights)), half, at).real
        if _factor(count) > 1:
            return self._steps_along(self._mirrored(half, at, count), at, count, count).real
        return self._product(self._matrix(count, count // 2 + 1, count, at == rank(half.real) - 1, is_half=True), half, at).real

    def _typed(self, value: Complex, like: ir.Value, at: int, count: int | None) -> Complex:
        """A result of the shape of `like` but for one axis."""
        shape = [count if i == at else part for i, part in enumerate(like.shape)]  # type: ignore[arg-type]
        return value.map(lambda part: typed(part, self.dtype, shape))

    def _half(self, count: ir.Value) -> ir.Value:
        op = self.op
        return op.Add(op.Div(count, constant(op, 2, ir.DataType.INT64)), constant(op, 1, ir.DataType.INT64))

    # -- of a known length

    def _steps_along(self, value: Complex, at: int, count: int, kept: int) -> Complex:
        if _factor(count) == 1:
            return self._product(self._matrix(count, count, kept, at == rank(value.real) - 1), value, at)
        sizes = [length(self.op, value.real, i) for i in range(rank(value.real))]
        outer, inner = self._count(sizes[:at]), self._count(sizes[at + 1 :])
        made = self._steps(self._reshaped(value, [outer, count, inner]), outer, count, inner, kept)
        return self._reshaped(made, [*sizes[:at], kept, *sizes[at + 1 :]])

    def _steps(self, value: Complex, outer: Size, count: int, inner: Size, kept: int, scale: float | None = None) -> Complex:
        """The transform of the middle axis of (outer, count, inner): its first `kept` results."""
        op = self.op
        scale = self._scale(count) if scale is None else scale
        a = _factor(count)
        b, kept_b = count // a, (kept - 1) // a + 1
        is_last = inner == 1
        if a == 1:
            if not is_last:
                return self._product(self._matrix(count, count, kept, False, scale=scale), value, 1)
            rows = self._reshaped(value, [outer, count])
            return self._reshaped(self._product(self._matrix(count, count, kept, True, scale=scale), rows, 1), [outer, kept, 1])
        first = self._steps(self._reshaped(value, [outer, a, self._count([b, inner])]), outer, a, self._count([b, inner]), a, 1.0)
        turned = bilinear(op, op.Mul, self._twiddles(a, b), self._reshaped(first, [outer, a, b, inner]))
        groups = self._count([outer, a])
        second = self._steps(self._reshaped(turned, [groups, b, inner]), groups, b, inner, kept_b, scale)
        ordered = self._reshaped(second, [outer, a, kept_b, inner]).map(lambda part: op.Transpose(part, perm=[0, 2, 1, 3]))
        together = self._reshaped(ordered, [outer, kept_b * a, inner])
        if kept_b * a == kept:
            return together
        return together.map(lambda part: op.Slice(part, int64s(op, [0]), int64s(op, [kept]), int64s(op, [1])))

    def _mirrored(self, half: Complex, at: int, count: int) -> Complex:
        """All `count` numbers along an axis of which there is the first half."""
        op = self.op
        first, end = int64s(op, [(count - 1) // 2]), int64s(op, [0])
        back, where = int64s(op, [-1]), int64s(op, [at])

        def whole(part: ir.Value, mirror: Any) -> ir.Value:
            joined = op.Concat(part, mirror(op.Slice(part, first, end, where, back)), axis=at)
            return typed(joined, self.dtype, [count if i == at else size for i, size in enumerate(half.real.shape)])  # type: ignore[arg-type]

        return Complex(whole(half.real, lambda part: part), whole(half.imag, op.Neg))

    def _product(self, matrix: Complex, value: Complex, at: int) -> Complex:
        """The product of a matrix with an axis: from the right (columns: results) with the last one, else from the left (rows: results)."""
        op, dims = self.op, rank(value.real)
        if at == dims - 1:
            return bilinear(op, lambda left, right: op.MatMul(right, left), matrix, value)
        if 0 in tuple(value.real.shape)[:at]:  # type: ignore[arg-type]
            # Nothing, of the right shape: ONNX Runtime takes no product of a matrix with it.
            return value.map(lambda part: op.Gather(part, int64s(op, [0] * int(matrix.real.shape[0])), axis=at))  # type: ignore[index, arg-type]
        if at == dims - 2:
            return bilinear(op, op.MatMul, matrix, value)
        order = [i for i in range(dims) if i != at] + [at]
        back = [order.index(i) for i in range(dims)]
        transposed = matrix.map(lambda part: op.Transpose(part, perm=[1, 0]))
        moved = value.map(lambda part: op.Transpose(part, perm=order))
        return bilinear(op, lambda left, right: op.MatMul(right, left), transposed, moved).map(lambda part: op.Transpose(part, perm=back))

    def _reshaped(self, value: Complex, sizes: Sequence[Size]) -> Complex:
        op = self.op
        shape = as_vector(op, sizes)
        known = [part if isinstance(part, int) else None for part in sizes]
        return value.map(lambda part: typed(op.Reshape(part, shape, allowzero=1), self.dtype, known))

    def _count(self, sizes: Sequence[Size]) -> Size:
        """The product of sizes."""
        total: Size = math.prod(part for part in sizes if isinstance(part, int))
        for part in sizes:
            if isinstance(part, ir.Value):
                total = part if isinstance(total, int) and total == 1 else self.op.Mul(part, total)
        return total

    def _scale(self, count: int) -> float:
        return float(count) ** {0: 0.0, 1: -0.5, 2: -1.0}[self.normalization]

    def _matrix(self, count: int, used: int, results: int, is_last: bool, *, scale: float | None = None, is_half: bool = False) -> Complex:
        """The factors of a transform, (used, results) for the last axis, else (results, used). `is_half`: a number stands for its conjugate too."""
        scale = self._scale(count) if scale is None else scale
        angles = np.outer(np.arange(used), np.arange(results)) % count
        weights = np.full([used, 1], scale)
        if is_half:
            weights[[i for i in range(used) if i != 0 and 2 * i != count]] *= 2
        name = f"fourier {count} {used} {results} {self.sign} {scale} {is_half} {is_last}"
        return self._roots(angles, count, weights, name, is_last)

    def _twiddles(self, a: int, b: int) -> Complex:
        """What the results of the first step are multiplied by, (a, b, 1)."""
        angles = np.outer(np.arange(b), np.arange(a))
        made = self._roots(angles, a * b, np.ones([]), f"twiddles {a} {b} {self.sign}", False)
        return made.map(lambda part: typed(self.op.Unsqueeze(part, int64s(self.op, [2])), self.dtype, [a, b, 1]))

    def _roots(self, angles: np.ndarray, count: int, weights: np.ndarray, name: str, is_last: bool) -> Complex:
        """weights exp(sign 2 pi i angles / count), transposed if not for the last axis."""
        turns = 2 * np.pi * np.arange(count) / count

        def factors(kind: str, table: np.ndarray) -> ir.Value:
            table[np.abs(table) < 1e-15] = 0  # the sine of pi
            made = table[angles] * weights
            return named_constant(self.op, f"{kind} {name}", made if is_last else made.T, self.dtype)

        return Complex(factors("cos", np.cos(turns)), factors("sin", self.sign * np.sin(turns)))

    # -- of a symbolic length

    def _dynamic_matrix(self, count: ir.Value, rows: ir.Value, columns: ir.Value) -> Complex:
        """The factors of a transform, normalised. Only `count` sines are computed."""
        op = self.op
        zero, one = (constant(op, number, ir.DataType.INT64) for number in (0, 1))
        turn = op.Div(constant(op, 2 * math.pi, ir.DataType.DOUBLE), as_double(op, count))
        turns = op.Mul(op.Cast(op.Range(zero, count, one), to=ir.DataType.DOUBLE), turn)
        row = op.Unsqueeze(op.Range(zero, rows, one), int64s(op, [1]))
        angles = op.Mod(op.Mul(row, op.Range(zero, columns, one)), count)
        scale = op.Pow(as_double(op, count), constant(op, {0: 0.0, 1: -0.5, 2: -1.0}[self.normalization], ir.DataType.DOUBLE))
        # ONNX Runtime has no cosine of float64.
        cos = op.Sin(op.Add(turns, constant(op, math.pi / 2, ir.DataType.DOUBLE)))
        sin = op.Mul(op.Sin(turns), constant(op, float(self.sign), ir.DataType.DOUBLE))

        def factors(table: ir.Value) -> ir.Value:
            return typed(op.Gather(op.Cast(op.Mul(table, scale), to=self.dtype), angles, axis=0), self.dtype, [None, None])

        return Complex(factors(cos), factors(sin))

    def _dynamic_weights(self, count: ir.Value) -> ir.Value:
        """1 for the numbers that are their own conjugates (the first, and the last of an even count), 2 for the others."""
        op = self.op
        zero, one = (constant(op, number, ir.DataType.INT64) for number in (0, 1))
        twice = op.Mul(op.Range(zero, self._half(count), one), constant(op, 2, ir.DataType.INT64))
        is_own = op.Equal(op.Mod(twice, count), zero)
        return op.Where(is_own, constant(op, 1.0, self.dtype), constant(op, 2.0, self.dtype))


def _factor(count: int) -> int:
    """The length of the first of two steps; 1: none, the transform is one product.

    Raises:
        Unsupported: it would be too large a product.
    """
    if count <= _DIRECT_UP_TO:
        return 1
    factor = max(a for a in range(1, math.isqrt(count) + 1) if count % a == 0)
    if factor == 1 and count > _MATRIX_UP_TO:
        raise Unsupported(f"a Fourier transform of a multiple of {count}, a prime number")
    return factor
