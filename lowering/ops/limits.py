"""Limits: clamp, minimum, maximum and their kin."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import scalar_like
from ort_backend.lowering.ops.pointwise import Number, Operand, is_float, operands
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten


@register(aten.clamp.default, promote="output")
def clamp(op: Any, self: ir.Value, min: Number | None = None, max: Number | None = None) -> ir.Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    if (isinstance(min, float) and math.isnan(min)) or (isinstance(max, float) and math.isnan(max)):
        raise Unsupported("clamp at NaN")
    # ONNX Runtime's Clip with one limit takes the largest finite number for the other.
    if min is None and max is None:
        return self
    if min is None:
        return op.Min(self, scalar_like(op, max, self))  # type: ignore[arg-type]
    if max is None:
        return op.Max(self, scalar_like(op, min, self))
    if isinstance(min, ir.Value) or isinstance(max, ir.Value):  # worked out on the host, to which ONNX Runtime takes a Clip of the graph's input
        return op.Min(op.Max(self, scalar_like(op, min, self)), scalar_like(op, max, self))
    return op.Clip(self, scalar_like(op, min, self), scalar_like(op, max, self))


@register(aten.clamp_min.default, promote="output")
def clamp_min(op: Any, self: ir.Value, min: Number) -> ir.Value:
    """clamp_min(Tensor self, Scalar min) -> Tensor"""
    return clamp(op, self, min)


@register(aten.clamp_max.default, promote="output")
def clamp_max(op: Any, self: ir.Value, max: Number) -> ir.Value:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return clamp(op, self, None, max)


@register(aten.clamp.Tensor, promote="output")
def clamp_tensor(op: Any, self: ir.Value, min: ir.Value | None = None, max: ir.Value | None = None) -> ir.Value:
    """clamp.Tensor(Tensor self, Tensor? min=None, Tensor? max=None) -> Tensor"""
    result = self if min is None else op.Max(self, min)
    return result if max is None else op.Min(result, max)


@register(aten.clamp_min.Tensor, promote="output")
def clamp_min_tensor(op: Any, self: ir.Value, min: ir.Value) -> ir.Value:
    """clamp_min.Tensor(Tensor self, Tensor min) -> Tensor"""
    return op.Max(self, min)


@register(aten.clamp_max.Tensor, promote="output")
def clamp_max_tensor(op: Any, self: ir.Value, max: ir.Value) -> ir.Value:
    """clamp_max.Tensor(Tensor self, Tensor max) -> Tensor"""
    return op.Min(self, max)


@register(aten.maximum.default, promote="output")
def maximum(op: Any, self: Operand, other: Operand) -> ir.Value:
    """maximum(Tensor self, Tensor other) -> Tensor"""
    a, b = operands(op, self, other)
    return op.Or(a, b) if a.dtype == ir.DataType.BOOL else op.Max(a, b)


@register(aten.minimum.default, promote="output")
def minimum(op: Any, self: Operand, other: Operand) -> ir.Value:
    """minimum(Tensor self, Tensor other) -> Tensor"""
    a, b = operands(op, self, other)
    return op.And(a, b) if a.dtype == ir.DataType.BOOL else op.Min(a, b)


@register(aten.fmax.default, promote="output")
def fmax(op: Any, self: ir.Value, other: ir.Value) -> ir.Value:
    """fmax(Tensor self, Tensor other) -> Tensor"""
    return maximum(op, self, other) if not is_float(self) else _without_nan(op, "Max", self, other)


@register(aten.fmin.default, promote="output")
def fmin(op: Any, self: ir.Value, other: ir.Value) -> ir.Value:
    """fmin(Tensor self, Tensor other) -> Tensor"""
    return minimum(op, self, other) if not is_float(self) else _without_nan(op, "Min", self, other)


def _without_nan(op: Any, kind: str, a: ir.Value, b: ir.Value) -> ir.Value:
    return getattr(op, kind)(op.Where(op.IsNaN(a), b, a), op.Where(op.IsNaN(b), a, b))


@register(aten.threshold.default, promote="output")
def threshold(op: Any, self: ir.Value, threshold: Number, value: Number) -> ir.Value:
    """threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor"""
    return op.Where(op.LessOrEqual(self, scalar_like(op, threshold, self)), scalar_like(op, value, self), self)
