"""Operators with effects, such as the error checks behind `torch.linalg.inv`, without the tokens that AOTAutograd threads through them.

Order is kept as it is for random draws (`graph.GraphLowering`): from one such node to the next.
"""

from __future__ import annotations

import operator

import torch
from torch import fx


def unwrap_effects(graph: fx.Graph) -> None:
    """Replaces `with_effects(token, op, *args)` by `op(*args)`, in place; tokens pass through."""
    wrapper = getattr(torch.ops.higher_order, "with_effects", None)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not wrapper or not isinstance(node.args[1], torch._ops.OpOverload):
            continue
        token, target, *args = node.args
        with graph.inserting_before(node):
            call = graph.call_function(target, tuple(args), dict(node.kwargs))
            results = list(node.meta["val"])[1:]
            single = len(target._schema.returns) <= 1
            call.meta = {**node.meta, "val": (results[0] if results else None) if single else tuple(results), "effect": True}
            for user in list(node.users):
                index = user.args[1]
                if index == 0:
                    user.replace_all_uses_with(token)
                elif single:
                    user.replace_all_uses_with(call)
                else:
                    item = graph.call_function(operator.getitem, (call, index - 1))
                    item.meta = dict(user.meta)
                    user.replace_all_uses_with(item)
                graph.erase_node(user)
        graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """Whether a node must run although nothing uses its result, and in its place among others like it."""
    return bool(node.meta.get("effect"))
