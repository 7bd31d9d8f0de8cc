"""Whether the CUDA device can still be used. Imports torch alone: the smoke test runs where pytest is not installed."""

from __future__ import annotations

import torch


def device_works() -> bool:
    """False where an earlier kernel left an error that every later call on the device would meet."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
