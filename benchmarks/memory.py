"""Peak memory of this process: resident bytes on the CPU, the device's used bytes on CUDA."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import torch


def settle() -> None:
    """Collects garbage, and gives free memory of the C heap back to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def used(device: str) -> int:
    """Bytes in use now. On CUDA all that the device holds, PyTorch's pool and ONNX Runtime's, which does not show in PyTorch's figures."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    return _status("VmRSS")


def reset_peak(device: str) -> None:
    """From here on `peak` counts anew."""
    settle()
    if device == "cuda":
        torch.cuda.empty_cache()  # `used` has the pool, too, with what the compile left in it
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the high-water mark


def peak(device: str) -> int:
    """The most bytes in use since `reset_peak`. On CUDA no pool gives memory back between steps, so that what is used now is the most."""
    return used(device) if device == "cuda" else _status("VmHWM")


def allocator_peak(device: str) -> int | None:
    """The most bytes that PyTorch's CUDA allocator had handed out since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}: peak memory on the CPU is measured on Linux only")
    return int(found.group(1)) * 1024
