"""Gradients of biases under autocast: sums of half precision numbers, as float32 all the way.

PyTorch's formula sums a layer's half precision gradient in float32 and rounds the sum to half precision, as the layer saw its bias; behind the cast
by which the bias came to the layer the sum is a float32 number again, and the rounding all that the two casts have done. inductor leaves it out, too.
"""

from __future__ import annotations

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import VIEWS, tangents_of
from ort_backend.lowering.splitting.partition import descendants

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)


def keep_sums_wide(graph: fx.Graph) -> int:
    """Takes, in place, both casts of such sums out of the backward in a graph: where nothing reads what lies between them.

    What a program rounds itself, in its forward, is left alone.

    Returns:
        How many sums stay float32.
    """
    tangents = tangents_of(graph)
    found, backward = 0, descendants(graph.nodes, tangents)
    for widened in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        rounded = widened.args[0]
        if widened.meta["val"].dtype is not torch.float32 or not _is_cast(rounded) or len(rounded.users) != 1:
            continue
        total = rounded.args[0]
        if total in backward and _is_wide_sum_of(total, rounded.meta["val"].dtype):
            widened.replace_all_uses_with(total)
            graph.erase_node(widened)
            graph.erase_node(rounded)
            found += 1
    return found


def _is_cast(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten._to_copy.default


def _is_wide_sum_of(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether this is a sum, in another shape maybe, of numbers of a half precision in float32."""
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not aten.sum.dim_IntList or node.kwargs.get("dtype") is not torch.float32 or dtype not in _HALF:
        return False
    return node.args[0].meta["val"].dtype is dtype  # type: ignore[union-attr]
