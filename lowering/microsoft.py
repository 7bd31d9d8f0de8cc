"""Nodes of the `com.microsoft` domain, with the result types that a builder without their schemas cannot infer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

MS = "com.microsoft"


def microsoft(op: Any, op_type: str, *inputs: ir.Value | None, like: ir.Value | Sequence[ir.Value | None], **attributes: Any) -> Any:
    """Writes one node.

    Args:
        op: The builder.
        op_type: Name of the operator.
        inputs: Its inputs, None for one that is left out.
        like: For each result a value of its dtype and shape, None for a result that is not computed. One value: one result.
        attributes: Its attributes.

    Returns:
        One value, or a list of them (None for a result that is not computed) where `like` is a sequence.
    """
    likes = [like] if isinstance(like, ir.Value) else list(like)
    while likes[-1] is None:
        likes.pop()
    outputs = [ir.Value(name=None if one is not None else "") for one in likes]
    op.builder.call_op(op_type, inputs, attributes, domain=MS, version=1, outputs=outputs)
    for value, one in zip(outputs, likes):
        if one is not None:
            typed(value, one.dtype, one.shape)
    if isinstance(like, ir.Value):
        return outputs[0]
    return [None if one is None else value for value, one in zip(outputs, likes)] + [None] * (len(like) - len(likes))


def typed(value: ir.Value, dtype: ir.DataType | None, shape: ir.Shape | Sequence[int | ir.SymbolicDim | str | None] | None) -> ir.Value:
    """`value` with a dtype and, where known, a shape."""
    assert dtype is not None
    value.type = ir.TensorType(dtype)
    value.shape = None if shape is None else ir.Shape(list(shape))
    return value
