"""The device on which tests make their tensors (`--device`).

Where PyTorch has a default device Dynamo (2.13) breaks the graph at the method `unflatten`; tests call the function instead.
"""

from __future__ import annotations

import contextlib

import torch

DEVICE = torch.get_default_device().type  # conftest.py sets it before test modules are imported
ON_CPU = DEVICE == "cpu"


def seeded(seed: int) -> torch.Generator:
    """A generator there: `torch.randn` and its like refuse one of another device."""
    return torch.Generator(DEVICE).manual_seed(seed)


def random_state() -> torch.Tensor:
    """The state of the generator that draws there."""
    return torch.get_rng_state() if ON_CPU else torch.cuda.get_rng_state()


def on_this_thread() -> contextlib.AbstractContextManager[object]:
    """To be around what a thread does that a test starts: PyTorch has a default device for each thread."""
    return contextlib.nullcontext() if ON_CPU else torch.device(DEVICE)
