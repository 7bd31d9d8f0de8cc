"""The same tensor, later: what keeps ONNX Runtime from computing something before a gradient is there."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.later import BEHIND
from ort_backend.lowering.registry import register

_NO_SIZES = "ort_training.no_sizes"


@register(BEHIND, any_dtype=True)
def behind(op: Any, x: ir.Value, gradient: ir.Value) -> ir.Value:
    """ort_training::behind(Tensor(a) x, Tensor gradient) -> Tensor(a): `x` in its own memory, its shape ending in none of the gradient's elements.

    That depends on data, so that no optimiser can tell the result from another tensor.
    """
    nothing = no_sizes(op, gradient)
    return op.Reshape(x, op.Concat(op.Shape(x), nothing, axis=0), allowzero=1)


def no_sizes(op: Any, tensor: ir.Value) -> ir.Value:
    """None of a tensor's elements, as sizes: what takes them waits for the tensor.

    Written once for each tensor. Of equal nodes ONNX Runtime may keep the last, and would run whatever waits for it as late as that.
    """
    written: ir.Value | None = tensor.meta.get(_NO_SIZES)
    if written is None or written.producer() is None or written.producer().graph is None:  # type: ignore[union-attr]  # rolled back
        flat = op.Reshape(tensor, int64s(op, [-1]))
        written = op.Cast(op.Gather(flat, constant(op, [], ir.DataType.INT64)), to=ir.DataType.INT64)
        tensor.meta[_NO_SIZES] = written
    return written
