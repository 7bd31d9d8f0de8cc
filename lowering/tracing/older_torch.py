"""What the fake tensors of older versions of PyTorch say wrongly, put right by decompositions into operators of which they say the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Those that this version of PyTorch needs."""
    return {aten.bincount.default: _bincount} if torch.__version__ < "2.13" else {}


def _bincount(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """The fake result has the dtype of `self` until torch 2.12; the true one has int64, or with weights the float32 or float64 of these.

    A traced graph would round sums of weights to integers.
    """
    if weights is None and self.dtype == torch.int64:
        return NotImplemented  # stays whole
    numbers = self.to(torch.int64)
    counts = aten.bincount.default(numbers, None, minlength)
    if weights is None:
        return counts
    dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
    return weights.new_zeros(counts.shape, dtype=dtype).scatter_add(0, numbers, weights.to(dtype))
