"""Numbers in a row, as many as a symbolic size says: their count, and each of them, are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops.harness import check

_OF_FRACTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "downwards, of integers": lambda t: torch.arange(t.shape[0], -t.shape[1], -1.0, dtype=torch.int64),
    "a fraction of a size": lambda t: torch.arange(0, t.shape[0] / 2, 0.5),
    "a step that is not exact": lambda t: torch.arange(0, t.shape[0] * 0.1, 0.1),
    "a step that is not exact, in float64": lambda t: torch.arange(0.5, t.shape[0] * 0.3, 0.1, dtype=torch.float64),
    "a step that a size divides": lambda t: torch.arange(0.0, 1.0, 1 / t.shape[0]),
    "from a fraction": lambda t: torch.arange(0.5, t.shape[1]),
    "to a fraction": lambda t: torch.arange(t.shape[0] + 0.5),
    "integers cut off in int64": lambda t: torch.arange(0.9, t.shape[0] + 0.9, 1.5, dtype=torch.int64),
    "integers cut off in int32": lambda t: torch.arange(0.9, t.shape[0] + 0.9, 1.5, dtype=torch.int32),
    "half precision": lambda t: torch.arange(0, t.shape[0], 0.25, dtype=torch.float16),
    "long and without a size": lambda t: t.sum() + torch.arange(0.5, 5000, 1.0, dtype=torch.int64),
}


@pytest.mark.parametrize("name", _OF_FRACTIONS)
def test_of_fractions(name: str) -> None:
    for size in ((4, 6), (7, 5), (30, 10), (1000, 3)):
        check(_OF_FRACTIONS[name], torch.randn(3, 5), dynamic=True, other=(torch.randn(size),))


def test_a_float32_sequence_does_not_add_up_roundings() -> None:
    check(lambda t: torch.arange(0, t.shape[0] / 8, 0.125) * 8, torch.randn(3), dynamic=True, other=(torch.randn(100_000),))
