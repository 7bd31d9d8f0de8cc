"""The node of autograd's graph that a compiled forward has made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def next_number() -> int:
    """The number of the next node that autograd makes on this thread (private; read in torch 2.13)."""
    return torch._C._autograd._get_sequence_nr()


def node_of(results: Sequence[Any], since: int) -> Any:
    """The node that the results of a compiled forward come from, themselves or as views; None if none of them has gradients.

    Args:
        results: What the forward returned. A view of an input comes from whatever made the input, which may be another compiled forward.
        since: `next_number()` in front of the forward.
    """
    return next(filter(None, (_behind_views(one.grad_fn, since) for one in results if isinstance(one, torch.Tensor))), None)


def _behind_views(node: Any, since: int) -> Any:
    while node is not None and type(node).__name__ != "CompiledFunctionBackward":
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node if node is not None and node._sequence_nr() >= since else None
