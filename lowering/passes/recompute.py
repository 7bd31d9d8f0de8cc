"""Activations that the backward computes again instead of keeping them.

AOTAutograd's min-cut partitioner decides which: what `torch.utils.checkpoint` has tagged, and what
`torch._functorch.config.activation_memory_budget` asks for. In a joint graph that stays whole the decision is written down as copies of those
nodes among the backward's. Two things could undo it: ONNX Runtime merges nodes that compute the same, and it may run a node that needs no
tangent as early as it likes. Therefore a copy reads `behind(x, gradient)`: `x` itself, in its own memory, once `gradient` is there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx

from ort_backend.lowering.dtypes import carrier
from ort_backend.lowering.functions.autograd_function import BACKWARD, FORWARD
from ort_backend.lowering.fx_nodes import tangents_of
from ort_backend.lowering.later import BEHIND
from ort_backend.lowering.passes.cheap import cheap_again
from ort_backend.lowering.passes.effects import has_effect
from ort_backend.lowering.passes.hoist_random import draw_masks_only
from ort_backend.lowering.passes.saved_views import drop_unread
from ort_backend.lowering.splitting.partition import ancestors, descendants, is_collective, is_random

aten = torch.ops.aten

# Reorderings of a parameter become part of the matrix product that reads them: there is nothing to keep.
_WEIGHT_VIEWS = {aten.t.default, aten.transpose.int, aten.permute.default}

_KEEP = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

# BatchNorm's running averages are inputs of the forward that it writes to. No gradient depends on them in training: no copy may read them.
_BATCH_NORM = aten._native_batch_norm_legit_functional.default
_TRAINING = 5  # (input, weight, bias, mean, var, training, ...)


def recompute(module: fx.GraphModule, num_fwd_outputs: int) -> int:
    """Writes into the backward of a joint graph, in place, copies of the forward nodes that it is to compute again.

    Args:
        module: The joint graph, its random draws hoisted.
        num_fwd_outputs: How many of its results are the forward's.

    Returns:
        The number of nodes that the backward computes again.
    """
    graph = module.graph
    held = _held_by_functions(graph)
    for node in graph.nodes:
        if "recompute" in node.meta and (node in held or not _may_run_twice(node)):
            node.meta["recompute"] = _KEEP
    outputs, forward = _forward(graph, num_fwd_outputs)
    names = _chosen(module, num_fwd_outputs) if is_wanted(graph) else cheap_again(graph, forward, outputs)
    if not names:
        return 0
    forget_averages(graph)
    chosen = [node for node in graph.nodes if node.name in names and _is_tensor(node) and _may_run_twice(node) and node not in held]
    return _Copies(graph, forward, chosen).write()


def keep_draws(graph: fx.Graph) -> None:
    """Tells the partitioner to keep random draws in graphs where it is to recompute: it would draw others, or keep the generator's state.

    Of a dropout that is its mask.
    """
    budget = has_budget(graph)
    draw_masks_only(graph, [node for node in graph.nodes if node.target is aten.native_dropout.default and node.args[2:3] != (False,)])
    for node in graph.nodes:
        if (budget or "recompute" in node.meta) and is_random(node):
            for one in (node, *(user for user in node.users if user.target is operator.getitem)):
                one.meta["recompute"] = _KEEP


def prefer_cheap(graph: fx.Graph, num_fwd_outputs: int) -> bool:
    """Tells the partitioner to compute again what is cheap, of whose operators it knows few; returns whether there is any."""
    outputs, forward = _forward(graph, num_fwd_outputs)
    names = cheap_again(graph, forward, outputs) - {node.name for node in _held_by_functions(graph)}
    for node in graph.nodes:
        if node.name in names:
            node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    return bool(names)


def _forward(graph: fx.Graph, num_fwd_outputs: int) -> tuple[list[fx.Node], set[fx.Node]]:
    """The results of a joint graph's forward, and the nodes that compute it."""
    outputs = [node for node in list(graph.output_node().args[0])[:num_fwd_outputs] if isinstance(node, fx.Node)]  # type: ignore[arg-type]
    forward = ancestors(list(outputs))
    # A LayerNorm's mean, too, which only the backward reads.
    forward.update(node for node in graph.nodes if node.target is operator.getitem and node.args[0] in forward)
    return outputs, forward


def delay(backward: fx.GraphModule) -> None:
    """Lets what a backward half computes again wait for the gradients in front of it.

    It needs no tangent: what runs as early as it can would hold the activations of all blocks at once.
    """
    graph = backward.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    reached = descendants(calls, [node for node in placeholders if node.name.startswith("tangents")])
    saved = {node for node in placeholders if not node.name.startswith("primals") and isinstance(node.meta.get("val"), torch.Tensor)}
    gradient: fx.Node | None = None
    late: set[fx.Node] = set()
    for node in calls:
        if node in reached:
            gradient = node if _is_awaited(node) else gradient
        elif not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        elif (
            gradient is not None
            and node.target not in _WEIGHT_VIEWS
            and (source := next((one for one in node.all_input_nodes if one in saved), None))
        ):
            with graph.inserting_before(node):
                made = graph.call_function(BEHIND, (source, gradient))
            made.meta = {"val": source.meta["val"]}
            node.replace_input_with(source, made)
            late.add(node)
    backward.recompile()


def _is_awaited(node: fx.Node) -> bool:
    """Whether a gradient is a tensor that ONNX Runtime holds, and not a transposed one, that it would write out for whoever waits for it."""
    fake = node.meta.get("val")
    return isinstance(fake, torch.Tensor) and node.target not in _WEIGHT_VIEWS and (kind := carrier(fake.dtype)) is not None and kind.native


def forget_averages(graph: fx.Graph) -> None:
    """Takes BatchNorm's running averages from its backward in training, where it has no use for them."""
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7]:  # train
            node.args = (*node.args[:3], None, None, *node.args[5:])


def forget_averages_again(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Takes BatchNorm's running averages from what a backward half computes again, and from what is saved for it. They have changed by then."""
    again = [node for node in backward.graph.nodes if _without_averages(node)]
    if again:
        drop_unread(forward, backward, num_fwd_outputs)


def _without_averages(node: fx.Node) -> bool:
    """Makes a BatchNorm that also updates averages one that does not; returns whether it was one."""
    if node.target is not _BATCH_NORM or not node.args[_TRAINING]:
        return False
    node.target, node.args = aten._native_batch_norm_legit.no_stats, (*node.args[:3], *node.args[_TRAINING:])
    node.meta["val"] = node.meta["val"][:3]
    return True


def _held_by_functions(graph: fx.Graph) -> set[fx.Node]:
    """What the `ctx` of a user's Function refers to: the very memory that its forward read or wrote, there as long as its backward reads it."""
    return {node for call in graph.find_nodes(op="call_function", target=BACKWARD) for node in call.args[2] if isinstance(node, fx.Node)}


def is_wanted(graph: fx.Graph) -> bool:
    """Whether the program asks for recomputation: by a checkpoint, or by a memory budget."""
    return has_budget(graph) or any("recompute" in node.meta for node in graph.nodes)


def has_budget(graph: fx.Graph) -> bool:
    """Whether a memory budget is set, for all graphs or for a part of this one."""
    if torch._functorch.config.activation_memory_budget < 1.0:
        return True
    # Read in torch 2.13.
    return any("memory_budget" in node.meta or "region_activation_memory_budget" in (node.meta.get("custom") or {}) for node in graph.nodes)


def _may_run_twice(node: fx.Node) -> bool:
    """Whether a second run gives the same and has no effect: not so for draws, users' own Python, and what is kept for its order."""
    source = _maker(node)
    once = source.target in (FORWARD, BACKWARD) or is_random(source) or is_collective(source) or has_effect(source)
    return source.op == "call_function" and not once


def _maker(node: fx.Node) -> fx.Node:
    """The node itself, or the one whose results it is one of."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_tensor(node: fx.Node) -> bool:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _chosen(module: fx.GraphModule, num_fwd_outputs: int) -> set[str]:
    """Names of the nodes that the partitioner puts into the backward although no tangent reaches them."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(module.graph, {}))
    for node in copied.nodes:
        if node.meta.get("val", copied) is None:  # an operator that returns nothing; the partitioner knows one by its schema, unless it finds a value
            del node.meta["val"]
    # It would merge what computes the same, under one name.
    with torch._functorch.config.patch(cse=False):
        _, backward = min_cut_rematerialization_partition(fx.GraphModule(module, copied), None, num_fwd_outputs=num_fwd_outputs)
    calls = [node for node in backward.graph.nodes if node.op == "call_function"]
    reached = descendants(calls, tangents_of(backward.graph))
    return {node.name for node in calls if node not in reached}


class _Copies:
    """The copies, each in front of the first node with a tangent that needs it, directly or through other copies."""

    def __init__(self, graph: fx.Graph, forward: set[fx.Node], chosen: list[fx.Node]) -> None:
        self._graph = graph
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._tangents = tangents_of(graph)
        self._last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1]
        calls = [node for node in graph.nodes if node.op == "call_function"]
        self._reached = descendants(calls, self._tangents)
        self._readers = [node for node in calls if node not in forward and node not in set(chosen)]
        self._needed_by = self._first_readers(chosen)
        self._copy: dict[fx.Node, fx.Node] = {}
        self._distinct: set[fx.Node] = set()  # copies that no optimiser can take for their originals
        self._delayed: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    def write(self) -> int:
        """Writes the copies and lets the backward read them; returns how many there are."""
        for node in sorted(self._needed_by, key=self._order.__getitem__):
            with self._graph.inserting_before(self._needed_by[node]):
                self._copy[node] = self._write(node)
        for reader in self._readers:
            reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), self._now)
        return sum(node.target is not operator.getitem for node in self._copy)

    def _first_readers(self, chosen: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """For each chosen node that is needed, the first reader in the backward of it, or of what is computed from it."""
        readers = set(self._readers)
        first: dict[fx.Node, fx.Node] = {}
        for node in reversed(chosen):
            found = [first.get(user, user) for user in node.users if user in first or user in readers]
            if found:
                first[node] = min(found, key=self._order.__getitem__)
        return first

    def _write(self, node: fx.Node) -> fx.Node:
        sources = list(dict.fromkeys(self._now(source) for source in node.all_input_nodes))
        distinct = any(source in self._distinct for source in sources)
        swap: dict[fx.Node, fx.Node] = {}
        if not distinct and not self._is_weight_view(node):
            tensors = [source for source in sources if isinstance(source.meta.get("val"), torch.Tensor)]
            # A parameter is there all the time: rather an activation.
            kept = next((source for source in tensors if source.op != "placeholder"), tensors[0] if tensors else None)
            if kept is not None:
                swap[kept] = self._behind(kept, self._gradient(self._needed_by[node]))
                distinct = True
        made = self._graph.node_copy(node, lambda source: swap.get(self._now(source), self._now(source)))
        _without_averages(made)
        if distinct:
            self._distinct.add(made)
        return made

    @staticmethod
    def _is_weight_view(node: fx.Node) -> bool:
        source: Any = node
        while source.target in _WEIGHT_VIEWS:
            source = source.args[0]
        return source is not node and source.op == "placeholder" and node.meta["val"].dim() == 2

    def _gradient(self, reader: fx.Node) -> fx.Node:
        """A tensor that the reader waits for anyway. Not a transposed one: it would be written out for this, where a product reads it as it is."""
        waits = [node for node in reader.all_input_nodes if node in self._reached and isinstance(node.meta.get("val"), torch.Tensor)]
        waits = [node.args[0] if node.target in _WEIGHT_VIEWS else node for node in waits]  # type: ignore[misc]
        return next((node for node in waits if (kind := carrier(node.meta["val"].dtype)) is not None and kind.native), self._tangents[0])

    def _behind(self, x: fx.Node, gradient: fx.Node) -> fx.Node:
        if (x, gradient) not in self._delayed:
            # As early as it can stand: copies in front of several readers may share it.
            with self._graph.inserting_after(max(x, gradient, self._last_placeholder)):
                made = self._graph.call_function(BEHIND, (x, gradient))
            made.meta = {key: x.meta[key] for key in ("val", "stack_trace") if key in x.meta}
            self._delayed[x, gradient] = made
        return self._delayed[x, gradient]

    def _now(self, node: fx.Node) -> fx.Node:
        return self._copy.get(node, node)
