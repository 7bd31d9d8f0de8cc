"""Running sums and products.

ONNX Runtime's CumSum takes a quarter of a microsecond for every step along its axis, and runs fast over what lies behind it.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.axes import length, rank, size, sizes
from ort_backend.lowering.constants import constant, int64s, scalar_like
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.registry import Unsupported
from ort_backend.lowering.symbolic import as_vector

_STEPS_UP_TO = 32  # along an axis that is not cut into blocks
_WIDE_FROM = 2048  # elements per step, over which the cost of a step does not count
_BLOCK = 128


def running_sum(op: Any, value: ir.Value, at: int) -> ir.Value:
    """The sums of the elements up to each one, itself included, along an axis. `value` has a dtype that ONNX Runtime adds in."""
    if any(part == 0 for part in value.shape):  # type: ignore[union-attr]
        return value
    order = [at, *(i for i in range(rank(value)) if i != at)]
    front = typed(op.Transpose(value, perm=order), value.dtype, [value.shape[i] for i in order]) if at else value  # type: ignore[index]
    total = _of_rows(op, front)
    if not at:
        return total
    return typed(op.Transpose(total, perm=[order.index(i) for i in range(rank(value))]), value.dtype, value.shape)


def _of_rows(op: Any, value: ir.Value) -> ir.Value:
    """Running sums along the first axis: within blocks, then those of the blocks' totals."""
    zero = constant(op, 0, ir.DataType.INT64)
    count, known = size(value, 0), sizes(value)
    if (count is not None and count <= _STEPS_UP_TO) or (known is not None and math.prod(known[1:]) >= _WIDE_FROM):
        return typed(op.CumSum(value, zero), value.dtype, value.shape)
    block = _BLOCK if count is None else 2 ** round(math.log2(count) / 2)
    width = math.prod(known[1:]) if known is not None else op.ReduceProd(op.Shape(value, start=1), keepdims=0)
    steps = length(op, value, 0)
    blocks = -(-steps // block) if isinstance(steps, int) else op.Div(op.Add(steps, int64(op, block - 1)), int64(op, block))
    missing = blocks * block - steps if isinstance(steps, int) else op.Sub(op.Mul(blocks, int64(op, block)), steps)
    rows = op.Reshape(value, as_vector(op, [steps, width]), allowzero=1)
    if not isinstance(missing, int) or missing:
        rows = op.Pad(rows, as_vector(op, [0, 0, missing, 0]))
    inside = op.CumSum(op.Transpose(op.Reshape(rows, as_vector(op, [blocks, block, width]), allowzero=1), perm=[1, 0, 2]), zero)
    before = op.CumSum(op.Gather(inside, int64(op, block - 1), axis=0), zero, exclusive=1)
    every = blocks * block if isinstance(blocks, int) else op.Mul(blocks, int64(op, block))
    together = op.Reshape(op.Transpose(op.Add(inside, before), perm=[1, 0, 2]), as_vector(op, [every, width]), allowzero=1)
    if not isinstance(missing, int) or missing:
        together = op.Slice(together, int64s(op, [0]), as_vector(op, [steps]), int64s(op, [0]))
    return typed(op.Reshape(together, op.Shape(value), allowzero=1), value.dtype, value.shape)


def running_product(op: Any, value: ir.Value, at: int) -> ir.Value:
    """The products of the elements up to each one, itself included, along an axis: by doubling, log2(n) steps over the whole tensor.

    Each step multiplies what stands at every place, the product of 1, 2, 4, ... elements up to it, with the one that ends right in front of those.

    Raises:
        Unsupported: the length of the axis is not known.
    """
    count = size(value, at)
    if count is None:
        raise Unsupported("a running product of a length that is not known")
    found, reach, where = value, 1, int64s(op, [at])
    while reach < count:
        first, end, left = (int64s(op, [number]) for number in (reach, count, count - reach))
        start = op.Slice(found, int64s(op, [0]), first, where)
        rest = op.Mul(op.Slice(found, first, end, where), op.Slice(found, int64s(op, [0]), left, where))
        found, reach = typed(op.Concat(start, rest, axis=at), value.dtype, value.shape), 2 * reach
    return found


def int64(op: Any, number: int) -> ir.Value:
    """A number as a 0-d int64 constant."""
    return constant(op, number, ir.DataType.INT64)


def gradient_of_running_product(op: Any, grad: ir.Value, value: ir.Value, output: ir.Value, at: int) -> ir.Value:
    """Of an element in front of the first zero along the axis, the sum from it on of gradients times products, divided by it; of that zero the same
    with 1 in its place, up to the next zero. All others only change products that stay 0.
    """
    if size(value, at) == 1 or any(part == 0 for part in value.shape):  # type: ignore[union-attr]
        return grad
    zero, one = scalar_like(op, 0.0, value), scalar_like(op, 1.0, value)
    is_zero = op.Equal(value, zero)
    zeros = running_sum(op, typed(op.Cast(is_zero, to=ir.DataType.INT64), ir.DataType.INT64, value.shape), at)
    in_front, first = op.Equal(zeros, int64(op, 0)), op.And(is_zero, op.Equal(zeros, int64(op, 1)))
    others = running_product(op, typed(op.Where(first, one, value), value.dtype, value.shape), at)
    up_to_next = op.LessOrEqual(zeros, int64(op, 1))
    of_elements = op.Div(_sum_from(op, op.Where(in_front, op.Mul(output, grad), zero), value, at), value)
    of_zero = _sum_from(op, op.Where(up_to_next, op.Mul(others, grad), zero), value, at)
    return op.Where(in_front, of_elements, op.Where(first, of_zero, zero))


def _sum_from(op: Any, numbers: ir.Value, like: ir.Value, at: int) -> ir.Value:
    """The sums of the elements from each one on, itself included, of numbers with the shape of `like`."""
    back = [int64s(op, [-1]), int64s(op, [-(2**63) + 1]), int64s(op, [at]), int64s(op, [-1])]
    turned = typed(op.Slice(numbers, *back), like.dtype, like.shape)
    return op.Slice(running_sum(op, turned, at), *back)
