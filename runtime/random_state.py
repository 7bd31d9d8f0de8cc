"""The state of PyTorch's default generators: of the CPU, and of each CUDA device where CUDA is in use."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def random_state() -> list[torch.Tensor]:
    """What `set_random_state` takes: the CPU's state, and the devices' behind it."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def set_random_state(state: Sequence[torch.Tensor]) -> None:
    """Puts the generators back where they were."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])
