"""Operators with effects: checks such as `torch._assert_async`, and those that AOTAutograd threads a token through (`torch.linalg.inv`'s check).

Order is kept as it is for random draws (`graph.GraphLowering`): from one such node to the next.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ort_backend.lowering.provenance import operator_name
from ort_backend.lowering.splitting.partition import is_random

# Checks of the tracer, which Dynamo's guards have made: nothing runs them.
_DROPPED = {"aten::_assert_scalar", "aten::_assert_tensor_metadata", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"}


def mark_effects(graph: fx.Graph) -> None:
    """Marks the nodes that have effects, in place, and replaces `with_effects(token, op, *args)` by `op(*args)`; tokens pass through."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns and not is_dropped(node):
            node.meta["effect"] = True
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


def drop_unread(graph: fx.Graph) -> None:
    """Removes, in place, what nothing reads, but for random draws and what has effects."""
    graph.eliminate_dead_code(_stays)


def _stays(node: fx.Node) -> bool:
    if node.op == "placeholder" or has_effect(node) or is_random(node):
        return True
    is_tagged = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return node.is_impure() and not is_tagged  # attention without dropout draws nothing, for all its tag says


def is_dropped(node: fx.Node) -> bool:
    """Whether a node is a check of the tracer, which nothing runs."""
    return operator_name(node.target) in _DROPPED
