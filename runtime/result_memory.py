"""Memory on the CPU for large results of PyTorch's kernels inside a session, used again as soon as a result is given up.

From the C library's heap alone, which gives the place of such a result to smaller ones that stay (gradients of parameters), the next large one
needs a new place, which no cache holds: with all products by MKL a step of a GPT took 1.06 times as long (`product_choice.product_by_mkl`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import torch

from ort_backend.target import LARGE_RESULT

_use_count = torch._C._storage_Use_Count

# All blocks together, against the most that was in use at once.
_SLACK = 1.25


class ResultMemory:
    """Blocks of the sizes that were asked for; free are those that no tensor lies in.

    Nothing but kernels inside sessions sees a block: what a session gives to a program is a tensor that keeps the block's tensor alive. A block
    becomes free on any thread, and `release` may be called on any, also by the garbage collector in the middle of `empty`.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[torch.UntypedStorage]] = {}  # by size; the one that was taken last stands last
        self._taken: dict[int, int] = {}  # when each was taken, by its address
        self._takes = 0
        self._most_in_use = 0
        self._lock = threading.Lock()
        self._to_release = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape` on the CPU whose elements hold anything."""
        size = math.prod(shape) * dtype.itemsize
        if size < LARGE_RESULT:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:
            if self._to_release:
                self._drop_free()
            block = self._take(size)
            return torch.empty(0, dtype=dtype, device="cpu").set_(block, 0, shape)  # type: ignore[call-overload]

    def release(self) -> None:
        """Gives the memory that is free back to the C library, and forgets how much was in use."""
        self._to_release = True
        if self._lock.acquire(blocking=False):  # else the one who has it, or who is next to ask for memory
            try:
                self._drop_free()
            finally:
                self._lock.release()

    def _take(self, size: int) -> torch.UntypedStorage:
        """A free block, the one that was taken last: it may be in the processor's caches. A new one where none is free."""
        blocks = self._blocks.setdefault(size, [])
        for i in range(len(blocks) - 1, -1, -1):
            if _is_free(blocks[i]):
                block = blocks.pop(i)
                break
        else:
            self._make_room(size)
            block = torch.UntypedStorage(size, device="cpu")
        blocks.append(block)
        self._takes += 1
        self._taken[block._cdata] = self._takes
        return block

    def _make_room(self, size: int) -> None:
        """Before a block is made: drops free ones, the longest unused first, where all would be more than what was ever in use, and some."""
        free = sorted(self._free_blocks(), key=lambda block: self._taken[block._cdata])
        total = size + sum(one * len(blocks) for one, blocks in self._blocks.items())
        self._most_in_use = max(self._most_in_use, total - sum(block.nbytes() for block in free))
        for block in free:
            if total <= _SLACK * self._most_in_use:
                return
            total -= block.nbytes()
            self._drop(block)

    def _drop_free(self) -> None:
        self._to_release, self._most_in_use = False, 0
        for block in list(self._free_blocks()):
            self._drop(block)

    def _free_blocks(self) -> Iterator[torch.UntypedStorage]:
        return (block for blocks in self._blocks.values() for block in blocks if _is_free(block))

    def _drop(self, block: torch.UntypedStorage) -> None:
        blocks = self._blocks[block.nbytes()]
        del blocks[next(i for i, other in enumerate(blocks) if other is block)], self._taken[block._cdata]


def _is_free(block: torch.UntypedStorage) -> bool:
    return _use_count(block._cdata) == 1


memory = ResultMemory()
