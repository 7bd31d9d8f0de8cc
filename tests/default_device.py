"""The device on which tests make their tensors (`--device`)."""

from __future__ import annotations

import torch

ON_CPU = torch.get_default_device().type == "cpu"  # conftest.py sets it before test modules are imported


def seeded(seed: int) -> torch.Generator:
    """A generator there: `torch.randn` and its like refuse one of another device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
