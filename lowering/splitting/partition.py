"""Where AOTAutograd's joint graph divides into forward and backward, and what each side needs of the other."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.functions.autograd_function import BACKWARD, FORWARD
from ort_backend.lowering.functions.function_site import SITES
from ort_backend.lowering.fx_nodes import attribute
from ort_backend.lowering.splitting.dependencies import depend_on, run_by

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class JointPartition:
    """The joint graph, divided.

    Attributes:
        primals: Placeholders that the forward takes from AOTAutograd.
        draws: Placeholders of random tensors (`passes.hoist_random`).
        tangents: Placeholders that the backward takes.
        forward: Nodes that the forward outputs need, in order.
        backward: All other live nodes, in order.
        outputs: The forward's results: nodes and constants.
        gradients: The backward's results: nodes and None.
        saved_primals: Indices of primals whose memory the backward reads, directly or through views.
        changing: Indices of those that are written to behind the forward, and on which the backward depends: it reads copies.
        taken: Nodes of the forward that the backward reads or hands on.
        read: Nodes in whose memory, before or after lowering, lies what the backward reads of the forward, arguments among them.
        copied: Nodes that the backward reads, and that lie in copies which the program makes of primals: AOTAutograd does of those it writes to.
        replayed: Indices of primals on which the backward depends at all.
        depends_on: For each gradient, the indices of the tangents that it depends on.
    """

    primals: tuple[fx.Node, ...]
    draws: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    saved_primals: tuple[int, ...]
    changing: tuple[int, ...]
    taken: Set[fx.Node]
    read: frozenset[fx.Node]
    copied: tuple[fx.Node, ...]
    replayed: tuple[int, ...]
    depends_on: tuple[frozenset[int], ...]


def divide(graph: fx.Graph, num_fwd_outputs: int, written: Collection[fx.Node] = ()) -> JointPartition:
    """Divides a joint graph; `written` are the primals that the program writes to behind the forward.

    The forward has what its outputs depend on, every random operator, so that these keep their order, the user's own Python, and the sizes of
    primals, which the program may write to before the backward; all else waits for the backward.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    tangents = [node for node in placeholders if node.name.startswith("tangents")]
    draws = [node for node in placeholders if "draw" in node.meta]
    primals = [node for node in placeholders if node not in tangents and node not in draws]
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    outputs, gradients = results[:num_fwd_outputs], results[num_fwd_outputs:]

    calls = [node for node in graph.nodes if node.op in ("call_function", "get_attr")]
    dependent = descendants(calls, [*tangents, *(node for node in calls if run_by(node))])
    kept = [node for node in calls if is_random(node) or is_collective(node) or node.target in (FORWARD, BACKWARD) or node.meta.get("effect")]
    needed = ancestors([node for node in outputs if isinstance(node, fx.Node)] + [node for node in kept if node not in dependent])
    alive = needed | ancestors([node for node in gradients if isinstance(node, fx.Node)] + kept)
    needed |= ancestors([node for node in calls if node in alive and node.target in _MEASURES and node.args[0] in primals])
    forward = [node for node in calls if node in needed]
    backward = [node for node in calls if node in alive and node not in needed]

    taken = _taken(backward, gradients)
    copied = [node for node in forward if node in taken and _is_copied(node)]
    read = {root(node) for node in taken.difference(copied)}
    reached = ancestors(list(backward), _sources_of_values)
    return JointPartition(
        primals=tuple(primals),
        draws=tuple(draws),
        tangents=tuple(tangents),
        forward=tuple(forward),
        backward=tuple(backward),
        outputs=tuple(outputs),
        gradients=tuple(gradients),
        saved_primals=tuple(i for i, node in enumerate(primals) if node in read and node not in written and _is_tensor(node)),
        changing=tuple(i for i, node in enumerate(primals) if node in reached and node in written),
        taken=taken.intersection(forward),
        read=frozenset(map(root, taken)),
        copied=tuple(copied),
        replayed=tuple(i for i, node in enumerate(primals) if node in reached and _is_tensor(node)),
        depends_on=depend_on(gradients, calls, tangents),
    )


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a random generator. Attention is tagged so, but draws nothing where its dropout is 0."""
    if node.target is FORWARD:
        return SITES[node.args[2]].behaviour.is_random  # type: ignore[index]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _draws_inside(node)
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    position = next((i for i, argument in enumerate(node.target._schema.arguments) if argument.name == "dropout_p"), None)
    if position is None:
        return True
    return bool((node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)) != 0.0)


def _draws_inside(node: fx.Node) -> bool:
    """Whether the bodies of control flow draw, or the operator that a higher-order one calls."""
    bodies = [attribute(one) for one in node.all_input_nodes if one.op == "get_attr"]
    inner = [one for body in bodies if isinstance(body, fx.GraphModule) for one in body.graph.nodes]
    called = [argument for argument in node.args if isinstance(argument, torch._ops.OpOverload)]
    return any(torch.Tag.nondeterministic_seeded in one.tags for one in called) or any(is_random(one) for one in inner)


def is_collective(node: fx.Node) -> bool:
    """Whether processes exchange tensors there: all of them must do so in one order."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional" and "wait" not in node.target._opname


def root(node: fx.Node, *, through_copies: bool = True) -> fx.Node:
    """The node whose memory `node` may share: the base of a chain of views and, unless told otherwise, of copies that the lowering leaves out."""
    return view_chain(node, through_copies=through_copies)[-1]


def view_chain(node: fx.Node, *, through_copies: bool = True) -> list[fx.Node]:
    """The chain: `node`, what it is a view of, what that is one of, and so on to its base."""
    chain = [node]
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node) and shares_memory(node, through_copies):
        node = node.args[0]
        chain.append(node)
    return chain


# What reads a tensor's sizes and steps, and none of its elements.
_MEASURES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)
_BATCH_NORM, _BATCH_NORM_BACKWARD = aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default
_COPIES = (aten.clone.default, aten.lift_fresh_copy.default, aten._to_copy.default, aten._unsafe_view.default, aten.contiguous.default)


def shares_memory(node: fx.Node, through_copies: bool) -> bool:
    """Whether a node's result lies, or after lowering may lie, in the memory of its first argument."""
    if node.target is operator.getitem:
        return shares_memory(node.args[0], through_copies)  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in _COPIES:
        return through_copies
    first = next(iter(node.target._schema.arguments), None)
    return first is not None and first.alias_info is not None and not first.alias_info.is_write


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _taken(backward: Iterable[fx.Node], gradients: Sequence[Any]) -> set[fx.Node]:
    """Everything that backward nodes take from the forward side, or that is returned as a gradient directly."""
    inside = set(backward)
    taken = {source for node in inside for source in node.all_input_nodes if source not in inside}
    return taken | {node for node in gradients if isinstance(node, fx.Node) and node not in inside}


def _is_copied(node: fx.Node) -> bool:
    """Whether a real tensor lies in a copy of a placeholder, in the placeholder's own memory order."""
    if not _is_tensor(node) or node.meta["val"].is_complex():
        return False
    base = root(node, through_copies=False)
    return base.target is aten.clone.default and not base.kwargs and base.args[0].op == "placeholder"  # type: ignore[union-attr]


def descendants(calls: Iterable[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    """`sources` and the nodes among `calls`, which are in order, that depend on one of them."""
    found = set(sources)
    for node in calls:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(targets: list[fx.Node], sources: Callable[[fx.Node], Iterable[fx.Node]] = attrgetter("all_input_nodes")) -> set[fx.Node]:
    """`targets` and all nodes that one of them depends on, each on its `sources`. Empties the list."""
    found: set[fx.Node] = set()
    while targets:
        node = targets.pop()
        if node not in found:
            found.add(node)
            targets.extend(sources(node))
    return found


def _sources_of_values(node: fx.Node) -> list[fx.Node]:
    """What the values of a node depend on: those of a BatchNorm that trains, but for its new running statistics, not on the running ones."""
    norm: Any = node.args[0] if node.target is operator.getitem else node
    forward = norm is not node and norm.target is _BATCH_NORM and norm.args[5] and node.args[1] < 3  # type: ignore[operator]
    if forward or (node.target is _BATCH_NORM_BACKWARD and node.args[7]):
        return [one for i, one in enumerate(norm.args) if i not in (3, 4) and isinstance(one, fx.Node)]
    return node.all_input_nodes
