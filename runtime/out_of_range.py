"""What ONNX Runtime's kernels say of an index that is out of range, in PyTorch's words."""

from __future__ import annotations

import re

# Of Gather and ScatterElements; of GatherND, and ScatterND, which spells it so; of GatherElements, which tells no number (1.19.2 and 1.32.0).
_MESSAGES = re.compile(
    r"indices element out of data bounds, idx=(?P<index>-?\d+) must be within the inclusive range \[-?\d+,(?P<last>-?\d+)\]"
    r"|invalid ind(?:ex|ice) found, ind(?:ex|ice) = (?P<other>-?\d+)"
    r"|GatherElements op: Out of range value in index tensor"
)
_SIGN = 1 << 63  # the lowering takes it off a negative int64 where that is out of range in PyTorch (`from_front`)


def described(message: str) -> str | None:
    """One line about the index; None if the message is about something else."""
    found = _MESSAGES.search(message)
    if found is None:
        return None
    number = found["index"] or found["other"]
    if number is None:
        return "an index is out of bounds"
    index = int(number) - _SIGN if int(number) >= _SIGN >> 1 else int(number)  # no tensor has so many rows
    size = f" for a dimension of size {int(found['last']) + 1}" if found["last"] else ""
    return f"index {index} is out of bounds{size}"
