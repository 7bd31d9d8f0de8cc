"""ATen's dimension arguments (negative, missing, one or many) as axes of an ONNX value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ort_backend.lowering import symbolic
from ort_backend.lowering.constants import constant
from ort_backend.lowering.registry import Unsupported
from ort_backend.lowering.symbolic import SymbolicSize, size_of


def rank(tensor: ir.Value) -> int:
    """Number of dimensions."""
    assert tensor.shape is not None
    return tensor.shape.rank()


def axis(tensor: ir.Value, dim: int, *, extra: int = 0) -> int:
    """`dim` counted from the front, in a tensor with `extra` more dimensions than `tensor`; 0 where there are none."""
    dims = rank(tensor) + extra
    return dim % dims if dims else 0


def axes(tensor: ir.Value, dim: int | Sequence[int] | None) -> list[int]:
    """`dim` as a sorted list of axes; every axis for None and for an empty list, as ATen's reductions read them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(rank(tensor)))
    if isinstance(dim, int):
        dim = [dim]
    return sorted({axis(tensor, d) for d in dim}) if rank(tensor) else []


def may_be_zero(part: int | ir.SymbolicDim) -> bool:
    """`symbolic.may_be_zero` of a dimension; one of which only the name is known counts as no."""
    return part == 0 or (isinstance(part, SymbolicSize) and symbolic.may_be_zero(part.size))


def refuse_empty(what: str, *tensors: ir.Value) -> None:
    """Raises Unsupported where one of the tensors may have no elements."""
    parts = [part for tensor in tensors for part in tensor.shape or ()]
    if 0 in parts:
        raise Unsupported(f"{what} of zero-sized tensors")
    if any(map(may_be_zero, parts)):
        raise Unsupported(f"{what} of tensors that may be zero-sized")


def plus(op: Any, a: int | ir.Value, b: int | ir.Value) -> int | ir.Value:
    """The sum of two sizes: numbers, or int64 scalars of the graph."""
    if isinstance(b, int) and b == 0:
        return a
    return a + b if isinstance(a, int) and isinstance(b, int) else op.Add(_scalar(op, a), _scalar(op, b))


def minus(op: Any, a: int | ir.Value, b: int | ir.Value) -> int | ir.Value:
    """The difference of two sizes: numbers, or int64 scalars of the graph."""
    return a - b if isinstance(a, int) and isinstance(b, int) else op.Sub(_scalar(op, a), _scalar(op, b))


def times(op: Any, a: int | ir.Value, b: int | ir.Value) -> int | ir.Value:
    """The product of two sizes: numbers, or int64 scalars of the graph."""
    return a * b if isinstance(a, int) and isinstance(b, int) else op.Mul(_scalar(op, a), _scalar(op, b))


def _scalar(op: Any, size: int | ir.Value) -> ir.Value:
    return size if isinstance(size, ir.Value) else constant(op, size, ir.DataType.INT64)


def size(tensor: ir.Value, at: int) -> int | None:
    """The static size of one axis, None if it is dynamic."""
    assert tensor.shape is not None
    known = tensor.shape[at]
    return known if isinstance(known, int) else None


def sizes(tensor: ir.Value) -> list[int] | None:
    """The static sizes of all axes, None if one of them is dynamic."""
    assert tensor.shape is not None
    known = [part for part in tensor.shape if isinstance(part, int)]
    return known if len(known) == rank(tensor) else None


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are known to have equal sizes, dynamic ones compared by their expressions."""
    assert a.shape is not None and b.shape is not None
    if a.shape.rank() != b.shape.rank():
        return False
    return all(_known(x) is not None and _known(x) == _known(y) for x, y in zip(a.shape, b.shape))


def _known(part: int | ir.SymbolicDim) -> int | str | None:
    return part if isinstance(part, int) else part.value


def length(op: Any, tensor: ir.Value, at: int) -> int | ir.Value:
    """The size of one axis: a number, or an int64 scalar of the graph."""
    known = size(tensor, at)
    return size_of(op, tensor, at) if known is None else known


def element_count(op: Any, tensor: ir.Value) -> ir.Value:
    """The number of elements: an int64 scalar of the graph. Size would do, but for its missing kernels for 16 bits (ORT 1.19)."""
    return op.ReduceProd(op.Shape(tensor), keepdims=0)
