"""Constants of the ONNX graph: one initializer per value and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_backend.lowering.registry import Unsupported

Scalar = bool | int | float
_NAMED_UP_TO = 16  # elements; longer constants are not worth comparing


def as_array(values: Scalar | Sequence[Any] | np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """`values` in a real `dtype`. Integers that wrap around in an unsigned or narrow one (-1 as uint8) do so here as they do in PyTorch.

    Raises:
        Unsupported: A complex number: PyTorch's kernel says what is wrong with it.
    """
    array = np.asarray(values)
    if np.iscomplexobj(array):
        raise Unsupported("a complex number in a real tensor")
    if dtype == ir.DataType.BFLOAT16:
        array = array.astype(np.float32)
    return array.astype(dtype.numpy())


def constant(op: Any, values: Scalar | Sequence[Any] | np.ndarray, dtype: ir.DataType) -> ir.Value:
    """A constant tensor (0-d for a number) of the graph that `op` writes to, of `as_array(values, dtype)`; equal small constants are shared."""
    array = as_array(values, dtype)
    initializers = op.builder.root.graph.initializers
    if array.size <= _NAMED_UP_TO:
        name = f"{dtype.short_name()}{list(array.shape)}{array.tolist()}".replace(" ", "")
        if name in initializers:
            return initializers[name]
    else:
        name = f"{dtype.short_name()}_{len(initializers)}"
    return op.builder.root.initializer(ir.tensor(array, dtype=dtype, name=name), name=name, qualify=False)


def named_constant(op: Any, name: str, values: np.ndarray, dtype: ir.DataType) -> ir.Value:
    """A constant that is the same wherever it is asked for by this name in this dtype."""
    name = f"{dtype.short_name()} {name}".replace(" ", "_")
    initializers = op.builder.root.graph.initializers
    if name in initializers:
        return initializers[name]
    array = np.ascontiguousarray(values.astype(dtype.numpy()))
    return op.builder.root.initializer(ir.tensor(array, dtype=dtype, name=name), name=name, qualify=False)


def int64s(op: Any, values: Sequence[int]) -> ir.Value:
    """A 1-d int64 constant, the form in which ONNX takes shapes, axes and the like."""
    return constant(op, np.array(values, dtype=np.int64), ir.DataType.INT64)


def as_int64(op: Any, value: ir.Value) -> ir.Value:
    """`value` as int64, the form in which ONNX takes indices."""
    return value if value.dtype == ir.DataType.INT64 else op.Cast(value, to=ir.DataType.INT64)


_NARROW = {
    ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.FLOAT16, ir.DataType.BFLOAT16,
}  # fmt: skip


def as_bool(op: Any, value: ir.Value) -> ir.Value:
    """Whether elements of `value` are not 0.

    Of two Casts in a row to bool ONNX Runtime makes one, so that what the first one made 0, by wrapping or rounding, would be true (1.19.2).
    """
    assert value.dtype is not None
    if value.dtype == ir.DataType.BOOL:
        return value
    if value.dtype not in _NARROW:
        return op.Cast(value, to=ir.DataType.BOOL)
    wide = op.Cast(value, to=ir.DataType.FLOAT if value.dtype.is_floating_point() else ir.DataType.INT32)
    return negated(op, op.Equal(wide, scalar_like(op, 0, wide)))


def negated(op: Any, value: ir.Value) -> ir.Value:
    """Where a bool is false, as a comparison: ONNX Runtime's Not takes one element after the other, 17 times as long for a million (1.19.2)."""
    return op.Equal(value, constant(op, False, ir.DataType.BOOL))


def scalar_like(op: Any, number: Scalar | ir.Value, tensor: ir.Value) -> ir.Value:
    """A number, or a symbolic one, as a 0-d tensor of `tensor`'s dtype."""
    assert tensor.dtype is not None
    if isinstance(number, ir.Value):
        return number if number.dtype == tensor.dtype else op.Cast(number, to=tensor.dtype)
    return constant(op, number, tensor.dtype)
