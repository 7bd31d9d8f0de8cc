"""Comparisons, logic, bits, and choices by a mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import as_bool, constant, negated, scalar_like
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

Operand = ir.Value | bool | int | float

_COMPARISONS = (
    (aten.eq.Tensor, aten.eq.Scalar, "Equal"),
    (aten.lt.Tensor, aten.lt.Scalar, "Less"),
    (aten.le.Tensor, aten.le.Scalar, "LessOrEqual"),
    (aten.gt.Tensor, aten.gt.Scalar, "Greater"),
    (aten.ge.Tensor, aten.ge.Scalar, "GreaterOrEqual"),
)


def _comparison(kind: str) -> Callable[..., ir.Value]:
    def lower(op: Any, self: Operand, other: Operand) -> ir.Value:
        return getattr(op, kind)(*_operands(op, self, other))

    lower.__doc__ = f"(Tensor self, Tensor or Scalar other) -> Tensor, which is ONNX's {kind}"
    return lower


def _operands(op: Any, a: Operand, b: Operand) -> tuple[ir.Value, ir.Value]:
    if isinstance(a, ir.Value):
        return a, scalar_like(op, b, a)
    assert isinstance(b, ir.Value)
    return scalar_like(op, a, b), b


for _tensor, _scalar, _kind in _COMPARISONS:
    register(_tensor, _scalar, promote="inputs")(_comparison(_kind))


@register(aten.ne.Tensor, aten.ne.Scalar, promote="inputs")
def ne(op: Any, self: Operand, other: Operand) -> ir.Value:
    """ne.Tensor(Tensor self, Tensor other) -> Tensor"""
    return negated(op, op.Equal(*_operands(op, self, other)))


@register(aten.isnan.default)
def isnan(op: Any, self: ir.Value) -> ir.Value:
    """isnan(Tensor self) -> Tensor"""
    assert self.dtype is not None
    return op.IsNaN(self) if self.dtype.is_floating_point() else negated(op, op.Equal(self, self))


@register(aten.isinf.default)
def isinf(op: Any, self: ir.Value) -> ir.Value:
    """isinf(Tensor self) -> Tensor"""
    assert self.dtype is not None
    return op.IsInf(self) if self.dtype.is_floating_point() else negated(op, op.Equal(self, self))


@register(aten.isfinite.default)
def isfinite(op: Any, self: ir.Value) -> ir.Value:
    """isfinite(Tensor self) -> Tensor"""
    assert self.dtype is not None
    if not self.dtype.is_floating_point():
        return op.Equal(self, self)
    return op.Less(op.Abs(self), scalar_like(op, math.inf, self))


# -- logic

_LOGIC = (
    (aten.logical_and.default, "And"),
    (aten.logical_or.default, "Or"),
    (aten.logical_xor.default, "Xor"),
)
_BITS = (
    (aten.bitwise_and, "And"),
    (aten.bitwise_or, "Or"),
    (aten.bitwise_xor, "Xor"),
)


def _logic(kind: str) -> Callable[..., ir.Value]:
    def lower(op: Any, self: ir.Value, other: ir.Value) -> ir.Value:
        return getattr(op, kind)(self, other)

    lower.__doc__ = f"(Tensor self, Tensor other) -> Tensor, which is ONNX's {kind}"
    return lower


def _bits(kind: str) -> Callable[..., ir.Value]:
    def lower(op: Any, self: ir.Value, other: Operand) -> ir.Value:
        function = getattr(op, kind if self.dtype == ir.DataType.BOOL else f"Bitwise{kind}")
        return function(self, scalar_like(op, other, self))

    lower.__doc__ = f"(Tensor self, Tensor or Scalar other) -> Tensor, which is ONNX's {kind} or Bitwise{kind}"
    return lower


for _target, _kind in _LOGIC:
    register(_target, promote="bool")(_logic(_kind))
for _packet, _kind in _BITS:
    register(_packet.Tensor, _packet.Scalar, promote="output")(_bits(_kind))


@register(aten.logical_not.default, promote="bool")
def logical_not(op: Any, self: ir.Value) -> ir.Value:
    """logical_not(Tensor self) -> Tensor"""
    return negated(op, self)


@register(aten.bitwise_not.default)
def bitwise_not(op: Any, self: ir.Value) -> ir.Value:
    """bitwise_not(Tensor self) -> Tensor"""
    return negated(op, self) if self.dtype == ir.DataType.BOOL else op.BitwiseNot(self)


# -- choices


def where_(op: Any, condition: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
    """ONNX's Where, also for bool, for which ONNX Runtime's has no kernel."""
    if condition.dtype != ir.DataType.BOOL:
        condition = as_bool(op, condition)
    if yes.dtype == ir.DataType.BOOL:
        return op.Or(op.And(condition, yes), op.And(negated(op, condition), no))
    return op.Where(condition, yes, no)


@register(aten.where.self, aten.where.ScalarOther, promote="output", keep=("condition",))
def where(op: Any, condition: ir.Value, self: Operand, other: Operand) -> ir.Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    return where_(op, condition, *_operands(op, self, other))


@register(aten.where.ScalarSelf, promote="output", keep=("condition",))
def where_scalar_self(op: Any, condition: ir.Value, self: Operand, other: ir.Value) -> ir.Value:
    """where.ScalarSelf(Tensor condition, Scalar self, Tensor other) -> Tensor"""
    return where_(op, condition, scalar_like(op, self, other), other)


@register(aten.where.Scalar, promote="output", keep=("condition",))
def where_scalars(op: Any, condition: ir.Value, self: Operand, other: Operand) -> ir.Value:
    """where.Scalar(Tensor condition, Scalar self, Scalar other) -> Tensor"""
    kinds = {type(part) for part in (self, other) if not isinstance(part, ir.Value)}
    dtype = ir.DataType.BOOL if kinds == {bool} else ir.DataType.INT64 if kinds <= {bool, int} else ir.DataType.FLOAT
    if torch.get_default_dtype() != torch.float32 and dtype == ir.DataType.FLOAT:
        raise Unsupported(f"default dtype {torch.get_default_dtype()}")
    yes, no = (part if isinstance(part, ir.Value) else constant(op, part, dtype) for part in (self, other))
    return where_(op, condition, yes, no)


@register(aten.masked_fill.Scalar, aten.masked_fill.Tensor, promote="output", keep=("mask",))
def masked_fill(op: Any, self: ir.Value, mask: ir.Value, value: Operand) -> ir.Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    return where_(op, mask, scalar_like(op, value, self), self)
