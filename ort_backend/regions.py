"""Graphs for an ONNX Runtime without training kernels: sessions with eager PyTorch between them.

AOTAutograd's min-cut partition gives a forward and a backward graph (`min_cut`). `lowering.splitting.regions` divides each into steps; here the steps
become sessions and callables over one list of values, which `runtime.region_graph` runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.boundary import add_outputs, device_of, input_of, is_fixed
from ort_backend.errors import LoweringError
from ort_backend.lowering.functions.autograd_function import BACKWARD, FORWARD
from ort_backend.lowering.functions.function_site import SITES
from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.kernels.fused_attention import REASON as FUSED
from ort_backend.lowering.kernels.optimizer_steps import IN_PARAMETERS
from ort_backend.lowering.kernels.row_sums import IN_PLACE
from ort_backend.lowering.kernels.session_choice import far_faster_in_pytorch
from ort_backend.lowering.kernels.write_back import IN_ARGUMENT
from ort_backend.lowering.lowered import Content, LoweredGraph, NotOnOrt, Outside
from ort_backend.lowering.memory_order import READS_STRIDES, order_of, storage_order
from ort_backend.lowering.passes.bare_biases import take_bare_biases
from ort_backend.lowering.passes.batched_rows import index_batches
from ort_backend.lowering.passes.cross_entropy import fuse_cross_entropy
from ort_backend.lowering.passes.effects import drop_unread
from ort_backend.lowering.passes.embedding_gradients import add_rows_in_place, add_to_tied_gradients
from ort_backend.lowering.passes.gathered_parts import gather_parts
from ort_backend.lowering.passes.hoist_random import hoist
from ort_backend.lowering.passes.known_masks import drop_known_masks
from ort_backend.lowering.passes.moved_pairs import move_pairs
from ort_backend.lowering.passes.number_checks import is_number_check, join_number_checks
from ort_backend.lowering.passes.optimizer_steps import fuse_optimizer_steps
from ort_backend.lowering.passes.part_writes import join_writes
from ort_backend.lowering.passes.read_parts import read_parts
from ort_backend.lowering.passes.rotary_embeddings import fuse_rotary_embeddings
from ort_backend.lowering.passes.row_indices import index_rows
from ort_backend.lowering.passes.selected_gradients import mark_gradients, select_gradients
from ort_backend.lowering.passes.strided_sums import add_blocks
from ort_backend.lowering.passes.tall_products import divide_tall_products
from ort_backend.lowering.passes.tangents import loose_among, loosen_tangents
from ort_backend.lowering.passes.write_back import write_back_parts
from ort_backend.lowering.provenance import operator_name, user_line
from ort_backend.lowering.simplify import settle
from ort_backend.lowering.sizes import evaluator
from ort_backend.lowering.splitting.dependencies import depend_on
from ort_backend.lowering.splitting.eager_nodes import evaluation, function_backward
from ort_backend.lowering.splitting.partition import root
from ort_backend.lowering.splitting.region_memory import byte_count, saved_values
from ort_backend.lowering.splitting.regions import FUNCTION, SLOWER, TOO_SMALL, Schedule, Step, between, frontier, is_value, schedule
from ort_backend.runtime.binding import Output
from ort_backend.runtime.loose_tangents import zeros_for
from ort_backend.runtime.region_graph import EagerStep, RegionPlan, SessionStep
from ort_backend.target import OrtTarget


@dataclasses.dataclass(frozen=True)
class RegionLowering:
    """A graph in regions.

    Attributes:
        regions: What the sessions are to be made of.
        content: What is in the graph, for the report.
        plan: What runs. Its sessions are counted from `first_session` on.
    """

    regions: tuple[LoweredGraph, ...]
    content: Content
    plan: RegionPlan


def lower(module: fx.GraphModule, target: OrtTarget, *, strict: bool, name: str, is_half: bool = False, first_session: int = 0) -> RegionLowering:
    """Lowers a graph without gradients, or one half of a joint graph that `split` has made.

    Raises:
        LoweringError: `strict` is set and a node does not run on ONNX Runtime.
    """
    graph = module.graph
    settle(graph)
    if not is_half:  # else `split` has
        fuse_cross_entropy(graph, half=False)
        mark_gradients(graph, everywhere=True)
    select_gradients(graph, lambda node: not strict and far_faster_in_pytorch(node, target))
    drop_known_masks(graph)
    if not is_half:
        fuse_rotary_embeddings(graph, target)
    take_bare_biases(graph)
    index_rows(graph)
    index_batches(graph)
    add_blocks(graph)
    read_parts(graph)
    gather_parts(graph)
    is_backward = any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)
    if not strict:
        if not is_backward:  # whose forward has checked
            join_number_checks(graph)
        write_back_parts(graph, target, alone=True)
        if not is_half:
            fuse_optimizer_steps(graph, target, alone=True)
    join_writes(graph, target)
    move_pairs(graph, target)
    divide_tall_products(graph, target)
    if not strict:
        add_rows_in_place(graph, target)
    add_to_tied_gradients(graph, target)
    draws = hoist(graph).draws
    drop_unread(graph)
    if is_half and not target.cuda_graphs:  # a captured run has fixed sizes
        loosen_tangents(graph)
    refused: dict[fx.Node, str] = {}
    while True:
        plan = schedule(graph, target, refused, strict=strict)
        try:
            regions = _Regions(graph, plan, target, name)
            break
        except _Refused as refusal:  # a region saw less than the whole graph did
            refused[refusal.node] = refusal.reason
    outside = [_outside(node, reason) for node, reason in plan.reasons.items() if _counts(node, reason)]
    for one in outside:
        if strict and not one.is_choice:
            raise NotOnOrt(one.operator, one.reason, one.where)
    models = tuple(region.lowered for region in regions.of_step.values())
    calls = [node for node in plan.reasons if node.target in (FORWARD, BACKWARD)]
    content = Content(
        outside=tuple(outside),
        fx_nodes=sum(not is_value(node) for step in plan.steps for node in step.nodes),
        onnx_nodes=sum(model.onnx_nodes for model in models) + len(outside) + len(calls),
        kept_bytes=sum(byte_count(node.meta.get("val")) for node in saved_values(graph)),  # for the example sizes
        functions=tuple(SITES[node.args[2]].name for node in calls if node.target is FORWARD and not is_backward),  # type: ignore[index]
        sessions=len(models),
        python_ops=False,
    )
    return RegionLowering(models, content, _Writer(graph, plan, regions, draws, first_session).plan())


# Reasons for what ONNX Runtime could run as well.
_CHOICES = (TOO_SMALL, SLOWER, FUSED, IN_PLACE, IN_ARGUMENT, IN_PARAMETERS)


def _outside(node: fx.Node, reason: str) -> Outside:
    return Outside(operator_name(node.target), reason, user_line(node), is_choice=reason in _CHOICES)


def _counts(node: fx.Node, reason: str) -> bool:
    return reason != FUNCTION and not is_value(node) and node.op == "call_function" and not is_number_check(node)


class _Refused(Exception):
    """A node that a region cannot run after all."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        self.node, self.reason = node, reason


@dataclasses.dataclass(frozen=True)
class _Region:
    """One session to be.

    Attributes:
        lowered: Its ONNX graph.
        inputs: The nodes whose values it takes.
        outputs: What it gives back.
        results: The nodes that `outputs` are the values of.
        fetched: The node of each output of the ONNX graph.
    """

    lowered: LoweredGraph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[Output, ...]
    results: tuple[fx.Node, ...]
    fetched: tuple[fx.Node, ...]


class _Regions:
    """The regions of a graph, each lowered by itself."""

    def __init__(self, graph: fx.Graph, plan: Schedule, target: OrtTarget, name: str) -> None:
        self._graph, self._plan, self._target = graph, plan, target
        self._free = frozenset(node for node in plan.free if not self._lies_in_order(node))
        read = _read_outside(graph, plan)
        several = sum(step.on_ort for step in plan.steps) > 1
        self.of_step: dict[int, _Region] = {}
        for i, step in enumerate(plan.steps):
            if step.on_ort:
                its_name = f"{name}.{len(self.of_step)}" if several else name
                self.of_step[i] = self._lower(i, [node for node in step.nodes if node in read[i]], its_name)

    def _lower(self, place: int, results: Sequence[fx.Node], name: str) -> _Region:
        if (trial := self._plan.trial) is not None:
            there = {node for step in self._plan.steps[:place] for node in step.nodes}
            trial.graph.name = name
            region = _region(trial, list(self._graph.nodes), results)
            # A size may have been read off a tensor that has it, and that PyTorch computes behind the session.
            if all(node in there or node.op == "placeholder" for node in region.inputs):
                return region
        return _region(*self._lower_alone(self._plan.steps[place], name), results)

    def _lower_alone(self, step: Step, name: str) -> tuple[GraphLowering, list[fx.Node]]:
        """A region by itself, and what it takes: in the lowering of a graph with several it cannot be told which nodes are whose."""
        inside = set(step.nodes)
        inputs = [node for node in frontier([s for n in step.nodes for s in n.all_input_nodes], self._free) if node not in inside]
        lowering = GraphLowering(self._target, name, strict=True)
        for node in inputs:
            fake = node.meta["val"]
            if isinstance(fake, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                lowering.add_input(node, node.name)
            else:
                lowering.bind(node, fake)
        for node in sorted([*step.nodes, *between(step.nodes, self._free)]):
            try:
                lowering.run([node])
            except NotOnOrt as refusal:
                raise _Refused(node, refusal.reason) from None
            except LoweringError as refusal:
                raise _Refused(node, str(refusal).split("\n")[0]) from None
        return lowering, inputs

    def _lies_in_order(self, node: fx.Node) -> bool:
        """Whether a view of what no session makes is in order, and what it is taken from is not: rows of pixels, of a picture in `channels_last`.

        A session takes what is in order without a copy, and would have to lay the other out anew, and the view once more.
        """
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node.target in READS_STRIDES or not all(_is_real_tensor(one.meta.get("val")) for one in (node, source)):
            return False
        base = root(node, through_copies=False)
        made_outside = base in self._plan.reasons or base.op == "placeholder"
        return made_outside and order_of(node.meta["val"]) is None and order_of(source.meta["val"]) is not None


def _is_real_tensor(fake: Any) -> bool:
    return isinstance(fake, torch.Tensor) and not fake.is_complex()


def _region(lowering: GraphLowering, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> _Region:
    outputs, fetched = add_outputs(lowering, results, ())
    lowered = lowering.finish()
    return _Region(lowered, _drop_unused_inputs(lowered.model.graph, inputs), outputs, tuple(results), tuple(fetched))


def _drop_unused_inputs(graph: ir.Graph, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Removes the inputs that nothing reads; returns the nodes of the others."""
    by_name = {node.name: node for node in nodes}
    for value in [value for value in graph.inputs if not value.uses() and not value.is_graph_output()]:
        graph.inputs.remove(value)
    return tuple(by_name[str(value.name)] for value in graph.inputs)


def _read_outside(graph: fx.Graph, plan: Schedule) -> dict[int, set[fx.Node]]:
    """For each step, which of its nodes other steps read, or are results of the graph or what results are views of."""
    step_of = {node: i for i, step in enumerate(plan.steps) for node in step.nodes}
    read: dict[int, set[fx.Node]] = {i: set() for i in range(len(plan.steps))}
    for i, step in enumerate(plan.steps):
        for source in frontier([source for node in step.nodes for source in node.all_input_nodes], plan.free):
            if step_of.get(source, i) != i:
                read[step_of[source]].add(source)
    for node in frontier(_results(graph), plan.free):
        if node in step_of:
            read[step_of[node]].add(node)
    return read


def _results(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


class _Writer:
    """Writes the steps of a graph over one list of values."""

    def __init__(self, graph: fx.Graph, plan: Schedule, regions: _Regions, draws: Sequence[Any], first_session: int) -> None:
        self._graph, self._schedule, self._regions, self._draws = graph, plan, regions, tuple(draws)
        self._sessions = itertools.count(first_session)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        arguments = [node for node in placeholders if "draw" not in node.meta]
        self._arguments = arguments
        self._slots = {node: i for i, node in enumerate([*arguments, *(node for node in placeholders if "draw" in node.meta)])}
        self._undefined = len(self._slots)  # behind the arguments and the draws
        self._size = self._undefined + 1
        self._steps: list[EagerStep | SessionStep] = []
        self._reads: list[list[int]] = []
        self._tangents = [node for node in arguments if node.name.startswith("tangents")]

    def plan(self) -> RegionPlan:
        for i, step in enumerate(self._schedule.steps):
            if step.on_ort:
                self._session(self._regions.of_step[i])
            else:
                for node in step.nodes:
                    self._eager(node)
        results = _results(self._graph)
        for node in results:
            if isinstance(node, fx.Node):
                self._need(node)
        return RegionPlan(
            steps=tuple(self._steps),
            freed=self._freed({self._slots[node] for node in results if isinstance(node, fx.Node)}),
            size=self._size,
            results=tuple(self._slots[node] if isinstance(node, fx.Node) else None for node in results),
            constants=tuple(None if isinstance(node, fx.Node) else node for node in results),
            draws=self._draws,
            depends_on=self._depend_on(results),
            loose=zeros_for(loose_among(self._tangents)),
        )

    def _depend_on(self, gradients: Any) -> tuple[frozenset[int], ...]:
        return depend_on(gradients, [node for node in self._graph.nodes if node.op == "call_function"], self._tangents)

    def _slot(self, node: fx.Node) -> int:
        if node not in self._slots:
            self._slots[node] = self._size
            self._size += 1
        return self._slots[node]

    def _need(self, node: fx.Node) -> None:
        """Computes a free node, unless that is done already."""
        if node not in self._slots:
            self._eager(node)

    def _eager(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            self._need(source)
        if node.target is BACKWARD:
            run = function_backward(node, self._slots, self._undefined, self._depend_on(node.args[0]))
        else:
            run = evaluation(node, self._slots)
        self._reads.append([self._slots[source] for source in node.all_input_nodes])
        self._steps.append(EagerStep(run, self._slot(node), user_line(node)))

    def _session(self, region: _Region) -> None:
        for node in region.inputs:
            self._need(node)
        values = region.lowered.model.graph.inputs
        inputs = tuple(
            input_of(self._slots[node], node.meta["val"], as_shape=value.dtype == ir.DataType.UINT8, may_be_negated=self._may_be_negated(node))
            for node, value in zip(region.inputs, values, strict=True)
        )
        self._reads.append([one.position for one in inputs])
        self._steps.append(
            SessionStep(
                session=next(self._sessions),
                inputs=inputs,
                outputs=region.outputs,
                results=tuple(self._slot(node) for node in region.results),
                devices=tuple(device_of(node) for node in region.fetched),
                shapes=self._shapes(region),
                moving=frozenset(i for i, node in enumerate(region.inputs) if self._moves(node)),
                is_fixed=is_fixed([node.meta["val"] for node in region.inputs], [node.meta["val"] for node in region.fetched]),
            )
        )

    def _may_be_negated(self, node: fx.Node) -> bool:
        """Whether a negation of what a session takes may be pending: not where another session made it, or Dynamo's guards say otherwise."""
        if node in self._schedule.free or node in self._schedule.reasons or node in self._tangents:
            return True
        fake = node.meta["val"]
        return node.op == "placeholder" and isinstance(fake, torch.Tensor) and fake.is_neg()

    def _moves(self, node: fx.Node) -> bool:
        """Whether a node's value lies in other memory at every call: a tangent, a draw, a result of eager PyTorch."""
        return node in self._tangents or "draw" in node.meta or node in self._schedule.reasons

    def _shapes(self, region: _Region) -> Callable[[Sequence[Any]], Sequence[tuple[int, ...]]] | None:
        """The shapes of the region's outputs as ONNX has them; None if one is not known before it ran, or is a number's."""
        fakes = [node.meta["val"] for node in region.fetched]
        if any(one.source != "fetch" or one.dtype is None for one in region.outputs) or any(fake.is_complex() for fake in fakes):
            return None
        sizes = [fake.shape if (order := storage_order(fake)) is None else [fake.shape[d] for d in order] for fake in fakes]
        known = evaluator([size for shape in sizes for size in shape], self._arguments)
        if known is None:
            return None
        ends = [sum(map(len, sizes[: i + 1])) for i in range(len(sizes))]
        starts = [0, *ends]

        def shapes(args: Sequence[Any]) -> list[tuple[int, ...]]:
            numbers = known(args)
            return [numbers[start:end] for start, end in zip(starts, ends)]

        if all(isinstance(size, int) for shape in sizes for size in shape):
            constant = shapes(())
            return lambda args: constant
        return shapes

    def _freed(self, kept: set[int]) -> tuple[tuple[int, ...], ...]:
        """For each step, the places that no later step reads and that are no results."""
        freed: list[tuple[int, ...]] = []
        seen = {*kept, self._undefined}
        for step, reads in zip(reversed(self._steps), reversed(self._reads), strict=True):
            written = step.results if isinstance(step, SessionStep) else (step.result,)
            last = {place for place in (*reads, *written) if place not in seen}
            seen |= last
            freed.append(tuple(sorted(last)))
        return tuple(reversed(freed))
