"""Tangents that autograd has no gradient for: zeros, of which one is enough where they are only added.

A model that returns its logits beside the loss, or a cache of keys and values, mostly gets a gradient for the loss alone. AOTAutograd's graph adds a
tangent for each of the others all the same: zeros as large as the result, that would be made, read and added at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import tangents_of
from ort_backend.lowering.symbolic import have_same_sizes

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default)


def loosen_tangents(graph: fx.Graph) -> int:
    """Marks, in place, the tangents that may come with every size 1, as `meta["loose"]`: what they are added to has their shape.

    They are tangents whose one use is a sum with a tensor of their own shape. Where it is the reshaped tangent that is added, the other summand is
    reshaped instead, which takes sizes that are known.

    Args:
        graph: A joint graph of ATen operators with fake tensors in their metadata.

    Returns:
        How many there are.
    """
    tangents = tangents_of(graph)
    for tangent in tangents:
        added = _only_user(tangent)
        while added is not None and added.target in _RESHAPES:
            added = _only_user(added)
        if added is not None and (other := _other_summand(added, tangent)) is not None:
            _add(added, tangent, other)
            tangent.meta["loose"] = True
    return sum("loose" in node.meta for node in tangents)


def loose_among(tangents: Sequence[fx.Node]) -> dict[int, torch.Tensor]:
    """Those of the tangents that are marked, by their place: fake tensors."""
    return {i: node.meta["val"] for i, node in enumerate(tangents) if "loose" in node.meta}


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_summand(node: fx.Node, tangent: fx.Node) -> fx.Node | None:
    """What `node` adds to the tangent, which may be reshaped; None if it does something else."""
    fake = tangent.meta["val"]
    if node.target is not aten.add.Tensor or node.kwargs or not isinstance(fake, torch.Tensor) or fake.dim() == 0 or not fake.is_floating_point():
        return None
    others = [one for one in node.args if isinstance(one, fx.Node) and _reshaped(one) is not tangent]
    if len(others) != 1 or "loose" in _reshaped(others[0]).meta:
        return None
    result, summand = node.meta["val"], others[0].meta["val"]
    is_reshaped = tangent not in node.args
    if not isinstance(summand, torch.Tensor) or not fake.dtype == summand.dtype == result.dtype or not have_same_sizes(summand.shape, result.shape):
        return None
    if is_reshaped and not all(isinstance(size, int) for size in (*fake.shape, *result.shape)):
        return None
    return others[0] if is_reshaped or have_same_sizes(fake.shape, result.shape) else None


def _reshaped(node: fx.Node) -> fx.Node:
    """What a node is a reshape of."""
    while node.target in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _add(node: fx.Node, tangent: fx.Node, other: fx.Node) -> None:
    """Adds the tangent in its own shape."""
    if tangent in node.args:
        return
    graph, fake, result = node.graph, tangent.meta["val"], node.meta["val"]
    with graph.inserting_before(node):
        made = [graph.call_function(aten.view.default, (other, list(fake.shape)))]
        made.append(graph.call_function(aten.add.Tensor, (made[0], tangent)))
        made.append(graph.call_function(aten.view.default, (made[1], list(result.shape))))
    for one, like in zip(made, (fake, fake, result)):
        one.meta = {**node.meta, "val": like}
    node.replace_all_uses_with(made[-1])
    graph.erase_node(node)
