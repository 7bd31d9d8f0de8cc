"""Results whose size depends on counts in the data: repetitions of elements, and how often each number occurs."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import length, refuse_empty
from ort_backend.lowering.constants import as_int64, int64s
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.creation import filled
from ort_backend.lowering.ops.running import running_sum
from ort_backend.lowering.registry import register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value


@register(aten.repeat_interleave.Tensor)
def repeat_interleave(op: Any, repeats: ir.Value, output_size: Size | None = None) -> ir.Value:
    """repeat_interleave.Tensor(Tensor repeats, *, SymInt? output_size=None) -> Tensor

    Every repetition but an element's first has the number of the one before: the running sum of where elements end.
    """
    refuse_empty("repetitions", repeats)
    ends = running_sum(op, typed(as_int64(op, repeats), ir.DataType.INT64, repeats.shape), 0)
    total = op.Slice(ends, int64s(op, [-1]), int64s(op, [2**63 - 1]), int64s(op, [0])) if output_size is None else as_vector(op, [output_size])
    marks = filled(op, op.Add(total, int64s(op, [1])), 0, ir.DataType.INT64)
    ones = filled(op, [length(op, repeats, 0)], 1, ir.DataType.INT64)
    counted = typed(op.ScatterND(marks, op.Unsqueeze(ends, int64s(op, [1])), ones, reduction="add"), ir.DataType.INT64, [None])
    return op.Slice(running_sum(op, counted, 0), int64s(op, [0]), total, int64s(op, [0]))


@register(aten.bincount.default, promote="output", keep=("self", "minlength"))
def bincount(op: Any, self: ir.Value, weights: ir.Value | None = None, minlength: Size = 0) -> ir.Value:
    """bincount(Tensor self, Tensor? weights=None, SymInt minlength=0) -> Tensor"""
    numbers = as_int64(op, self)
    last = op.Sub(as_vector(op, [minlength]), int64s(op, [1]))
    total = op.Add(op.ReduceMax(op.Concat(numbers, last, axis=0), keepdims=1), int64s(op, [1]))
    dtype = ir.DataType.INT64 if weights is None else weights.dtype
    assert dtype is not None
    added = filled(op, [length(op, self, 0)], 1, dtype) if weights is None else weights
    return op.ScatterND(filled(op, total, 0, dtype), op.Unsqueeze(numbers, int64s(op, [1])), added, reduction="add")
