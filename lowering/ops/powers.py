"""Powers, and functions of two operands element by element."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import negated, scalar_like
from ort_backend.lowering.dtypes import to_torch
from ort_backend.lowering.ops.pointwise import Number, Operand, is_float
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten


@register(aten.pow.Tensor_Scalar, promote="output")
def pow_scalar(op: Any, self: ir.Value, exponent: Number) -> ir.Value:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    if isinstance(exponent, ir.Value):
        return pow_(op, self, exponent)
    if exponent == 1:
        return self
    if is_float(self):
        if exponent == 2:
            return op.Mul(self, self)
        if exponent == 3:
            return op.Mul(op.Mul(self, self), self)
        if exponent == 0.5:
            return op.Sqrt(self)
        if exponent == -0.5:
            return op.Reciprocal(op.Sqrt(self))
        if exponent == -1:
            return op.Reciprocal(self)
        if exponent == -2:
            return op.Reciprocal(op.Mul(self, self))
        return op.Pow(self, scalar_like(op, exponent, self))
    if self.dtype == ir.DataType.BOOL or exponent < 0:
        raise Unsupported(f"{self.dtype} to the power of {exponent}")
    return _integer_power(op, self, int(exponent))


def _integer_power(op: Any, base: ir.Value, exponent: int) -> ir.Value:
    """By squaring: ONNX Runtime's Pow rounds large integers to float64."""
    result = None
    while exponent:
        if exponent & 1:
            result = base if result is None else op.Mul(result, base)
        exponent >>= 1
        if exponent:
            base = op.Mul(base, base)
    return result if result is not None else op.Add(op.Sub(base, base), scalar_like(op, 1, base))


@register(aten.pow.Tensor_Tensor, promote="output")
def pow_(op: Any, self: ir.Value, exponent: ir.Value) -> ir.Value:
    """pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor"""
    if not is_float(self):
        raise Unsupported("ONNX Runtime's Pow rounds large integers to float64")
    return op.Pow(self, exponent)


@register(aten.pow.Scalar, promote="output")
def pow_of_scalar(op: Any, self: Number, exponent: ir.Value) -> ir.Value:
    """pow.Scalar(Scalar self, Tensor exponent) -> Tensor"""
    return pow_(op, scalar_like(op, self, exponent), exponent)


@register(aten.ldexp.Tensor, promote="output")
def ldexp(op: Any, self: ir.Value, other: ir.Value) -> ir.Value:
    """ldexp.Tensor(Tensor self, Tensor other) -> Tensor"""
    return op.Mul(self, op.Pow(scalar_like(op, 2.0, self), other))


@register(aten.copysign.Tensor, aten.copysign.Scalar, promote="output")
def copysign(op: Any, self: ir.Value, other: Operand) -> ir.Value:
    """copysign.Tensor(Tensor self, Tensor other) -> Tensor"""
    size = op.Abs(self)
    return op.Where(_signbit(op, scalar_like(op, other, self)), op.Neg(size), size)


@register(aten.signbit.default)
def signbit(op: Any, self: ir.Value) -> ir.Value:
    """signbit(Tensor self) -> Tensor"""
    if self.dtype == ir.DataType.BOOL:
        return op.And(self, negated(op, self))
    return _signbit(op, self) if is_float(self) else op.Less(self, scalar_like(op, 0, self))


def _signbit(op: Any, value: ir.Value) -> ir.Value:
    """Whether a number is negative; minus zero is. (Of NaN's sign nothing is said.)"""
    zero = scalar_like(op, 0.0, value)
    return op.Less(op.Where(op.Equal(value, zero), op.Reciprocal(value), value), zero)


@register(aten.hypot.default, promote="output")
def hypot(op: Any, self: ir.Value, other: ir.Value) -> ir.Value:
    """hypot(Tensor self, Tensor other) -> Tensor"""
    a, b = op.Abs(self), op.Abs(other)
    # Dividing by the larger one keeps its square from overflowing.
    longer, shorter = op.Max(a, b), op.Min(a, b)
    tiny = scalar_like(op, torch.finfo(torch.float32).tiny, longer)
    largest = scalar_like(op, torch.finfo(to_torch(longer.dtype)).max, longer)
    ratio = op.Div(op.Min(shorter, largest), op.Max(longer, tiny))
    return op.Mul(longer, op.Sqrt(op.Add(op.Mul(ratio, ratio), scalar_like(op, 1.0, ratio))))


@register(aten.logaddexp.default, promote="output")
def logaddexp(op: Any, self: ir.Value, other: ir.Value) -> ir.Value:
    """logaddexp(Tensor self, Tensor other) -> Tensor"""
    zero = scalar_like(op, 0.0, self)
    distance = op.Where(op.Equal(self, other), zero, op.Sub(self, other))  # inf - inf
    return op.Add(op.Max(self, other), op.Softplus(op.Neg(op.Abs(distance))))


@register(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, promote="output")
def xlogy(op: Any, self: ir.Value, other: Operand) -> ir.Value:
    """xlogy.Tensor(Tensor self, Tensor other) -> Tensor"""
    other = scalar_like(op, other, self)
    zero = scalar_like(op, 0.0, self)
    absent = op.And(op.Equal(self, zero), negated(op, op.IsNaN(other)))
    return op.Where(absent, zero, op.Mul(self, op.Log(other)))


@register(aten.xlogy.Scalar_Self, promote="output")
def xlogy_of_scalar(op: Any, self: Operand, other: ir.Value) -> ir.Value:
    """xlogy.Scalar_Self(Scalar self, Tensor other) -> Tensor"""
    return xlogy(op, scalar_like(op, self, other), other)


@register(aten.atan2.default, promote="output")
def atan2(op: Any, self: ir.Value, other: ir.Value) -> ir.Value:
    """atan2(Tensor self, Tensor other) -> Tensor

    The half plane x < 0 is turned by pi, to the side that y points to (also where y is a zero with a sign). Infinities on both sides count as 1.
    """
    zero, one = scalar_like(op, 0.0, self), scalar_like(op, 1.0, self)
    y, x = self, other
    below, left = _signbit(op, y), _signbit(op, x)
    turn = op.Where(below, scalar_like(op, -math.pi, y), scalar_like(op, math.pi, y))
    both_zero = op.And(op.Equal(y, zero), op.Equal(x, zero))
    both_infinite = op.And(op.IsInf(y), op.IsInf(x))
    over_1 = op.Where(left, op.Neg(y), y)
    angle = op.Atan(op.Where(both_zero, over_1, op.Where(both_infinite, op.Clip(over_1, op.Neg(one), one), op.Div(y, x))))
    return op.Where(left, op.Add(angle, turn), angle)
