"""Quotients and rests, element by element."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import negated, scalar_like
from ort_backend.lowering.ops.pointwise import Operand, is_float, operands, trunc
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import is_positive

aten = torch.ops.aten


def _refuse_zero(op: Any, self: ir.Value, other: Operand) -> None:
    """To be called in front of a division: ONNX Runtime's CPU kernels of integers end the process where they divide by 0, PyTorch's raise an error.

    Raises:
        Unsupported: integers may be divided by 0.
    """
    may_be_zero = not is_positive(other) if isinstance(other, ir.Value) else other == 0
    if may_be_zero and op.builder.root.device_type == "cpu" and not is_float(self):
        raise Unsupported("integers that may be divided by 0")


@register(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, promote="output")
def div(op: Any, self: Operand, other: Operand) -> ir.Value:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    return op.Div(*operands(op, self, other))


@register(aten.div.Tensor_mode, aten.div.Scalar_mode, promote="output")
def div_mode(op: Any, self: Operand, other: Operand, rounding_mode: str | None) -> ir.Value:
    """div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"""
    if rounding_mode == "floor":
        return floor_divide(op, self, other)
    dividend, divisor = operands(op, self, other)
    _refuse_zero(op, dividend, other)
    if rounding_mode is None or is_float(dividend):
        quotient = op.Div(dividend, divisor)
        return quotient if rounding_mode is None else trunc(op, quotient)
    return _truncated(op, dividend, other)


@register(aten.floor_divide.default, aten.floor_divide.Scalar, promote="output")
def floor_divide(op: Any, self: Operand, other: Operand) -> ir.Value:
    """floor_divide(Tensor self, Tensor other) -> Tensor

    By the rest, as PyTorch computes it: floor(a / b) is off by one where a / b rounds up to an integer.
    """
    dividend, divisor = operands(op, self, other)
    _refuse_zero(op, dividend, other)
    if not is_float(dividend):
        quotient = _truncated(op, dividend, other)
        return op.Sub(quotient, op.Cast(_is_beyond(op, _rest(op, dividend, other, quotient), divisor, other), to=dividend.dtype))
    rest = op.Mod(dividend, divisor, fmod=1)
    beyond = op.Cast(_is_beyond(op, rest, divisor, other), to=dividend.dtype)
    quotient = op.Round(op.Sub(op.Div(op.Sub(dividend, rest), divisor), beyond))
    if not isinstance(other, ir.Value) and other != 0:
        return quotient
    return op.Where(op.Equal(divisor, scalar_like(op, 0.0, divisor)), op.Div(dividend, divisor), quotient)


def _truncated(op: Any, dividend: ir.Value, other: Operand) -> ir.Value:
    """Integers divided, rounded towards 0. The least one by -1 would end the process."""
    return op.Neg(dividend) if isinstance(other, int) and other == -1 else op.Div(dividend, scalar_like(op, other, dividend))


def _rest(op: Any, dividend: ir.Value, other: Operand, quotient: ir.Value) -> ir.Value:
    return op.Sub(dividend, op.Mul(quotient, scalar_like(op, other, dividend)))


def _is_beyond(op: Any, rest: ir.Value, divisor: ir.Value, other: Operand) -> ir.Value:
    """Whether a rest of a division that is rounded towards 0 has the other sign than the divisor (which is `other`, if that is a number)."""
    zero = scalar_like(op, 0, rest)
    if not isinstance(other, ir.Value):
        return op.Less(rest, zero) if other >= 0 else op.Greater(rest, zero)
    return op.And(negated(op, op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(divisor, zero)))


@register(aten.remainder.Tensor, aten.remainder.Scalar, promote="inputs")
def remainder(op: Any, self: Operand, other: Operand) -> ir.Value:
    """remainder.Tensor(Tensor self, Tensor other) -> Tensor"""
    dividend, divisor = operands(op, self, other)
    _refuse_zero(op, dividend, other)
    if not is_float(dividend):
        return op.Sub(dividend, dividend) if isinstance(other, int) and other == -1 else op.Mod(dividend, divisor)
    rest = op.Mod(dividend, divisor, fmod=1)
    return op.Where(_is_beyond(op, rest, divisor, other), op.Add(rest, divisor), rest)


@register(aten.remainder.Scalar_Tensor, promote="inputs")
def remainder_of_scalar(op: Any, self: Operand, other: ir.Value) -> ir.Value:
    """remainder.Scalar_Tensor(Scalar self, Tensor other) -> Tensor"""
    return remainder(op, self, other)


@register(aten.fmod.Tensor, aten.fmod.Scalar, promote="inputs")
def fmod(op: Any, self: Operand, other: Operand) -> ir.Value:
    """fmod.Tensor(Tensor self, Tensor other) -> Tensor

    Of integers by the quotient: ONNX Runtime's kernel takes them through float64.
    """
    dividend, divisor = operands(op, self, other)
    _refuse_zero(op, dividend, other)
    if is_float(dividend):
        return op.Mod(dividend, divisor, fmod=1)
    return _rest(op, dividend, other, _truncated(op, dividend, other))
