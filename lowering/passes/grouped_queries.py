"""Keys and values that Dynamo's graph repeats for several heads of queries: PyTorch's flash attention on a CUDA device takes them as they are.

Hugging Face's decoders leave the repetition to attention where they have no mask for it (transformers 5.23); while they are traced they have one,
which `traced_masks` takes away. A repetition is a copy each of keys and values, and their gradients are sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from ort_backend.lowering.fx_nodes import graph_modules
from ort_backend.lowering.passes.traced_masks import given, is_written
from ort_backend.lowering.symbolic import have_same_sizes

_HALVES = (torch.float16, torch.bfloat16)
# Beyond, flash attention has no backward on some devices.
_WIDEST_HEAD = 128
_ALL = slice(None, None, None)


def takes_flash_attention(query: Tensor) -> bool:
    """Whether attention of queries (N, heads, S, D), without a mask, is PyTorch's flash attention: in half precision, maybe by autocast."""
    device = query.device.type
    if device != "cuda" or not torch.backends.cuda.flash_sdp_enabled() or query.dim() != 4 or query.shape[3] > _WIDEST_HEAD:
        return False
    is_half = query.dtype in _HALVES or (torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) in _HALVES)
    return is_half and torch.cuda.get_device_capability(query.device) >= (8, 0)


def group_queries(gm: fx.GraphModule, is_taken: Callable[[Tensor], bool] = takes_flash_attention) -> int:
    """Hands, in place, attention without a mask the keys and values in front of their repetition.

    Args:
        gm: Dynamo's graph.
        is_taken: Whether attention of these queries has a kernel that takes fewer heads of keys and values.

    Returns:
        To how many calls.
    """
    grouped = 0
    for module in graph_modules(gm):
        for node in module.graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
            if len(node.args) < 3 or given(node, 3, "attn_mask") is not None or node.kwargs.get("enable_gqa"):
                continue
            query = node.args[0].meta.get("example_value") if isinstance(node.args[0], fx.Node) else None
            if not isinstance(query, Tensor) or not is_taken(query):
                continue
            key, value = (_unrepeated(one, query) for one in node.args[1:3])
            # As many of each there have to be in any case.
            if key is None or value is None or not have_same_sizes(*((*_shape(one)[:2], _shape(one)[3]) for one in (key, value))):
                continue
            node.args = (node.args[0], key, value, *node.args[3:])
            node.kwargs = {**node.kwargs, "enable_gqa": True}
            grouped += 1
        if grouped:
            module.recompile()
    return grouped


def _unrepeated(node: Any, query: Tensor) -> fx.Node | None:
    """The (N, heads, S, D) of which each head stands there several times, one behind the other: as many as there are of queries."""
    chain: list[fx.Node] = []
    steps = (
        (("repeat_interleave",),) if _calls(node, "repeat_interleave") else (("reshape", "view", "flatten"), ("expand",), ("getitem", "unsqueeze"))
    )
    for names in steps:
        if not _calls(node, *names):
            return None
        chain.append(node)
        node = node.args[0]
    shapes = [_shape(one) for one in (node, *reversed(chain))]
    source, result = shapes[0], shapes[-1]
    if len(source) != 4 or not isinstance(source[1], int) or not isinstance(query.shape[1], int) or query.shape[1] % source[1]:
        return None
    if any(is_written(one, one.meta["example_value"]) for one in (node, *chain)) or source[3] != query.shape[3]:
        return None
    n, heads, s, d = source
    expected: list[tuple[Any, ...]] = [(n, query.shape[1], s, d)]
    if len(chain) == 1:
        if not isinstance(given(chain[0], 1, "repeats"), int) or given(chain[0], 2, "dim") not in (1, -3):
            return None
    else:
        if not _parts_behind_heads(chain[-1]):
            return None
        expected = [(n, heads, 1, s, d), (n, heads, query.shape[1] // heads, s, d), *expected]
    return node if len(result) == 4 and all(map(have_same_sizes, shapes[1:], expected)) else None


def _calls(node: Any, *names: str) -> bool:
    """Whether it is a call of a method of a tensor, or of a function, of one of these names, with a tensor first."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node) or not _shape(node) or not _shape(node.args[0]):
        return False
    return (node.op == "call_method" and node.target in names) or (node.op == "call_function" and getattr(node.target, "__name__", None) in names)


def _parts_behind_heads(node: fx.Node) -> bool:
    """Whether `x[:, :, None]`, or `x.unsqueeze(2)`."""
    which: Any = given(node, 1, "dim")
    if isinstance(which, tuple):
        return len(which) > 2 and which[2] is None and all(one == _ALL for one in (*which[:2], *which[3:]))
    return which in (2, -3)


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, Tensor) else ()
