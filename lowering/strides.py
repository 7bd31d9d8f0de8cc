"""Tensors addressed by strides, in blocks of neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence


def in_blocks(total: int, size: Sequence[int], stride: Sequence[int], offset: int) -> tuple[int, list[int], list[int], int]:
    """The largest blocks that memory of `total` elements and what is addressed in it both consist of.

    Overlapping windows over rows, as in sliding attention, take some thousand elements with each address.

    Args:
        total: Elements in memory.
        size: Of an `as_strided`, as its other arguments.
        stride: In elements.
        offset: In elements.

    Returns:
        The elements of a block, and size, stride and offset of the `as_strided` of blocks that finds them in the same order.
    """
    run, outer = 1, len(size)
    while outer and (size[outer - 1] == 1 or stride[outer - 1] == run):
        outer -= 1
        run *= size[outer]
    steps = [step if count != 1 else 0 for count, step in zip(size[:outer], stride)]
    block = math.gcd(run, total, offset, *steps)
    if block == 1 or 0 in (*size, total):
        return 1, list(size), list(stride), offset
    return block, [*size[:outer], run // block], [*(step // block for step in steps), 1], offset // block
