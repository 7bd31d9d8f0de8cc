"""What autograd's formula for a linear layer leaves around gradients: a matrix transposed twice, a sum that keeps a dimension which a view drops.

Inside a session that costs next to nothing, but hides products from passes that look for gradients (`embedding_gradients`). At the end of a graph in
regions these are views, which PyTorch takes: three calls a layer in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def simplify_linear_gradients(graph: fx.Graph) -> int:
    """Leaves both out, in place; returns how many it found."""
    found = 0
    for node in list(graph.nodes):
        spare = [node]
        if node.target is aten.t.default and (source := _transposed_twice(node)) is not None:
            node.replace_all_uses_with(source)
            spare += [one for one in node.all_input_nodes if len(one.users) == 1]
        elif node.target is aten.view.default and _drops_what_a_sum_kept(node):
            total: Any = node.args[0]
            total.args = total.args[:2]
            total.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(total)
        else:
            continue
        for one in spare:
            graph.erase_node(one)
        found += 1
    return found


def _transposed_twice(node: fx.Node) -> fx.Node | None:
    """The matrix, if it is a product: AOTAutograd knows of others as views of what is handed in, or handed out."""
    inner = node.args[0]
    source = inner.args[0] if isinstance(inner, fx.Node) and inner.target is aten.t.default else None
    return source if isinstance(source, fx.Node) and source.target is aten.mm.default else None


def _drops_what_a_sum_kept(node: fx.Node) -> bool:
    total: Any = node.args[0]
    if not isinstance(total, fx.Node) or total.target is not aten.sum.dim_IntList or len(total.users) != 1:
        return False
    given: tuple[Any, ...] = total.args
    source, dims, *rest = given
    if rest != [True] or total.kwargs or not dims:
        return False
    rank = source.meta["val"].dim()
    left = [size for d, size in enumerate(source.meta["val"].shape) if d not in {dim % rank for dim in dims}]
    made = list(node.meta["val"].shape)
    return all(isinstance(size, int) for size in (*left, *made)) and made == left
