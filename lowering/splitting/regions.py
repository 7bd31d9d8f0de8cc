"""Which nodes of a graph run in ONNX Runtime sessions and which in eager PyTorch between them, and in what order.

For an ONNX Runtime without `PythonOp`: what it has no kernel for cannot run inside a session. A region is a set of nodes that one session
computes. Views and sizes cost nothing and belong to no side: whoever reads them computes them from what they are views of.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.errors import LoweringError
from ort_backend.lowering import symbolic
from ort_backend.lowering.control_flow import CONTROL_FLOW
from ort_backend.lowering.functions.autograd_function import BACKWARD, FORWARD
from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.kernels import fused_attention, optimizer_steps
from ort_backend.lowering.kernels.row_sums import ADD_ROWS, IN_PLACE
from ort_backend.lowering.kernels.slow_compositions import has_slow_body, is_slow
from ort_backend.lowering.kernels.write_back import IN_ARGUMENT, WRITE_BACK
from ort_backend.lowering.lowered import NotOnOrt
from ort_backend.lowering.passes.effects import has_effect, is_dropped
from ort_backend.lowering.splitting.partition import is_random, shares_memory
from ort_backend.lowering.splitting.region_memory import cut, saved_values
from ort_backend.target import OrtTarget

aten = torch.ops.aten

FUNCTION = "an autograd.Function runs the user's own Python"

# A session's call costs about as much as this many calls of PyTorch's operators (measured: `benchmarks/regions.py`).
LEAST_NODES = 4
TOO_SMALL = f"fewer than {LEAST_NODES} nodes without a matrix product or convolution: a session for them would cost more than it saves"

SLOWER = "in plain ONNX operators it takes longer than PyTorch's kernel"

# Operators whose kernels take so long that the cost of a session's call does not count.
_HEAVY = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Step:
    """Nodes that run together, in order: in one session, or one after the other in eager PyTorch."""

    nodes: tuple[fx.Node, ...]
    on_ort: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A graph as a sequence of steps.

    Attributes:
        steps: In the order in which they run. Neighbours are of one kind only where they are parts of what would hold too much memory.
        free: Nodes that are in no step: views, sizes and constants, which are computed wherever they are read.
        reasons: Why each node in PyTorch is there, in graph order.
        trial: The lowering by which it was found out what ONNX Runtime can run, if that is one session.
    """

    steps: tuple[Step, ...]
    free: frozenset[fx.Node]
    reasons: dict[fx.Node, str]
    trial: GraphLowering | None


def schedule(graph: fx.Graph, target: OrtTarget, refused: dict[fx.Node, str], *, strict: bool = False) -> Schedule:
    """Divides a graph into steps.

    Args:
        graph: A functional graph without dead code.
        target: What the sessions run on.
        refused: Nodes that must run in PyTorch whatever the target says, and why.
        strict: Whether ONNX Runtime runs all that it can, even where PyTorch is faster.
    """
    calls = [node for node in graph.nodes if node.op in ("call_function", "get_attr") and not is_dropped(node)]
    chosen = {} if strict else {node: reason for node in calls if (reason := _chosen(node, target)) is not None}
    reasons, trial = _not_on_ort(graph, calls, target, {**chosen, **refused})
    free = frozenset(node for node in calls if node not in reasons and _is_free(node))
    nodes = [node for node in calls if node not in free]
    needs = {node: _needs(node, free) for node in nodes}
    for before, after in _pairs([node for node in nodes if _keeps_its_place(node)]):
        needs[after].add(before)
    steps = _phases(nodes, needs, reasons)
    while any(step.on_ort for step in steps) and len(steps) > 1:
        small = [node for step in steps if step.on_ort and _is_small(step) for node in step.nodes]
        if not small:
            break
        reasons.update(dict.fromkeys(small, TOO_SMALL))
        steps = _phases(nodes, needs, reasons)
    if not target.cuda_graphs:  # each captured run has memory of its own
        steps = _in_parts(steps, graph, free)
    is_one = sum(step.on_ort for step in steps) == 1 and TOO_SMALL not in reasons.values()
    return Schedule(steps, free, {node: reasons[node] for node in nodes if node in reasons}, trial if is_one else None)


def is_value(node: fx.Node) -> bool:
    """Whether a node only picks one result of the node before it."""
    return node.target is operator.getitem


def frontier(nodes: Iterable[Any], free: frozenset[fx.Node]) -> list[fx.Node]:
    """What must be there before `nodes` can be computed by way of free nodes only: themselves, where they are not free. In graph order."""
    found: dict[fx.Node, None] = {}
    waiting = [node for node in nodes if isinstance(node, fx.Node)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node not in free:
            found[node] = None
            continue
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(new)
        waiting.extend(new)
    return sorted(found)


def between(nodes: Iterable[fx.Node], free: frozenset[fx.Node]) -> list[fx.Node]:
    """The free nodes by way of which `nodes` are computed, in graph order."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source in free and source not in found]
        found.update(new)
        waiting.extend(new)
    return sorted(found)


# -- what ONNX Runtime can run


def _not_on_ort(
    graph: fx.Graph, calls: Sequence[fx.Node], target: OrtTarget, refused: dict[fx.Node, str]
) -> tuple[dict[fx.Node, str], GraphLowering]:
    """Why nodes do not run on ONNX Runtime, found by lowering the graph node by node: this lowering. What cannot be lowered becomes an input."""
    trial = GraphLowering(target, "trial", strict=True)
    hidden: set[fx.Node] = set()  # values that ONNX cannot hold
    reasons: dict[fx.Node, str] = {}

    def enter(node: fx.Node) -> None:
        fake = node.meta.get("val")
        try:
            if isinstance(fake, torch.Tensor) or symbolic.is_symbolic(fake):
                trial.add_input(node, node.name)
            else:
                hidden.add(node)
        except LoweringError:
            hidden.add(node)

    for node in graph.nodes:
        if node.op == "placeholder":
            enter(node)
    for node in calls:
        if is_value(node) and node.args[0] in reasons:
            reasons[node] = reasons[node.args[0]]  # type: ignore[index]
        elif node in refused:
            reasons[node] = refused[node]
        elif (reason := _refusal(trial, node, hidden)) is not None:
            reasons[node] = reason
        if node in reasons:
            enter(node)
    return reasons, trial


def _refusal(trial: GraphLowering, node: fx.Node, hidden: set[fx.Node]) -> str | None:
    if node.target in (FORWARD, BACKWARD):
        return FUNCTION
    if is_random(node) or has_effect(node):
        return "it draws random numbers or has effects, in the order of the program"
    if any(source in hidden for source in node.all_input_nodes):
        return "it reads what no ONNX graph can hold"
    try:
        trial.run([node])
        if symbolic.is_symbolic(node.meta.get("val")):
            trial.value(node)
    except NotOnOrt as refusal:
        return refusal.reason
    except LoweringError as refusal:
        return str(refusal).split("\n")[0]
    return None


def _chosen(node: fx.Node, target: OrtTarget) -> str | None:
    """Why PyTorch's kernel runs a node, whether or not ONNX Runtime has operators to write it with."""
    if node.target in fused_attention.KERNELS and target.kernels != "onnxruntime":
        return fused_attention.REASON
    if node.target is ADD_ROWS:
        return IN_PLACE
    if node.target is WRITE_BACK:
        return IN_ARGUMENT
    if node.target in optimizer_steps.IMPLEMENTATIONS:
        return optimizer_steps.IN_PARAMETERS
    return SLOWER if is_slow(node, target) or (node.target in CONTROL_FLOW and has_slow_body(node, target)) else None


def _is_free(node: fx.Node) -> bool:
    return node.op == "get_attr" or symbolic.is_symbolic(node.meta.get("val")) or shares_memory(node, through_copies=False)


def _keeps_its_place(node: fx.Node) -> bool:
    """Whether a node must run behind all nodes like it that stand before it."""
    is_higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)  # may draw: `run_with_rng_state`
    return is_random(node) or has_effect(node) or is_higher_order or node.target in (FORWARD, BACKWARD)


# -- the order


def _needs(node: fx.Node, free: frozenset[fx.Node]) -> set[fx.Node]:
    """The nodes of steps that must run before `node`."""
    return {source for source in frontier(node.all_input_nodes, free) if source.op != "placeholder"}


def _pairs(nodes: Sequence[fx.Node]) -> Iterable[tuple[fx.Node, fx.Node]]:
    return zip(nodes, nodes[1:])


def _phases(nodes: Sequence[fx.Node], needs: dict[fx.Node, set[fx.Node]], reasons: dict[fx.Node, str]) -> tuple[Step, ...]:
    """Steps with as few changes between ONNX Runtime and PyTorch as the dependencies allow, from whichever side it takes fewer."""
    first, second = (_alternate(nodes, needs, reasons, on_ort) for on_ort in (True, False))
    return first if len(first) <= len(second) else second


def _alternate(nodes: Sequence[fx.Node], needs: dict[fx.Node, set[fx.Node]], reasons: dict[fx.Node, str], on_ort: bool) -> tuple[Step, ...]:
    """Runs all that can be run on one side, then on the other, and so on."""
    place = {node: i for i, node in enumerate(nodes)}
    missing = {node: len(needs[node]) for node in nodes}
    readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node in nodes:
        for source in needs[node]:
            readers[source].append(node)
    ready: dict[bool, list[int]] = {True: [], False: []}
    for node in nodes:
        if not missing[node]:
            ready[node not in reasons].append(place[node])
    steps: list[Step] = []
    while ready[True] or ready[False]:
        run: list[fx.Node] = []
        while ready[on_ort]:
            node = nodes[ready[on_ort].pop(0)]
            run.append(node)
            for reader in readers[node]:
                missing[reader] -= 1
                if not missing[reader]:
                    bisect.insort(ready[reader not in reasons], place[reader])
        if run:
            steps.append(Step(tuple(sorted(run)), on_ort))
        on_ort = not on_ort
    return tuple(steps)


def _in_parts(steps: Sequence[Step], graph: fx.Graph, free: frozenset[fx.Node]) -> tuple[Step, ...]:
    """The steps, those sessions divided that would hold much of what the forward has saved, or other steps have made, until their end."""
    saved = set(saved_values(graph))
    if not saved:  # what a forward takes is the caller's
        return tuple(steps)
    reads = {node: set(frontier(node.all_input_nodes, free)) for step in steps for node in step.nodes}
    reader = {source: i for i, step in enumerate(steps) for node in step.nodes for source in reads[node]}
    results = set(frontier(list(graph.output_node().args[0]), free))  # type: ignore[arg-type]
    made = {node: i for i, step in enumerate(steps) for node in step.nodes}
    going: dict[int, list[fx.Node]] = collections.defaultdict(list)
    for node, i in reader.items():
        if node not in results and (node in saved or made.get(node, i) < i):
            going[i].append(node)
    parts: list[Step] = []
    for i, step in enumerate(steps):
        if not step.on_ort:
            parts.append(step)
            continue
        wanted = {node for node in step.nodes if node in results or reader.get(node, i) > i}
        parts.extend(Step(tuple(nodes), True) for nodes in cut(step.nodes, reads, going[i], wanted))
    return tuple(parts)


def _is_small(step: Step) -> bool:
    heavy = any(getattr(node.target, "overloadpacket", None) in _HEAVY or node.target in CONTROL_FLOW for node in step.nodes)
    return not heavy and sum(not is_value(node) for node in step.nodes) < LEAST_NODES
