"""Random numbers that do not depend on what was drawn before."""

from __future__ import annotations

import torch


def seeded(seed: int) -> torch.Generator:
    """A generator on the device on which tests make their tensors (`--device`), for which `torch.randn` and its like ask."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
