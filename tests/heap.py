"""Bytes in use on the C library's heap: what tests measure to find memory that steps leave behind.

The process's resident memory is no measure in a process that has run other tests. Its heap has large free blocks whose pages were never written to,
or were given back; glibc may lay the same 128 KB anew in each step, behind the last place, and all pages of such a block (100 MB, once) become
resident in 800 steps, while nothing more is in use.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

_COUNTERS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Counters(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTERS]


def in_use() -> int:
    """Bytes that PyTorch, ONNX Runtime and all others have allocated, in all of glibc's arenas and as mappings, once the garbage is collected.

    Python's own objects of up to 512 bytes are not among them, nor is a device's memory.
    """
    gc.collect()
    counters = _mallinfo2()()
    return counters.uordblks + counters.hblkhd


def growth(step: Callable[[], Any], steps: int, warm_up: int = 50) -> int:
    """By how many bytes more are in use after `steps` steps, behind some to warm up, at the pace of the fifth of them in which it is least.

    A leak is in each. Once or twice the arena of ONNX Runtime's sessions may take another piece, of a megabyte or two.
    """
    for _ in range(warm_up):
        step()
    grown = []
    for _ in range(5):
        before = in_use()
        for _ in range(steps // 5):
            step()
        grown.append(in_use() - before)
    return 5 * min(grown)


def _mallinfo2() -> Any:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    function = getattr(library, "mallinfo2", None)  # glibc 2.33
    if function is None:
        pytest.skip("this C library does not count what is in use")
    function.restype = _Counters
    return function
