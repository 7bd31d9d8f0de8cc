"""Places in a sorted sequence."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import rank
from ort_backend.lowering.constants import Scalar, int64s, negated, scalar_like
from ort_backend.lowering.registry import register

aten = torch.ops.aten


@register(aten.bucketize.Tensor, promote="inputs", keep=("out_int32", "right"))
def bucketize(op: Any, self: ir.Value, boundaries: ir.Value, out_int32: bool = False, right: bool = False) -> ir.Value:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"""
    return _count_before(op, boundaries, self, right)


@register(aten.searchsorted.Tensor, promote="inputs", keep=("out_int32", "right", "side", "sorter"))
def searchsorted(
    op: Any,
    sorted_sequence: ir.Value,
    self: ir.Value,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: ir.Value | None = None,
) -> ir.Value:
    """searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, bool right=False, str? side=None, Tensor? sorter=None)
    -> Tensor
    """
    if sorter is not None:
        sorted_sequence = op.GatherElements(sorted_sequence, sorter, axis=-1)
    if rank(sorted_sequence) > 1:
        sorted_sequence = op.Unsqueeze(sorted_sequence, int64s(op, [-2]))
    return _count_before(op, sorted_sequence, self, right if side is None else side == "right")


@register(aten.searchsorted.Scalar, promote="inputs", keep=("out_int32", "right", "side", "sorter"))
def searchsorted_scalar(
    op: Any,
    sorted_sequence: ir.Value,
    self: Scalar | ir.Value,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: ir.Value | None = None,
) -> ir.Value:
    """searchsorted.Scalar(Tensor sorted_sequence, Scalar self, *, bool out_int32=False, bool right=False, str? side=None, Tensor? sorter=None)
    -> Tensor
    """
    return searchsorted(op, sorted_sequence, scalar_like(op, self, sorted_sequence), out_int32, right, side, sorter)


def _count_before(op: Any, boundaries: ir.Value, values: ir.Value, right: bool) -> ir.Value:
    """For each value, how many of the boundaries come before it; of one that equals it: `right`."""
    ahead = op.Unsqueeze(values, int64s(op, [rank(values)]))
    behind = op.Greater(boundaries, ahead) if right else op.GreaterOrEqual(boundaries, ahead)
    before = op.Cast(negated(op, behind), to=ir.DataType.INT64)  # NaN comes last: nothing is behind it
    return op.ReduceSum(before, int64s(op, [rank(values)]), keepdims=0)
