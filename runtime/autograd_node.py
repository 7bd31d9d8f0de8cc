"""The node of autograd's graph that a compiled forward has made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def node_of(results: Sequence[Any]) -> Any:
    """The node that the results of a compiled forward come from, themselves or as views; None if none of them has gradients."""
    return next(filter(None, (_behind_views(one.grad_fn) for one in results if isinstance(one, torch.Tensor))), None)


def _behind_views(node: Any) -> Any:
    while node is not None and type(node).__name__ != "CompiledFunctionBackward":
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node
