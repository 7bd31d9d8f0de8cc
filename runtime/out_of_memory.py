"""What ONNX Runtime says where memory is at an end, in the words by which callers know PyTorch's error (`accelerate.find_executable_batch_size`)."""

from __future__ import annotations

import re

# Of the arena; of an allocation without it (1.19.2 and 1.32.0).
_MESSAGES = re.compile(r"Failed to allocate memory for requested buffer of size (?P<bytes>\d+)|bad_alloc")


def described(message: str, *, on_cuda: bool) -> str | None:
    """One line about the memory that was asked for; None if the message is about something else."""
    found = _MESSAGES.search(message)
    if found is None:
        return None
    wanted = f"{found['bytes']} bytes" if found["bytes"] else "memory"
    return f"CUDA out of memory. Tried to allocate {wanted}" if on_cuda else f"DefaultCPUAllocator: can't allocate memory: tried to allocate {wanted}"
