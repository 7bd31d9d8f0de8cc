"""Functions of complex numbers: exponentials, logarithms, powers, circular and hyperbolic functions, statistics.

The formulas are those of Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964): 3.7.26 (square root), 4.1.2, 4.2.1, 4.3.55 to 4.3.57,
4.5.49 to 4.5.51. Zeros and infinities, which C's library treats one by one, give NaN in some places where eager PyTorch has a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.complex_numbers import Complex
from ort_backend.lowering.constants import negated, scalar_like
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops import pointwise, reduction
from ort_backend.lowering.ops.complex_arithmetic import Operand, add, complexes, conj, mul, nonzero, reciprocal, sub, times
from ort_backend.lowering.ops.indexing import put_rows
from ort_backend.lowering.ops.powers import atan2, hypot
from ort_backend.lowering.registry import register_complex

aten = torch.ops.aten

# -- exponentials and logarithms


@register_complex(aten.exp.default, promote="output")
def exp(op: Any, self: Complex) -> Complex:
    """exp(Tensor self) -> Tensor"""
    size = op.Exp(self.real)
    return Complex(op.Mul(size, op.Cos(self.imag)), op.Mul(size, op.Sin(self.imag)))


@register_complex(aten.exp2.default, promote="output")
def exp2(op: Any, self: Complex) -> Complex:
    """exp2(Tensor self) -> Tensor"""
    return exp(op, mul(op, self, math.log(2)))


@register_complex(aten.expm1.default, promote="output")
def expm1(op: Any, self: Complex) -> Complex:
    """expm1(Tensor self) -> Tensor: with cos b - 1 = -2 sin^2(b / 2), which keeps the digits of small numbers."""
    sine = op.Sin(op.Mul(self.imag, scalar_like(op, 0.5, self.imag)))
    missing = op.Mul(op.Mul(sine, sine), scalar_like(op, 2.0, sine))
    real = op.Sub(op.Mul(pointwise.expm1(op, self.real), op.Cos(self.imag)), missing)
    return Complex(real, op.Mul(op.Exp(self.real), op.Sin(self.imag)))


@register_complex(aten.log.default, promote="output")
def log(op: Any, self: Complex) -> Complex:
    """log(Tensor self) -> Tensor"""
    return Complex(op.Log(hypot(op, self.real, self.imag)), atan2(op, self.imag, self.real))


def _logarithm(base: float) -> Callable[[Any, Complex], Complex]:
    def lower(op: Any, self: Complex) -> Complex:
        return mul(op, log(op, self), 1 / math.log(base))

    lower.__doc__ = f"(Tensor self) -> Tensor, the logarithm to base {base}"
    return lower


register_complex(aten.log2.default, promote="output")(_logarithm(2))
register_complex(aten.log10.default, promote="output")(_logarithm(10))


@register_complex(aten.log1p.default, promote="output")
def log1p(op: Any, self: Complex) -> Complex:
    """log1p(Tensor self) -> Tensor: |1 + z|^2 = 1 + (2 a + a^2 + b^2)."""
    a, b = self.real, self.imag
    more = op.Add(op.Mul(a, op.Add(a, scalar_like(op, 2.0, a))), op.Mul(b, b))
    size = op.Mul(pointwise.log1p(op, more), scalar_like(op, 0.5, a))
    return Complex(size, atan2(op, b, op.Add(a, scalar_like(op, 1.0, a))))


# -- powers


@register_complex(aten.sqrt.default, promote="output")
def sqrt(op: Any, self: Complex) -> Complex:
    """sqrt(Tensor self) -> Tensor: t = sqrt((|a| + |z|) / 2) is the larger part of the root, b / 2t the other one."""
    a, b = self.real, self.imag
    zero, half = scalar_like(op, 0.0, a), scalar_like(op, 0.5, a)
    larger = op.Sqrt(op.Mul(op.Add(op.Abs(a), hypot(op, a, b)), half))
    other = op.Where(op.Equal(larger, zero), b, op.Div(op.Mul(b, half), larger))
    is_right = op.GreaterOrEqual(a, zero)
    signed = op.Where(op.Less(b, zero), op.Neg(larger), larger)
    return Complex(op.Where(is_right, larger, op.Abs(other)), op.Where(is_right, other, signed))


@register_complex(aten.rsqrt.default, promote="output")
def rsqrt(op: Any, self: Complex) -> Complex:
    """rsqrt(Tensor self) -> Tensor"""
    return reciprocal(op, sqrt(op, self))


@register_complex(aten.pow.Tensor_Scalar, promote="output")
def pow_scalar(op: Any, self: Operand, exponent: complex | ir.Value) -> Complex:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    (base,) = complexes(op, self)
    if exponent == 0.5:
        return sqrt(op, base)
    if isinstance(exponent, (int, float)) and exponent == int(exponent) and 0 < abs(exponent) <= 8:
        power = base
        for _ in range(int(abs(exponent)) - 1):
            power = mul(op, power, base)
        return power if exponent > 0 else reciprocal(op, power)
    return pow_(op, base, exponent)


@register_complex(aten.pow.Tensor_Tensor, aten.pow.Scalar, promote="output")
def pow_(op: Any, self: Operand, exponent: Operand) -> Complex:
    """pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor

    exp(w log z); zero to the power of zero is 1, to any other 0.
    """
    base, power = complexes(op, self, exponent)
    zero, one = scalar_like(op, 0.0, base.real), scalar_like(op, 1.0, base.real)
    result = exp(op, mul(op, power, log(op, base)))
    is_zero, is_one = negated(op, nonzero(op, base)), negated(op, nonzero(op, power))

    def with_zeros(part: ir.Value, at_zero: ir.Value) -> ir.Value:
        return op.Where(is_one, at_zero, op.Where(is_zero, zero, part))

    return Complex(with_zeros(result.real, one), with_zeros(result.imag, zero))


# -- circular and hyperbolic functions


@register_complex(aten.sin.default, promote="output")
def sin(op: Any, self: Complex) -> Complex:
    """sin(Tensor self) -> Tensor"""
    a, b = self.real, self.imag
    return Complex(op.Mul(op.Sin(a), op.Cosh(b)), op.Mul(op.Cos(a), op.Sinh(b)))


@register_complex(aten.cos.default, promote="output")
def cos(op: Any, self: Complex) -> Complex:
    """cos(Tensor self) -> Tensor"""
    a, b = self.real, self.imag
    return Complex(op.Mul(op.Cos(a), op.Cosh(b)), op.Neg(op.Mul(op.Sin(a), op.Sinh(b))))


@register_complex(aten.sinh.default, promote="output")
def sinh(op: Any, self: Complex) -> Complex:
    """sinh(Tensor self) -> Tensor"""
    a, b = self.real, self.imag
    return Complex(op.Mul(op.Sinh(a), op.Cos(b)), op.Mul(op.Cosh(a), op.Sin(b)))


@register_complex(aten.cosh.default, promote="output")
def cosh(op: Any, self: Complex) -> Complex:
    """cosh(Tensor self) -> Tensor"""
    a, b = self.real, self.imag
    return Complex(op.Mul(op.Cosh(a), op.Cos(b)), op.Mul(op.Sinh(a), op.Sin(b)))


@register_complex(aten.tanh.default, promote="output")
def tanh(op: Any, self: Complex) -> Complex:
    """tanh(Tensor self) -> Tensor: (sinh 2a + i sin 2b) / (cosh 2a + cos 2b); beyond 20 the result is 1 to all digits."""
    two, limit = scalar_like(op, 2.0, self.real), scalar_like(op, 20.0, self.real)
    a, b = op.Mul(op.Clip(self.real, op.Neg(limit), limit), two), op.Mul(self.imag, two)
    below = op.Add(op.Cosh(a), op.Cos(b))
    return Complex(op.Div(op.Sinh(a), below), op.Div(op.Sin(b), below))


@register_complex(aten.tan.default, promote="output")
def tan(op: Any, self: Complex) -> Complex:
    """tan(Tensor self) -> Tensor: -i tanh(i z)"""
    turned = tanh(op, Complex(op.Neg(self.imag), self.real))
    return Complex(turned.imag, op.Neg(turned.real))


@register_complex(aten.tanh_backward.default, promote="output")
def tanh_backward(op: Any, grad_output: Operand, output: Operand) -> Complex:
    """tanh_backward(Tensor grad_output, Tensor output) -> Tensor"""
    return _times_conjugate(op, grad_output, sub(op, 1, mul(op, output, output)))


@register_complex(aten.sigmoid.default, promote="output")
def sigmoid(op: Any, self: Complex) -> Complex:
    """sigmoid(Tensor self) -> Tensor"""
    return reciprocal(op, add(op, exp(op, self.map(op.Neg)), 1))


@register_complex(aten.sigmoid_backward.default, promote="output")
def sigmoid_backward(op: Any, grad_output: Operand, output: Operand) -> Complex:
    """sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor"""
    return _times_conjugate(op, grad_output, mul(op, output, sub(op, 1, output)))


def _times_conjugate(op: Any, gradient: Operand, derivative: Complex) -> Complex:
    return mul(op, gradient, conj(op, derivative))


# -- of two numbers


@register_complex(aten.lerp.Scalar, aten.lerp.Tensor, promote="output")
def lerp(op: Any, self: Operand, end: Operand, weight: Operand) -> Complex:
    """lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor"""
    return add(op, self, mul(op, sub(op, end, self), weight))


_LOGIC = ((aten.logical_and.default, "And"), (aten.logical_or.default, "Or"), (aten.logical_xor.default, "Xor"))


def _logic(kind: str) -> Callable[..., ir.Value]:
    def lower(op: Any, self: Complex | ir.Value, other: Complex | ir.Value) -> ir.Value:
        return getattr(op, kind)(nonzero(op, self), nonzero(op, other))

    lower.__doc__ = f"(Tensor self, Tensor other) -> Tensor, which is ONNX's {kind}"
    return lower


for _target, _kind in _LOGIC:
    register_complex(_target)(_logic(_kind))

# -- over several elements


def _is_nonzero(op: Any, value: Complex) -> ir.Value:
    return typed(nonzero(op, value), ir.DataType.BOOL, value.real.shape)


@register_complex(aten.any.default)
def any_(op: Any, self: Complex) -> ir.Value:
    """any(Tensor self) -> Tensor"""
    return reduction.any_(op, _is_nonzero(op, self))


@register_complex(aten.all.default)
def all_(op: Any, self: Complex) -> ir.Value:
    """all(Tensor self) -> Tensor"""
    return reduction.all_(op, _is_nonzero(op, self))


@register_complex(aten.count_nonzero.default)
def count_nonzero(op: Any, self: Complex, dim: int | None = None) -> ir.Value:
    """count_nonzero(Tensor self, int? dim=None) -> Tensor"""
    return reduction.count_nonzero(op, _is_nonzero(op, self), dim)


@register_complex(aten.index_add.default)
def index_add(op: Any, self: Operand, dim: int, index: ir.Value, source: Operand, alpha: complex | ir.Value = 1) -> Complex:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    base, more = complexes(op, self, times(op, source, alpha))
    real = put_rows(op, base.real, dim, index, more.real, "add")
    return Complex(real, put_rows(op, base.imag, dim, index, more.imag, "add"))


@register_complex(aten.var.correction)
def var(op: Any, self: Complex, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> ir.Value:
    """var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    return op.Add(*(reduction.var(op, part, dim, correction, keepdim) for part in (self.real, self.imag)))


@register_complex(aten.std.correction)
def std(op: Any, self: Complex, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> ir.Value:
    """std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    return op.Sqrt(var(op, self, dim, correction, keepdim))


@register_complex(aten.var_mean.correction)
def var_mean(op: Any, self: Complex, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Sequence[Any]:
    """var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> (Tensor, Tensor)"""
    real, imag = (reduction.var_mean(op, part, dim, correction, keepdim) for part in (self.real, self.imag))
    return op.Add(real[0], imag[0]), Complex(real[1], imag[1])


@register_complex(aten.std_mean.correction)
def std_mean(op: Any, self: Complex, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Sequence[Any]:
    """std_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> (Tensor, Tensor)"""
    variance, mean = var_mean(op, self, dim, correction, keepdim)
    return op.Sqrt(variance), mean
