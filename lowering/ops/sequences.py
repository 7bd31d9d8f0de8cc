"""Numbers in a row: arange, linspace."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import constant
from ort_backend.lowering.dtypes import to_ir
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import Number, as_double

aten = torch.ops.aten

Size = int | ir.Value
# torch 2.13 counts from 0 to 4 by 1 there, torch 2.15 from 0.5 to 4.9 by 1.7, as for every other dtype.
_CUTS_BEFORE_IT_COUNTS = torch.arange(0.5, 4.9, 1.7, dtype=torch.int64).numel() == 4
_CONSTANT_UP_TO = 4096  # elements; a longer sequence is computed by the session


def _sequence(op: Any, start: Number, end: Number, step: Number, dtype: torch.dtype | None) -> ir.Value:
    numbers = (start, end, step)
    if not any(isinstance(number, ir.Value) for number in numbers):
        known = torch.arange(start, end, step, dtype=dtype)  # type: ignore[arg-type]
        if known.numel() <= _CONSTANT_UP_TO or known.dtype.is_floating_point:
            return _written_out(op, known)
    if (dtype == torch.int64 and _CUTS_BEFORE_IT_COUNTS) or not any(_is_float(number) for number in numbers):
        return op.Range(*(_truncated(op, number) for number in numbers))
    return _sequence_of_fractions(op, start, end, step, dtype or torch.get_default_dtype())


def _sequence_of_fractions(op: Any, start: Number, end: Number, step: Number, dtype: torch.dtype) -> ir.Value:
    """ceil((end - start) / step) numbers, in float64 as PyTorch counts them. ONNX's Range adds the step up, and so the roundings."""
    first, last, width = (as_double(op, number) for number in (start, end, step))
    count = op.Cast(op.Ceil(op.Div(op.Sub(last, first), width)), to=ir.DataType.INT64)
    places = op.Range(constant(op, 0, ir.DataType.INT64), count, constant(op, 1, ir.DataType.INT64))
    if not dtype.is_floating_point:  # of an integer dtype, the numbers are cut off, though not those that are counted with
        return op.Add(op.Mul(places, _truncated(op, step)), _truncated(op, start))
    return op.Add(op.Mul(op.Cast(places, to=ir.DataType.DOUBLE), width), first)


def _written_out(op: Any, known: torch.Tensor) -> ir.Value:
    as_float = known.float() if known.dtype == torch.bfloat16 else known  # numpy has no bfloat16
    return constant(op, as_float.numpy(), to_ir(as_float.dtype))


def _truncated(op: Any, number: Number) -> ir.Value:
    """A number as an int64 scalar, without its fraction."""
    if isinstance(number, ir.Value):
        return op.Cast(number, to=ir.DataType.INT64) if _is_float(number) else number
    return constant(op, int(number), ir.DataType.INT64)


def _is_float(number: Number) -> bool:
    return number.dtype != ir.DataType.INT64 if isinstance(number, ir.Value) else isinstance(number, float)


@register(aten.arange.default)
def arange(op: Any, end: Number, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> ir.Value:
    """arange(Scalar end, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _sequence(op, 0, end, 1, dtype)


@register(aten.arange.start)
def arange_start(
    op: Any, start: Number, end: Number, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> ir.Value:
    """arange.start(Scalar start, Scalar end, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _sequence(op, start, end, 1, dtype)


@register(aten.arange.start_step)
def arange_start_step(
    op: Any,
    start: Number,
    end: Number,
    step: Number = 1,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> ir.Value:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _sequence(op, start, end, step, dtype)


@register(torch.ops.prims.iota.default)
def iota(op: Any, length: Size, start: Size, step: Size, dtype: torch.dtype, device: Any, requires_grad: bool) -> ir.Value:
    """iota(SymInt length, *, SymInt start, SymInt step, ScalarType dtype, Device device, bool requires_grad) -> Tensor"""
    if not isinstance(length, ir.Value) and not isinstance(start, ir.Value) and not isinstance(step, ir.Value):
        return _sequence(op, start, start + length * step, step, dtype)
    end = op.Add(start, op.Mul(length, step) if step != 1 else length)
    return op.Range(*(n if isinstance(n, ir.Value) else constant(op, n, ir.DataType.INT64) for n in (start, end, step)))


@register(aten.linspace.default)
def linspace(
    op: Any,
    start: Number,
    end: Number,
    steps: Size,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> ir.Value:
    """linspace(Scalar start, Scalar end, int steps, *, ScalarType? dtype=None, ...) -> Tensor"""
    if any(isinstance(number, ir.Value) for number in (start, end, steps)):
        raise Unsupported("linspace of dynamic length or bounds")
    return _written_out(op, torch.linspace(start, end, steps, dtype=dtype))  # type: ignore[arg-type]
