"""Special functions in float32, as polynomials. In float64 they would take three times as many terms, and stay with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import scalar_like
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

# M. Giles, "Approximating the erfinv function", GPU Computing Gems (2011), table 5: of w - 2.5 for w < 5, and of sqrt(w) - 3 beyond.
_CENTRAL = (
    *(1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06),
    *(-3.5233877e-06, 3.43273939e-07, 2.81022636e-08),
)
_TAIL = (
    *(2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844, 0.00134934322, 0.000100950558),
    *(-0.000200214257,),
)

# Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 9.8.1 to 9.8.4: of (x / 3.75)^2 for |x| < 3.75, and of 3.75 / |x| beyond.
_I0 = (1.0, 3.5156229, 3.0899424, 1.2067492, 0.2659732, 0.0360768, 0.0045813)
_I0_FAR = (0.39894228, 0.01328592, 0.00225319, -0.00157565, 0.00916281, -0.02057706, 0.02635537, -0.01647633, 0.00392377)
_I1 = (0.5, 0.87890594, 0.51498869, 0.15084934, 0.02658733, 0.00301532, 0.00032411)
_I1_FAR = (0.39894228, -0.03988024, -0.00362018, 0.00163801, -0.01031555, 0.02282967, -0.02895312, 0.01787654, -0.00420059)


def _in_float32(value: ir.Value) -> None:
    if value.dtype != ir.DataType.FLOAT:
        raise Unsupported("a special function of float64")


def _polynomial(op: Any, x: ir.Value, factors: Sequence[float]) -> ir.Value:
    """The sum of factors[i] x^i."""
    *others, last = factors
    total = scalar_like(op, last, x)
    for factor in reversed(others):
        total = op.Add(op.Mul(total, x), scalar_like(op, factor, x))
    return total


@register(aten.erf.default, requires=("com.microsoft::GeluGrad",), device="cpu", promote="output")
def erf(op: Any, self: ir.Value) -> ir.Value:
    """erf(Tensor self) -> Tensor

    The kernel of onnxruntime-training (1.19.2), which alone has operators for gradients, makes 1 or -1 of NaN.
    """
    return op.Where(op.Equal(self, self), op.Erf(self), self)


@register(aten.erfinv.default, promote="output")
def erfinv(op: Any, self: ir.Value) -> ir.Value:
    """erfinv(Tensor self) -> Tensor"""
    _in_float32(self)
    one = scalar_like(op, 1.0, self)
    w = op.Neg(op.Log(op.Mul(op.Sub(one, self), op.Add(one, self))))
    border = scalar_like(op, 5.0, self)
    central = _polynomial(op, op.Sub(w, scalar_like(op, 2.5, self)), _CENTRAL)
    tail = _polynomial(op, op.Sub(op.Sqrt(op.Max(w, border)), scalar_like(op, 3.0, self)), _TAIL)
    result = op.Mul(op.Where(op.Less(w, border), central, tail), self)
    is_end = op.Equal(op.Abs(self), one)
    return op.Where(is_end, op.Div(self, scalar_like(op, 0.0, self)), result)


def _bessel(op: Any, x: ir.Value, near: Sequence[float], far: Sequence[float], scaled: bool) -> ir.Value:
    """A Bessel function of |x|; `scaled`: times exp(-|x|)."""
    _in_float32(x)
    size, border = op.Abs(x), scalar_like(op, 3.75, x)
    is_near = op.Less(size, border)
    ratio = op.Div(op.Min(size, border), border)
    small = _polynomial(op, op.Mul(ratio, ratio), near)
    outside = op.Max(size, border)
    if scaled:
        outside = op.Min(outside, scalar_like(op, torch.finfo(torch.float32).max, x))  # ONNX Runtime's root of infinity is NaN
    large, root = _polynomial(op, op.Div(border, outside), far), op.Sqrt(outside)
    if scaled:
        return op.Where(is_near, op.Mul(small, op.Exp(op.Neg(size))), op.Div(large, root))
    half = op.Exp(op.Mul(outside, scalar_like(op, 0.5, x)))  # exp(x) alone overflows where the product does not
    return op.Where(is_near, small, op.Mul(op.Div(op.Mul(large, half), root), half))  # NaN at infinity, as in PyTorch


@register(aten.i0.default, promote="output")
def i0(op: Any, self: ir.Value) -> ir.Value:
    """i0(Tensor self) -> Tensor"""
    return _bessel(op, self, _I0, _I0_FAR, scaled=False)


@register(aten.special_i0e.default, promote="output")
def special_i0e(op: Any, self: ir.Value) -> ir.Value:
    """special_i0e(Tensor self) -> Tensor"""
    return _bessel(op, self, _I0, _I0_FAR, scaled=True)


@register(aten.special_i1.default, promote="output")
def special_i1(op: Any, self: ir.Value) -> ir.Value:
    """special_i1(Tensor self) -> Tensor"""
    return _odd(op, self, scaled=False)


@register(aten.special_i1e.default, promote="output")
def special_i1e(op: Any, self: ir.Value) -> ir.Value:
    """special_i1e(Tensor self) -> Tensor"""
    return _odd(op, self, scaled=True)


def _odd(op: Any, x: ir.Value, scaled: bool) -> ir.Value:
    """I1: of a small x it is x times the polynomial, of a large one it has x's sign."""
    border = scalar_like(op, 3.75, x)
    sided = op.Max(op.Min(x, border), op.Neg(border))
    factor = op.Where(op.Less(op.Abs(x), border), sided, op.Sign(x))
    return op.Mul(_bessel(op, x, _I1, _I1_FAR, scaled), factor)
