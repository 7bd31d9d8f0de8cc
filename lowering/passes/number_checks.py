"""Checks of numbers that follow from values, such as `torch._check(mask.nonzero().shape[0] == 4)`: all of a graph in one call of PyTorch.

Dynamo's guards hold for the sizes of arguments; what depends on values (`torch._dynamo.config.capture_scalar_outputs`) is known when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.eager_nodes import evaluation
from ort_backend.lowering.symbolic import is_symbolic

aten = torch.ops.aten


def join_number_checks(graph: fx.Graph) -> bool:
    """Puts one call in place of all `_assert_scalar`, in place, where the last one stands.

    It computes with the numbers of its tensors: where a check says that a size is 4, all else in the graph takes it for 4.

    Returns:
        Whether there are any.
    """
    checks = [node for node in graph.nodes if node.target is aten._assert_scalar.default and isinstance(node.args[0], fx.Node)]
    if not checks:
        return False
    computed: set[fx.Node] = set()
    sources: dict[fx.Node, None] = {}
    waiting: list[Any] = [check.args[0] for check in checks]
    while waiting:
        node = waiting.pop()
        if node.op != "call_function" or not is_symbolic(node.meta.get("val")):
            sources[node] = None
        elif node not in computed:
            computed.add(node)
            waiting += node.all_input_nodes
    slots = {node: i for i, node in enumerate([*sources, *sorted(computed)])}
    steps = [evaluation(node, slots) for node in sorted(computed)]
    conditions = [(slots[check.args[0]], str(check.args[1])) for check in checks]
    with graph.inserting_before(checks[-1]):
        call = graph.call_function(_checker(steps, conditions), tuple(sources))
    call.meta = {**checks[-1].meta, "val": None, "effect": True, "number check": True}
    for check in checks:
        graph.erase_node(check)
    return True


def is_number_check(node: fx.Node) -> bool:
    """Whether it is such a call: nothing is computed in PyTorch that ONNX Runtime could compute."""
    return bool(node.meta.get("number check"))


def _checker(steps: Sequence[Callable[[list[Any]], Any]], conditions: Sequence[tuple[int, str]]) -> Callable[..., None]:
    """A function of the sources' values. Each step adds a number to them; it raises PyTorch's error for the first condition that does not hold."""

    def check(*sources: Any) -> None:
        values = list(sources)
        for step in steps:
            values.append(step(values))
        for place, message in conditions:
            aten._assert_scalar.default(values[place], message)

    check.__name__ = "torch._check"
    return check
