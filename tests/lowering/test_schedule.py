"""How a graph divides into sessions and eager PyTorch between them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import fx

from ort_backend.lowering.splitting.regions import LEAST_NODES, Schedule, frontier, schedule
from ort_backend.target import OrtTarget

aten = torch.ops.aten


def _random_graph(seed: int) -> tuple[fx.Graph, dict[fx.Node, str]]:
    """Sums and views of what came before, and which of them are to run in PyTorch."""
    choose = random.Random(seed)
    graph, refused_nodes = fx.Graph(), {}
    values = [graph.placeholder("x")]
    for _ in range(40):
        kind = choose.choice([aten.add.Tensor, aten.mm.default, aten.t.default])
        count = 1 if kind is aten.t.default else 2
        values.append(graph.call_function(kind, tuple(choose.choice(values[-6:]) for _ in range(count))))
        if kind is not aten.t.default and choose.random() < 0.3:
            refused_nodes[values[-1]] = "chance"
    for node in values:
        node.meta["val"] = torch.empty(3, 3, device="meta")
    graph.output((values[-1],))
    graph.eliminate_dead_code()
    return graph, {node: reason for node, reason in refused_nodes.items() if node in set(graph.nodes)}


@pytest.mark.parametrize("seed", range(20))
def test_every_step_has_what_it_needs(seed: int) -> None:
    graph, refused_nodes = _random_graph(seed)
    plan = schedule(graph, OrtTarget(contrib_ops=frozenset()), refused_nodes)
    done: set[fx.Node] = {node for node in graph.nodes if node.op == "placeholder"}
    for step in plan.steps:
        for node in step.nodes:
            assert step.on_ort == (node not in plan.reasons)
            done.add(node) if set(frontier(node.all_input_nodes, plan.free)) <= done else pytest.fail(f"{node} runs too early")
    computed = {node for node in graph.nodes if node.op == "call_function"}
    assert computed == {node for step in plan.steps for node in step.nodes} | plan.free
    assert all(one.on_ort != other.on_ort for one, other in itertools.pairwise(plan.steps))
    assert len(plan.steps) <= _changes(graph, plan) + 2
    assert all(reason == "chance" or node not in refused_nodes for node, reason in plan.reasons.items())


def _changes(graph: fx.Graph, plan: Schedule) -> int:
    """The most changes between ONNX Runtime and PyTorch on any path through the graph: no schedule has fewer steps than one more."""
    longest: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node not in plan.free:
            before = [one for one in frontier(node.all_input_nodes, plan.free) if one.op != "placeholder"]
            longest[node] = max((longest[one] + ((one in plan.reasons) != (node in plan.reasons)) for one in before), default=0)
    return max(longest.values(), default=0)


def test_small_regions_are_those_without_a_product() -> None:
    def steps(operators: list[Any]) -> list[tuple[bool, int]]:
        graph = fx.Graph()
        value = x = graph.placeholder("x")
        for operator in operators:
            value = graph.call_function(operator, (value, x))
        graph.output((value,))
        for node in graph.nodes:
            node.meta["val"] = torch.empty(3, 3, device="meta")
        middle = [node for node in graph.nodes if node.target is aten.atan2.default]
        plan = schedule(graph, OrtTarget(contrib_ops=frozenset()), dict.fromkeys(middle, "chance"))
        return [(step.on_ort, len(step.nodes)) for step in plan.steps]

    few, enough = [aten.add.Tensor] * (LEAST_NODES - 1), [aten.add.Tensor] * LEAST_NODES
    assert steps([*few, aten.atan2.default]) == [(False, LEAST_NODES)]
    assert steps([*enough, aten.atan2.default]) == [(True, LEAST_NODES), (False, 1)]
    assert steps([aten.mm.default, aten.atan2.default, *few]) == [(True, 1), (False, LEAST_NODES)]
    assert steps(few) == [(True, LEAST_NODES - 1)], "what ONNX Runtime runs whole is never too small"
