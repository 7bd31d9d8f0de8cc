"""Arithmetic element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import scalar_like
from ort_backend.lowering.dtypes import to_torch
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

Number = bool | int | float | ir.Value
Operand = ir.Value | bool | int | float


def is_float(value: ir.Value) -> bool:
    """Whether `value` holds floating point numbers."""
    assert value.dtype is not None
    return value.dtype.is_floating_point()


# -- one operand

_UNARY = (
    (aten.ceil.default, "Ceil"),
    (aten.floor.default, "Floor"),
    (aten.round.default, "Round"),
)
_UNARY_TO_FLOAT = (
    (aten.acos.default, "Acos"),
    (aten.acosh.default, "Acosh"),
    (aten.asin.default, "Asin"),
    (aten.asinh.default, "Asinh"),
    (aten.atan.default, "Atan"),
    (aten.atanh.default, "Atanh"),
    (aten.cos.default, "Cos"),
    (aten.cosh.default, "Cosh"),
    (aten.erf.default, "Erf"),
    (aten.log.default, "Log"),
    (aten.reciprocal.default, "Reciprocal"),
    (aten.sin.default, "Sin"),
    (aten.sinh.default, "Sinh"),
    (aten.sqrt.default, "Sqrt"),
    (aten.tan.default, "Tan"),
)


def _unary(kind: str, *, integers_are_fixed: bool) -> Callable[..., ir.Value]:
    def lower(op: Any, self: ir.Value) -> ir.Value:
        return self if integers_are_fixed and not is_float(self) else getattr(op, kind)(self)

    lower.__doc__ = f"(Tensor self) -> Tensor, which is ONNX's {kind}"
    return lower


for _target, _kind in _UNARY:
    register(_target, promote="output")(_unary(_kind, integers_are_fixed=True))
for _target, _kind in _UNARY_TO_FLOAT:
    register(_target, promote="output")(_unary(_kind, integers_are_fixed=False))


@register(aten.exp.default, promote="output")
def exp(op: Any, self: ir.Value) -> ir.Value:
    """exp(Tensor self) -> Tensor

    ONNX Runtime's kernel of float64 falls to 5.6e-309 and no further, not for minus infinity either: what is not a normal number is 0 here.
    """
    result = op.Exp(self)
    if self.dtype != ir.DataType.DOUBLE:
        return result
    return op.Where(op.Less(self, scalar_like(op, -708.39, self)), scalar_like(op, 0.0, self), result)


@register(aten.neg.default)
def neg(op: Any, self: ir.Value) -> ir.Value:
    """neg(Tensor self) -> Tensor"""
    return op.Neg(self)


@register(aten.abs.default)
def abs_(op: Any, self: ir.Value) -> ir.Value:
    """abs(Tensor self) -> Tensor"""
    return self if self.dtype == ir.DataType.BOOL else op.Abs(self)


@register(aten.sign.default, aten.sgn.default)
def sign(op: Any, self: ir.Value) -> ir.Value:
    """sign(Tensor self) -> Tensor

    Of NaN it is 0, where ONNX's Sign leaves NaN: so is the gradient of an absolute value, as where missing labels are taken out behind a loss.
    """
    if self.dtype == ir.DataType.BOOL or not is_float(self):
        return self if self.dtype == ir.DataType.BOOL else op.Sign(self)
    zero = scalar_like(op, 0.0, self)
    return op.Sub(op.Cast(op.Greater(self, zero), to=self.dtype), op.Cast(op.Less(self, zero), to=self.dtype))


@register(aten.square.default)
def square(op: Any, self: ir.Value) -> ir.Value:
    """square(Tensor self) -> Tensor"""
    return op.Mul(self, self)


@register(aten.rsqrt.default, promote="output")
def rsqrt(op: Any, self: ir.Value) -> ir.Value:
    """rsqrt(Tensor self) -> Tensor"""
    return op.Reciprocal(op.Sqrt(self))


@register(aten.exp2.default, promote="output")
def exp2(op: Any, self: ir.Value) -> ir.Value:
    """exp2(Tensor self) -> Tensor"""
    return op.Pow(scalar_like(op, 2.0, self), self)


@register(aten.expm1.default, promote="output")
def expm1(op: Any, self: ir.Value) -> ir.Value:
    """expm1(Tensor self) -> Tensor

    tanh(x / 2) (exp(x) + 1), which keeps the digits of a small x that exp(x) - 1 loses. Rounding, and ONNX Runtime's tanh, go below -1.
    """
    half = op.Mul(self, scalar_like(op, 0.5, self))
    return op.Max(op.Mul(op.Tanh(half), op.Add(op.Exp(self), scalar_like(op, 1.0, self))), scalar_like(op, -1.0, self))


@register(aten.log1p.default, promote="output")
def log1p(op: Any, self: ir.Value) -> ir.Value:
    """log1p(Tensor self) -> Tensor

    log(u) with u = 1 + x rounded, and what the rounding lost divided by u. Far from zero nothing that matters is lost, and the
    clipping makes the correction vanish there.
    """
    one = scalar_like(op, 1.0, self)
    near = op.Clip(self, scalar_like(op, -0.75, self), one)
    rounded = op.Add(near, one)
    lost = op.Sub(near, op.Sub(rounded, one))
    return op.Add(op.Log(op.Add(self, one)), op.Div(lost, rounded))


@register(aten.log2.default, promote="output")
def log2(op: Any, self: ir.Value) -> ir.Value:
    """log2(Tensor self) -> Tensor"""
    return op.Mul(op.Log(self), scalar_like(op, 1 / math.log(2), self))


@register(aten.log10.default, promote="output")
def log10(op: Any, self: ir.Value) -> ir.Value:
    """log10(Tensor self) -> Tensor"""
    return op.Mul(op.Log(self), scalar_like(op, 1 / math.log(10), self))


@register(aten.trunc.default)
def trunc(op: Any, self: ir.Value) -> ir.Value:
    """trunc(Tensor self) -> Tensor"""
    if not is_float(self):
        return self
    zero = scalar_like(op, 0.0, self)
    return op.Add(op.Floor(op.Max(self, zero)), op.Ceil(op.Min(self, zero)))  # a quarter of the time of Where


@register(aten.frac.default)
def frac(op: Any, self: ir.Value) -> ir.Value:
    """frac(Tensor self) -> Tensor"""
    return op.Sub(self, trunc(op, self))


@register(aten.round.decimals)
def round_decimals(op: Any, self: ir.Value, decimals: int) -> ir.Value:
    """round.decimals(Tensor self, *, int decimals) -> Tensor"""
    if not is_float(self):
        raise Unsupported("rounding integers to tens")
    scale = scalar_like(op, 10.0 ** abs(decimals), self)
    if decimals >= 0:
        return op.Div(op.Round(op.Mul(self, scale)), scale)
    return op.Mul(op.Round(op.Div(self, scale)), scale)


@register(aten.nan_to_num.default, any_dtype=True)
def nan_to_num(op: Any, self: ir.Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> ir.Value:
    """nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor"""
    if not is_float(self):
        return self
    assert self.dtype is not None
    limits = torch.finfo(to_torch(self.dtype))
    if self.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        self = op.Cast(self, to=ir.DataType.FLOAT)
    # Clipping serves where the replacement is the largest finite number; otherwise that would move finite numbers too.
    low, high = (limits.min if neginf is None else -math.inf), (limits.max if posinf is None else math.inf)
    result = self if math.isinf(low) and math.isinf(high) else op.Clip(self, scalar_like(op, low, self), scalar_like(op, high, self))
    result = op.Where(op.IsNaN(self), scalar_like(op, 0.0 if nan is None else nan, self), result)
    if posinf is not None:
        result = op.Where(op.Equal(self, scalar_like(op, math.inf, self)), scalar_like(op, posinf, self), result)
    if neginf is not None:
        result = op.Where(op.Equal(self, scalar_like(op, -math.inf, self)), scalar_like(op, neginf, self), result)
    return result


# -- sums and products


def operands(op: Any, a: Operand, b: Operand) -> tuple[ir.Value, ir.Value]:
    """Both as tensors of one dtype: decompositions call operators on tensors with a number in either place."""
    if isinstance(a, ir.Value):
        return a, scalar_like(op, b, a)
    assert isinstance(b, ir.Value)
    return scalar_like(op, a, b), b


def _times(op: Any, value: ir.Value, factor: Number) -> ir.Value:
    return value if not isinstance(factor, ir.Value) and factor == 1 else op.Mul(value, scalar_like(op, factor, value))


@register(aten.add.Tensor, aten.add.Scalar, promote="output", keep=("alpha",))
def add(op: Any, self: Operand, other: Operand, alpha: Number = 1) -> ir.Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    a, b = operands(op, self, other)
    if a.dtype == ir.DataType.BOOL:
        return op.Or(a, op.And(b, scalar_like(op, alpha, b)))
    return op.Add(a, _times(op, b, alpha))


@register(aten.sub.Tensor, aten.sub.Scalar, promote="output", keep=("alpha",))
def sub(op: Any, self: Operand, other: Operand, alpha: Number = 1) -> ir.Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    a, b = operands(op, self, other)
    return op.Sub(a, _times(op, b, alpha))


@register(aten.rsub.Tensor, aten.rsub.Scalar, promote="output", keep=("alpha",))
def rsub(op: Any, self: Operand, other: Operand, alpha: Number = 1) -> ir.Value:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return sub(op, other, self, alpha)


@register(aten.mul.Tensor, aten.mul.Scalar, promote="output")
def mul(op: Any, self: Operand, other: Operand) -> ir.Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    a, b = operands(op, self, other)
    return op.And(a, b) if a.dtype == ir.DataType.BOOL else op.Mul(a, b)


@register(aten.addcmul.default, promote="output")
def addcmul(op: Any, self: ir.Value, tensor1: ir.Value, tensor2: ir.Value, value: Number = 1) -> ir.Value:
    """addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    return op.Add(self, op.Mul(_times(op, tensor1, value), tensor2))


@register(aten.addcdiv.default, promote="output")
def addcdiv(op: Any, self: ir.Value, tensor1: ir.Value, tensor2: ir.Value, value: Number = 1) -> ir.Value:
    """addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    return op.Add(self, op.Div(_times(op, tensor1, value), tensor2))


@register(aten.lerp.Scalar, promote="output", keep=("weight",))
def lerp_scalar(op: Any, self: ir.Value, end: ir.Value, weight: float | ir.Value) -> ir.Value:
    """lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor"""
    if isinstance(weight, ir.Value):
        return lerp(op, self, end, scalar_like(op, weight, self))
    way = op.Sub(end, self)
    if abs(weight) < 0.5:
        return op.Add(self, op.Mul(way, scalar_like(op, weight, way)))
    return op.Sub(end, op.Mul(way, scalar_like(op, 1 - weight, way)))


@register(aten.lerp.Tensor, promote="output")
def lerp(op: Any, self: ir.Value, end: ir.Value, weight: ir.Value) -> ir.Value:
    """lerp.Tensor(Tensor self, Tensor end, Tensor weight) -> Tensor

    From the nearer end: at a weight of 1 it is the other.
    """
    way = op.Sub(end, self)
    near = op.Less(op.Abs(weight), scalar_like(op, 0.5, weight))
    return op.Where(near, op.Add(self, op.Mul(weight, way)), op.Sub(end, op.Mul(way, op.Sub(scalar_like(op, 1.0, weight), weight))))


# -- dtypes


@register(aten._to_copy.default, any_dtype=True)
def to_copy(
    op: Any,
    self: ir.Value,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> ir.Value:
    """_to_copy(Tensor self, *, ScalarType? dtype=None, ..., bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor

    The loop over the graph casts every result to its node's dtype.
    """
    return self


@register(torch.ops.prims.convert_element_type.default, any_dtype=True)
def convert_element_type(op: Any, a: ir.Value, dtype: torch.dtype) -> ir.Value:
    """convert_element_type(Tensor a, ScalarType dtype) -> Tensor: see `to_copy`."""
    return a
