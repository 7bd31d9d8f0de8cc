"""Backwards over a batch of gradients: `torch.autograd.grad(..., is_grads_batched=True)`, and `jacobian(..., vectorize=True)`.

Autograd then hands a backward tensors that stand for a row each of a batch (`torch._vmap_internals`, read in torch 2.13). A session takes none of
these: it runs once a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def is_batch(given: Sequence[Any]) -> bool:
    """Whether one of the values is a batch."""
    return any(isinstance(one, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(one) for one in given)


def row_by_row(function: Callable[[list[Any], bool], Sequence[Any]], given: Sequence[Any]) -> list[Any]:
    """The results of a function, batches as well.

    Args:
        function: Takes a row of each batch in `given` beside the other values, and whether it is the last row; gives tensors and others.
        given: Values, at least one of them a batch.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    level = max(level, 1)  # another thread than the one that has asked knows of no batch
    rows = [torch._remove_batch_dim(one, level, 1, 0) if is_batch([one]) else None for one in given]
    count = next(len(one) for one in rows if one is not None)
    found = [function([own if one is None else one[i] for one, own in zip(rows, given)], i == count - 1) for i in range(count)]
    return [torch._add_batch_dim(torch.stack(every), 0, level) if isinstance(every[0], torch.Tensor) else every[0] for every in zip(*found)]
