"""The device on which tests make their tensors (`--device`)."""

from __future__ import annotations

import torch

DEVICE = torch.get_default_device().type  # conftest.py sets it before test modules are imported
ON_CPU = DEVICE == "cpu"


def seeded(seed: int) -> torch.Generator:
    """A generator there: `torch.randn` and its like refuse one of another device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
