"""Padding with a constant, by reflection and by replication, and the gradients of the latter two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import length, minus, rank
from ort_backend.lowering.constants import Scalar, constant, int64s, scalar_like
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import as_vector, may_be_negative

aten = torch.ops.aten

Size = int | ir.Value


def _pads(value: ir.Value, pad: Sequence[Size]) -> list[Size]:
    """ATen's (before, after) pairs from the last dimension on, as ONNX's befores and afters."""
    ranks = rank(value)
    before: list[Size] = [0] * ranks
    after: list[Size] = [0] * ranks
    for i in range(len(pad) // 2):
        before[ranks - 1 - i], after[ranks - 1 - i] = pad[2 * i], pad[2 * i + 1]
    return before + after


def _nothing(pad: Sequence[Size]) -> bool:
    return all(not isinstance(part, ir.Value) and part == 0 for part in pad)


@register(aten.constant_pad_nd.default)
def constant_pad_nd(op: Any, self: ir.Value, pad: Sequence[Size], value: Scalar | ir.Value = 0) -> ir.Value:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    pad, cuts = _parted(op, pad)
    self = _without(op, self, cuts)
    if _nothing(pad):
        return self
    if self.dtype in _WITHOUT_PAD and all(not isinstance(part, ir.Value) for part in pad):
        return _joined(op, self, pad, scalar_like(op, value, self))
    pads = as_vector(op, _pads(self, pad))
    return op.Pad(self, pads) if not isinstance(value, ir.Value) and value == 0 else op.Pad(self, pads, scalar_like(op, value, self))


# The CUDA provider has no Pad for them (1.19.2).
_WITHOUT_PAD = {
    ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8, ir.DataType.BFLOAT16,
}  # fmt: skip


def _joined(op: Any, value: ir.Value, pad: Sequence[Size], fill: ir.Value) -> ir.Value:
    """Padding as a concatenation with blocks of `fill`, axis by axis."""
    sizes = [length(op, value, at) for at in range(rank(value))]
    joined = value
    for i in range(len(pad) // 2):
        at, added = len(sizes) - 1 - i, [int(part) for part in pad[2 * i : 2 * i + 2]]  # type: ignore[arg-type]
        if any(added):
            before, after = (op.Expand(fill, as_vector(op, [*sizes[:at], count, *sizes[at + 1 :]])) if count else None for count in added)
            joined = op.Concat(*(part for part in (before, joined, after) if part is not None), axis=at)
            sizes[at] = minus(op, sizes[at], -sum(added))
    return joined


@register(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(op: Any, self: ir.Value, padding: Sequence[Size]) -> ir.Value:
    """reflection_pad1d(Tensor self, SymInt[2] padding) -> Tensor"""
    return _extended(op, self, padding, "reflect")


@register(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(op: Any, self: ir.Value, padding: Sequence[Size]) -> ir.Value:
    """replication_pad1d(Tensor self, SymInt[2] padding) -> Tensor"""
    return _extended(op, self, padding, "edge")


def _extended(op: Any, value: ir.Value, padding: Sequence[Size], mode: str) -> ir.Value:
    added, cuts = _parted(op, padding)
    extended = value if _nothing(added) else op.Pad(value, as_vector(op, _pads(value, added)), mode=mode)
    return _without(op, extended, cuts)  # what is cut off is cut off of the extended tensor


def _parted(op: Any, padding: Sequence[Size]) -> tuple[list[Size], list[Size]]:
    """What padding adds, and what it cuts off where it is negative, or may be; neither is negative.

    ONNX Runtime's Pad takes negative numbers, but writes past its output where one side of an axis is cut and another side extended (1.19.2).
    """
    added: list[Size] = []
    cut: list[Size] = []
    for part in padding:
        if isinstance(part, int):
            added.append(max(part, 0))
            cut.append(max(-part, 0))
        elif may_be_negative(part):
            zero = constant(op, 0, ir.DataType.INT64)
            added.append(op.Max(part, zero))
            cut.append(op.Max(op.Neg(part), zero))
        else:
            added.append(part)
            cut.append(0)
    return added, cut


def _without(op: Any, value: ir.Value, cuts: Sequence[Size]) -> ir.Value:
    """`value` without so many elements at the (front, back) of its axes, from the last one on."""
    axes = [rank(value) - 1 - i for i in range(len(cuts) // 2)]
    chosen = [(at, first, last) for at, first, last in zip(axes, cuts[::2], cuts[1::2]) if not _nothing([first, last])]
    if not chosen:
        return value
    starts, ends = [first for _, first, _ in chosen], [_before_last(op, value, at, last) for at, _, last in chosen]
    return op.Slice(value, as_vector(op, starts), as_vector(op, ends), int64s(op, [at for at, _, _ in chosen]))


def _before_last(op: Any, value: ir.Value, at: int, last: Size) -> Size:
    """The end of a slice that leaves out the last elements."""
    if isinstance(last, int):
        return -last if last else _END
    return minus(op, length(op, value, at), last)


_END = 2**63 - 1


# -- gradients: along each axis, the gradient of what was copied goes back to where it was copied from


@register(aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default)
def reflection_pad_backward(op: Any, grad_output: ir.Value, self: ir.Value, padding: Sequence[Size]) -> ir.Value:
    """reflection_pad1d_backward(Tensor grad_output, Tensor self, SymInt[2] padding) -> Tensor"""
    grad_output = _uncut(op, grad_output, padding)
    for at, before, after, total in _padded_axes(op, self, padding):
        parts = [_cut(op, grad_output, at, before, -after)]
        if before:
            parts.append(_pad(op, _reversed(op, grad_output, at, before - 1, -1), self, at, 1, minus(op, total, before + 1)))
        if after:
            parts.append(_pad(op, _reversed(op, grad_output, at, -1, -1 - after), self, at, minus(op, total, after + 1), 1))
        grad_output = _sum(op, parts)
    return grad_output


@register(aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default)
def replication_pad_backward(op: Any, grad_output: ir.Value, self: ir.Value, padding: Sequence[Size]) -> ir.Value:
    """replication_pad1d_backward(Tensor grad_output, Tensor self, SymInt[2] padding) -> Tensor"""
    grad_output = _uncut(op, grad_output, padding)
    for at, before, after, total in _padded_axes(op, self, padding):
        parts = [_cut(op, grad_output, at, before, -after)]
        where = int64s(op, [at])
        if before:
            parts.append(_pad(op, op.ReduceSum(_cut(op, grad_output, at, 0, before), where), self, at, 0, minus(op, total, 1)))
        if after:
            parts.append(_pad(op, op.ReduceSum(_cut(op, grad_output, at, -after, 0), where), self, at, minus(op, total, 1), 0))
        grad_output = _sum(op, parts)
    return grad_output


def _uncut(op: Any, grad_output: ir.Value, padding: Sequence[Size]) -> ir.Value:
    """Zeros where a negative padding has cut something off."""
    missing = [0 if isinstance(part, ir.Value) else max(-part, 0) for part in padding]
    return grad_output if _nothing(missing) else op.Pad(grad_output, as_vector(op, _pads(grad_output, missing)))


def _padded_axes(op: Any, value: ir.Value, padding: Sequence[Size]) -> list[tuple[int, int, int, Size]]:
    """Each padded axis: its number, what was put before and after it, its own size."""
    found = []
    for i in range(len(padding) // 2):
        before, after = padding[2 * i : 2 * i + 2]
        if isinstance(before, ir.Value) or isinstance(after, ir.Value):
            raise Unsupported("the gradient of a padding of dynamic size")
        if max(before, after) > 0:
            at = rank(value) - 1 - i
            found.append((at, max(before, 0), max(after, 0), length(op, value, at)))
    return found


def _cut(op: Any, value: ir.Value, at: int, start: int, end: int) -> ir.Value:
    """The elements from `start` to before `end`, which is counted from the back if negative, and the axis' own end if zero."""
    return op.Slice(value, int64s(op, [start]), int64s(op, [end or _END]), int64s(op, [at]))


def _reversed(op: Any, value: ir.Value, at: int, last: int, before_first: int) -> ir.Value:
    """The elements from `last` down to the one behind `before_first`; both may be counted from the back, the latter if `last` is."""
    end = before_first if before_first >= 0 or last < 0 else -(2**63) + 1
    return op.Slice(value, int64s(op, [last]), int64s(op, [end]), int64s(op, [at]), int64s(op, [-1]))


def _pad(op: Any, value: ir.Value, like: ir.Value, at: int, before: Size, after: Size) -> ir.Value:
    pads: list[Size] = [0] * (2 * rank(like))
    pads[at], pads[at + rank(like)] = before, after
    return op.Pad(value, as_vector(op, pads))


def _sum(op: Any, parts: Sequence[ir.Value]) -> ir.Value:
    total = parts[0]
    for part in parts[1:]:
        total = op.Add(total, part)
    return total
