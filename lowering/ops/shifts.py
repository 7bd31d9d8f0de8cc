"""Bits moved to the left and to the right: ONNX's BitShift knows unsigned integers only, so that powers of two multiply and divide."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import constant, scalar_like
from ort_backend.lowering.ops.pointwise import is_float
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

Operand = ir.Value | int | float


def _operands(op: Any, a: Operand, b: Operand) -> tuple[ir.Value, ir.Value]:
    like = a if isinstance(a, ir.Value) else b
    assert isinstance(like, ir.Value)
    if is_float(like):
        raise Unsupported("bits of floating point numbers")
    return scalar_like(op, a, like), scalar_like(op, b, like)


def _bits(value: ir.Value) -> int:
    """Bits of the integers that are computed with: results of narrower ones are cut off."""
    return 32 if value.dtype == ir.DataType.INT32 else 64


def _powers(op: Any, value: ir.Value, count: ir.Value, last: int) -> tuple[ir.Value, ir.Value]:
    """Two to the power of each count up to `last`, and whether the count is among these."""
    zero, end = scalar_like(op, 0, count), scalar_like(op, last, count)
    fits = op.And(op.GreaterOrEqual(count, zero), op.LessOrEqual(count, end))
    wrapped = [2**i if i < _bits(value) - 1 else -(2**i) for i in range(last + 1)]
    assert value.dtype is not None
    return op.Gather(constant(op, wrapped, value.dtype), op.Where(fits, count, zero), axis=0), fits


@register(
    *(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor),
    *(aten.__lshift__.Tensor, aten.__lshift__.Scalar),
    promote="output",
)
def left_shift(op: Any, self: Operand, other: Operand) -> ir.Value:
    """bitwise_left_shift.Tensor(Tensor self, Tensor other) -> Tensor"""
    value, count = _operands(op, self, other)
    power, fits = _powers(op, value, count, _bits(value) - 1)
    return op.Where(fits, op.Mul(value, power), scalar_like(op, 0, value))


@register(
    *(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor),
    *(aten.__rshift__.Tensor, aten.__rshift__.Scalar),
    promote="output",
)
def right_shift(op: Any, self: Operand, other: Operand) -> ir.Value:
    """bitwise_right_shift.Tensor(Tensor self, Tensor other) -> Tensor

    Rounded down; moved by as many bits as there are or more, nothing but the sign is left.
    """
    value, count = _operands(op, self, other)
    power, fits = _powers(op, value, count, _bits(value) - 2)
    below = op.Less(value, scalar_like(op, 0, value))
    sign = op.Neg(op.Cast(below, to=value.dtype))
    return op.Where(fits, op.Div(op.Sub(value, op.Mod(value, power)), power), sign)
