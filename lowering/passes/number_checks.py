"""Checks of numbers that follow from values, such as `torch._check(mask.nonzero().shape[0] == 4)`: all of a graph in one call of PyTorch.

Dynamo's guards hold for the sizes of arguments; what depends on values (`torch._dynamo.config.capture_scalar_outputs`) is known when the graph runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.splitting.eager_nodes import evaluation_of
from ort_backend.lowering.symbolic import is_symbolic

aten = torch.ops.aten


def join_number_checks(graph: fx.Graph) -> None:
    """Puts one call in place of all `_assert_scalar`, in place, where the last one stands.

    It computes with the numbers of its tensors: where a check says that a size is 4, all else in the graph takes it for 4.
    """
    checks = [node for node in graph.nodes if node.target is aten._assert_scalar.default and isinstance(node.args[0], fx.Node)]
    if not checks:
        return
    called: set[fx.Node] = {*checks}
    sources: dict[fx.Node, None] = {}
    waiting: list[Any] = [check.args[0] for check in checks]
    while waiting:
        node = waiting.pop()
        if node.op != "call_function" or not is_symbolic(node.meta.get("val")):
            sources[node] = None
        elif node not in called:
            called.add(node)
            waiting += node.all_input_nodes
    check_all = evaluation_of(sorted(called), [*sources])
    check_all.__name__ = "torch._check"
    with graph.inserting_before(checks[-1]):
        call = graph.call_function(check_all, tuple(sources))
    call.meta = {**checks[-1].meta, "val": None, "effect": True, "number check": True}
    for check in checks:
        graph.erase_node(check)


def is_number_check(node: fx.Node) -> bool:
    """Whether it is such a call: nothing is computed in PyTorch that ONNX Runtime could compute."""
    return bool(node.meta.get("number check"))
