"""The same tensor, later: what keeps ONNX Runtime from computing something before a gradient is there."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.later import BEHIND
from ort_backend.lowering.registry import register


@register(BEHIND, any_dtype=True)
def behind(op: Any, x: ir.Value, gradient: ir.Value) -> ir.Value:
    """ort_training::behind(Tensor(a) x, Tensor gradient) -> Tensor(a): `x` in its own memory, its shape ending in none of the gradient's elements.

    That depends on data, so that no optimiser can tell the result from another tensor.
    """
    flat = op.Reshape(gradient, int64s(op, [-1]))
    nothing = op.Cast(op.Gather(flat, constant(op, [], ir.DataType.INT64)), to=ir.DataType.INT64)
    return op.Reshape(x, op.Concat(op.Shape(x), nothing, axis=0), allowzero=1)
