"""Windows along one axis of a tensor, in few pieces: one of several strides is as many blocks of a stride, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.axes import plus, times
from ort_backend.lowering.constants import int64s
from ort_backend.lowering.symbolic import as_vector

Size = int | ir.Value


@dataclasses.dataclass(frozen=True)
class Windows:
    """`count` windows along an axis that has `padding` zeros at both ends: `size` places, `dilation` apart, the next one `stride` on."""

    size: int
    dilation: int
    padding: int
    stride: int
    count: Size

    @property
    def are_regular(self) -> bool:
        """Whether `cut` and `added` can write them: not places apart in windows apart."""
        return self.size == 1 or self.stride == 1 or self.dilation == 1

    @property
    def are_blocks(self) -> bool:
        """Whether the pieces are blocks of a stride, and the windows come before the places; else one piece is one place of all windows."""
        return self.stride > 1

    @property
    def axes(self) -> tuple[Size, Size]:
        """The sizes of the two axes that `cut` makes."""
        return (self.count, self.size) if self.are_blocks else (self.size, self.count)

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return -(-self.size // self.stride) if self.are_blocks else self.size

    @property
    def excess(self) -> int:
        """How many places more than a window the blocks have."""
        return self.pieces * self.stride - self.size if self.are_blocks else 0

    @property
    def reach(self) -> int:
        """From a window's first piece to its last."""
        return self.pieces - 1 if self.are_blocks else self.dilation * (self.size - 1)


def cut(op: Any, tensor: ir.Value, sizes: Sequence[Size], axis: int, windows: Windows) -> ir.Value:
    """`tensor`, of `sizes`, with two axes, of windows and of places, instead of one; which comes first, `Windows.are_blocks` says."""
    if windows.padding or windows.excess:
        tensor = op.Pad(tensor, int64s(op, _pads(len(sizes), axis, windows.padding, windows.padding + windows.excess)))
    if not windows.are_blocks:
        starts = [place * windows.dilation for place in range(windows.size)]
        pieces = [_slice(op, tensor, axis, start, plus(op, windows.count, start)) for start in starts]
        return op.Concat(*(op.Unsqueeze(piece, int64s(op, [axis])) for piece in pieces), axis=axis)
    blocks = plus(op, windows.count, windows.reach)
    tensor = _slice(op, tensor, axis, 0, times(op, blocks, windows.stride))
    tensor = op.Reshape(tensor, as_vector(op, [*sizes[:axis], blocks, windows.stride, *sizes[axis + 1 :]]))
    pieces = [_slice(op, tensor, axis, start, plus(op, windows.count, start)) for start in range(windows.pieces)]
    together = op.Concat(*pieces, axis=axis + 1) if len(pieces) > 1 else pieces[0]
    return _slice(op, together, axis + 1, 0, windows.size) if windows.excess else together


def added(op: Any, tensor: ir.Value, sizes: Sequence[Size], axis: int, windows: Windows, size: int) -> ir.Value:
    """The reverse of `cut`: windows and places from `axis` on, of a tensor of `sizes`, added where they lie along one axis of `size`."""
    assert isinstance(windows.count, int)
    ranks, at = len(sizes), axis + windows.are_blocks
    if windows.excess:
        tensor = op.Pad(tensor, int64s(op, _pads(ranks, at, 0, windows.excess)))
    if windows.are_blocks:
        tensor = op.Reshape(tensor, as_vector(op, [*sizes[:at], windows.pieces, windows.stride, *sizes[at + 1 :]]))
    pieces = [op.Squeeze(_slice(op, tensor, at, i, i + 1), int64s(op, [at])) for i in range(windows.pieces)]
    if windows.reach:
        step, ranks = (1, ranks) if windows.are_blocks else (windows.dilation, ranks - 1)
        pieces = [op.Pad(piece, int64s(op, _pads(ranks, axis, i * step, windows.reach - i * step))) for i, piece in enumerate(pieces)]
    total = op.Sum(*pieces) if len(pieces) > 1 else pieces[0]
    reached, end = windows.count + windows.reach, windows.padding + size
    if windows.are_blocks:
        reached *= windows.stride
        total = op.Reshape(total, as_vector(op, [*sizes[:axis], reached, *sizes[axis + 2 :]]))
    if end > reached:
        total = op.Pad(total, int64s(op, _pads(len(sizes) - 1, axis, 0, end - reached)))
    return _slice(op, total, axis, windows.padding, end) if windows.padding or end < reached else total


def _slice(op: Any, tensor: ir.Value, axis: int, start: int, end: Size) -> ir.Value:
    return op.Slice(tensor, int64s(op, [start]), as_vector(op, [end]), int64s(op, [axis]))


def _pads(ranks: int, axis: int, before: int, behind: int) -> list[int]:
    pads = [0] * (2 * ranks)
    pads[axis], pads[ranks + axis] = before, behind
    return pads
