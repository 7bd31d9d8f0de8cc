"""New tensors: filled, and copies into the shape of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import same_shape, sizes
from ort_backend.lowering.constants import as_array, constant, int64s
from ort_backend.lowering.dtypes import to_ir
from ort_backend.lowering.registry import register
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten

Size = int | ir.Value
Number = bool | int | float | ir.Value

# ONNX Runtime fills no bfloat16 tensors.
_FILLED_AS = {ir.DataType.BFLOAT16: ir.DataType.FLOAT}


def _dtype(dtype: torch.dtype | None, value: Number) -> ir.DataType:
    """The dtype of a tensor filled with `value`, as PyTorch infers it."""
    if dtype is not None:
        return to_ir(dtype)
    if isinstance(value, ir.Value):
        return ir.DataType.INT64 if value.dtype == ir.DataType.INT64 else to_ir(torch.get_default_dtype())
    if isinstance(value, bool):
        return ir.DataType.BOOL
    return ir.DataType.INT64 if isinstance(value, int) else to_ir(torch.get_default_dtype())


def filled(op: Any, shape: ir.Value | Sequence[Size], value: Number, dtype: ir.DataType) -> ir.Value:
    """A tensor of one value. `shape`: its sizes, or a 1-d int64 value that holds them."""
    if dtype in _FILLED_AS:
        return op.Cast(filled(op, shape, value, _FILLED_AS[dtype]), to=dtype)
    if not isinstance(shape, ir.Value):
        if not shape:
            return op.Cast(value, to=dtype) if isinstance(value, ir.Value) else constant(op, value, dtype)
        shape = as_vector(op, shape)
    if isinstance(value, ir.Value):
        return op.Expand(value if value.dtype == dtype else op.Cast(value, to=dtype), shape)
    return op.ConstantOfShape(shape, value=ir.tensor(as_array(value, dtype).reshape(1), dtype=dtype))


def _filled_like(op: Any, like: ir.Value, value: Number, dtype: torch.dtype | None) -> ir.Value:
    known = sizes(like)
    assert like.dtype is not None
    wanted = like.dtype if dtype is None else to_ir(dtype)
    return filled(op, op.Shape(like) if known is None else known, value, wanted)


# -- filled with one value


@register(aten.full.default)
def full(
    op: Any,
    size: Sequence[Size],
    fill_value: Number,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> ir.Value:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(op, size, fill_value, _dtype(dtype, fill_value))


@register(aten.zeros.default)
def zeros(
    op: Any, size: Sequence[Size], dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> ir.Value:
    """zeros(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(op, size, 0.0, _dtype(dtype, 0.0))


@register(aten.ones.default)
def ones(op: Any, size: Sequence[Size], dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> ir.Value:
    """ones(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(op, size, 1.0, _dtype(dtype, 1.0))


@register(aten.empty.memory_format)
def empty(
    op: Any,
    size: Sequence[Size],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> ir.Value:
    """empty.memory_format(SymInt[] size, *, ScalarType? dtype=None, ..., MemoryFormat? memory_format=None) -> Tensor"""
    return filled(op, size, 0.0, _dtype(dtype, 0.0))


@register(aten.empty_permuted.default)
def empty_permuted(
    op: Any,
    size: Sequence[Size],
    physical_layout: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> ir.Value:
    """empty_permuted(SymInt[] size, int[] physical_layout, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(op, size, 0.0, _dtype(dtype, 0.0))


@register(aten.empty_strided.default)
def empty_strided(
    op: Any,
    size: Sequence[Size],
    stride: Sequence[Size],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> ir.Value:
    """empty_strided(SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(op, size, 0.0, _dtype(dtype, 0.0))


@register(aten.full_like.default, any_dtype=True)
def full_like(
    op: Any,
    self: ir.Value,
    fill_value: Number,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> ir.Value:
    """full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, ..., MemoryFormat? memory_format=None) -> Tensor"""
    return _filled_like(op, self, fill_value, dtype)


@register(aten.zeros_like.default, aten.empty_like.default, any_dtype=True)
def zeros_like(
    op: Any,
    self: ir.Value,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> ir.Value:
    """zeros_like(Tensor self, *, ScalarType? dtype=None, ..., MemoryFormat? memory_format=None) -> Tensor"""
    return _filled_like(op, self, 0, dtype)


@register(aten.ones_like.default, any_dtype=True)
def ones_like(
    op: Any,
    self: ir.Value,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> ir.Value:
    """ones_like(Tensor self, *, ScalarType? dtype=None, ..., MemoryFormat? memory_format=None) -> Tensor"""
    return _filled_like(op, self, 1, dtype)


@register(aten.new_full.default, any_dtype=True)
def new_full(
    op: Any,
    self: ir.Value,
    size: Sequence[Size],
    fill_value: Number,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> ir.Value:
    """new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    assert self.dtype is not None
    return filled(op, size, fill_value, self.dtype if dtype is None else to_ir(dtype))


@register(aten.new_zeros.default, aten.new_empty.default, any_dtype=True)
def new_zeros(
    op: Any,
    self: ir.Value,
    size: Sequence[Size],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> ir.Value:
    """new_zeros(Tensor self, SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return new_full(op, self, size, 0, dtype)


@register(aten._new_zeros_with_same_feature_meta.default, any_dtype=True)
def new_tangent(op: Any, self: ir.Value, other: ir.Value, self_num_batch_dims: int = 0) -> ir.Value:
    """_new_zeros_with_same_feature_meta(Tensor self, Tensor other, *, int self_num_batch_dims=0) -> Tensor

    What forward-mode differentiation copies tangents into, to have each lie in memory as `other` does.
    """
    assert self.dtype is not None
    return filled(op, op.Concat(op.Shape(self, start=0, end=self_num_batch_dims), op.Shape(other), axis=0), 0, self.dtype)


@register(aten.new_ones.default, any_dtype=True)
def new_ones(
    op: Any,
    self: ir.Value,
    size: Sequence[Size],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> ir.Value:
    """new_ones(Tensor self, SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return new_full(op, self, size, 1, dtype)


@register(aten.new_empty_strided.default, any_dtype=True)
def new_empty_strided(
    op: Any,
    self: ir.Value,
    size: Sequence[Size],
    stride: Sequence[Size],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> ir.Value:
    """new_empty_strided(Tensor self, SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, ...) -> Tensor"""
    return new_full(op, self, size, 0, dtype)


@register(aten._efficientzerotensor.default)
def efficient_zeros(
    op: Any, size: Sequence[Size], dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> ir.Value:
    """_efficientzerotensor(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(op, size, 0.0, _dtype(dtype, 0.0))


@register(aten.scalar_tensor.default)
def scalar_tensor(op: Any, s: Number, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> ir.Value:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(op, [], s, to_ir(torch.get_default_dtype() if dtype is None else dtype))


# -- written over


@register(aten.fill.Scalar, aten.fill.Tensor, any_dtype=True)
def fill(op: Any, self: ir.Value, value: Number) -> ir.Value:
    """fill.Scalar(Tensor self, Scalar value) -> Tensor"""
    return _filled_like(op, self, value, None)


@register(aten.copy.default, any_dtype=True)
def copy(op: Any, self: ir.Value, src: ir.Value, non_blocking: bool = False) -> ir.Value:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor"""
    assert self.dtype is not None and src.dtype is not None
    if src.dtype != self.dtype:
        src = op.Cast(src, to=self.dtype)
    if same_shape(self, src):
        return src
    known = sizes(self)
    shape = op.Shape(self) if known is None else int64s(op, known)
    if src.dtype in _FILLED_AS:
        return op.Expand(op.Cast(src, to=_FILLED_AS[src.dtype]), shape)
    return op.Expand(src, shape)


# -- matrices


@register(aten.eye.default)
def eye(op: Any, n: Size, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> ir.Value:
    """eye(SymInt n, *, ScalarType? dtype=None, ...) -> Tensor"""
    return eye_m(op, n, n, dtype)


@register(aten.eye.m)
def eye_m(op: Any, n: Size, m: Size, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> ir.Value:
    """eye.m(SymInt n, SymInt m, *, ScalarType? dtype=None, ...) -> Tensor"""
    shape = filled(op, [n, m], 0.0, ir.DataType.FLOAT)
    return op.EyeLike(shape, dtype=int(ir.DataType.FLOAT))


@register(aten.tril_indices.default)
def tril_indices(
    op: Any, row: int, col: int, offset: int = 0, dtype: torch.dtype = torch.int64, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> ir.Value:
    """tril_indices(int row, int col, int offset=0, *, ScalarType? dtype=long, ...) -> Tensor"""
    return constant(op, torch.tril_indices(row, col, offset).numpy(), ir.DataType.INT64)


@register(aten.triu_indices.default)
def triu_indices(
    op: Any, row: int, col: int, offset: int = 0, dtype: torch.dtype = torch.int64, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> ir.Value:
    """triu_indices(int row, int col, int offset=0, *, ScalarType? dtype=long, ...) -> Tensor"""
    return constant(op, torch.triu_indices(row, col, offset).numpy(), ir.DataType.INT64)
