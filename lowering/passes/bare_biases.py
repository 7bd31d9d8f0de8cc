"""Biases of PyTorch's fused attention as they are before they are expanded to all queries and keys: a session would write all of it down.

Eager's attention expands a view of a padded mask, which costs nothing. The call pads, cuts and expands by itself (`fused_attention.aligned`), and
takes views of a mask that the graph has padded, in each layer and in its backward.
"""

from __future__ import annotations

from typing import Any

from torch import SymInt, fx, ops

from ort_backend.lowering.fx_nodes import arguments_of
from ort_backend.lowering.kernels.fused_attention import EFFICIENT, EFFICIENT_BACKWARD

aten = ops.aten


def take_bare_biases(graph: fx.Graph) -> int:
    """Hands attention, in place, what its bias is an expanded view of; its result stays the same.

    Returns:
        To how many nodes.
    """
    changed = 0
    for node in graph.nodes:
        if node.target not in (EFFICIENT, EFFICIENT_BACKWARD) or (bias := (given := arguments_of(node))["attn_bias"]) is None:
            continue
        bare = _bare(bias, given["key"].meta["val"].shape[2])
        if bare is not bias:
            node.replace_input_with(bias, bare)
            changed += 1
    return changed


def _bare(bias: fx.Node, keys: int | SymInt) -> fx.Node:
    while bias.op == "call_function" and bias.args and isinstance(source := bias.args[0], fx.Node):
        length = _length(bias)
        keeps_rows = bias.target is aten.expand.default and source.meta["val"].dim() > 0 and _equal(length, _length(source))
        if not keeps_rows and not (_begins_rows(bias) and _equal(length, keys)):
            break
        bias = source
    return bias


def _length(node: fx.Node) -> int | SymInt:
    return node.meta["val"].shape[-1]


def _begins_rows(node: fx.Node) -> bool:
    """Whether a node takes the first numbers of each row."""
    if node.target is not aten.slice.Tensor:
        return False
    given, rank = arguments_of(node), node.meta["val"].dim()
    return given["dim"] % rank == rank - 1 and given["start"] in (0, None) and given["step"] == 1


def _equal(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal, without a guard on them."""
    return bool((a.node.expr if isinstance(a, SymInt) else a) == (b.node.expr if isinstance(b, SymInt) else b))
