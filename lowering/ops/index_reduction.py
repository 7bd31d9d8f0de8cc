"""Slices of one tensor reduced into the slices of another that an index names."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import refuse_empty
from ort_backend.lowering.constants import constant, scalar_like
from ort_backend.lowering.dtypes import to_torch
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.indexing import put_rows
from ort_backend.lowering.registry import register

aten = torch.ops.aten

_REDUCTIONS = {"prod": "mul", "mean": "add", "amax": "max", "amin": "min"}


def _neutral(reduce: str, value: ir.Value) -> float | int:
    assert value.dtype is not None
    if reduce in ("prod", "mean"):
        return 1 if reduce == "prod" else 0
    if value.dtype.is_floating_point():
        return -math.inf if reduce == "amax" else math.inf
    limits = torch.iinfo(to_torch(value.dtype))
    return limits.min if reduce == "amax" else limits.max


@register(aten.index_reduce.default)
def index_reduce(op: Any, self: ir.Value, dim: int, index: ir.Value, source: ir.Value, reduce: str, include_self: bool = True) -> ir.Value:
    """index_reduce(Tensor self, int dim, Tensor index, Tensor source, str reduce, *, bool include_self=True) -> Tensor"""
    refuse_empty("reductions", self, index, source)
    base = self
    if not include_self:
        base = typed(put_rows(op, self, dim, index, _filled(op, source, _neutral(reduce, self)), "none"), self.dtype, self.shape)
    reduced = put_rows(op, base, dim, index, source, _REDUCTIONS[reduce])
    if reduce == "mean":
        return _divided(op, reduced, self, dim, index, source, include_self)
    if reduce == "prod" or not self.dtype.is_floating_point():  # type: ignore[union-attr]
        return reduced
    return op.Where(_nan_slices(op, self, dim, index, source, include_self), scalar_like(op, math.nan, self), reduced)


def _filled(op: Any, like: ir.Value, number: float | int) -> ir.Value:
    return typed(op.Expand(scalar_like(op, number, like), op.Shape(like)), like.dtype, like.shape)


def _nan_slices(op: Any, value: ir.Value, dim: int, index: ir.Value, source: ir.Value, include_self: bool) -> ir.Value:
    """Where a NaN takes part, which ONNX Runtime's reductions overlook."""

    def nan_of(one: ir.Value) -> ir.Value:
        return typed(op.Cast(op.IsNaN(one), to=ir.DataType.FLOAT), ir.DataType.FLOAT, one.shape)

    own = nan_of(value)
    if not include_self:
        zeros = typed(op.Expand(constant(op, 0.0, ir.DataType.FLOAT), op.Shape(source)), ir.DataType.FLOAT, source.shape)
        own = typed(put_rows(op, own, dim, index, zeros, "none"), ir.DataType.FLOAT, value.shape)
    return op.Greater(put_rows(op, own, dim, index, nan_of(source), "add"), constant(op, 0.0, ir.DataType.FLOAT))


def _divided(op: Any, total: ir.Value, value: ir.Value, dim: int, index: ir.Value, source: ir.Value, include_self: bool) -> ir.Value:
    """A sum divided by how many elements it has; integers are rounded down."""
    counts, one = _filled(op, value, 1), scalar_like(op, 1, value)
    if not include_self:
        counts = typed(put_rows(op, counts, dim, index, _filled(op, source, 0), "none"), value.dtype, value.shape)
    counts = op.Max(put_rows(op, counts, dim, index, _filled(op, source, 1), "add"), one)
    if value.dtype.is_floating_point():  # type: ignore[union-attr]
        return op.Div(total, counts)
    return op.Div(op.Sub(total, op.Mod(total, counts)), counts)
