"""Which tangents the gradients of a joint graph depend on, and by which of them autograd runs the backward of a user's Function.

The two are not the same. A Function whose backward returns None for a tensor that another Function made lets autograd run the other one's backward
all the same, with zeros or, after `set_materialize_grads(False)`, with None (seen in torch 2.13): what that gives are gradients of zeros, where there
would be None. The graph has no edge there, see `note_runs`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.functions.autograd_function import BACKWARD, FORWARD
from ort_backend.lowering.functions.function_site import SITES
from ort_backend.lowering.fx_nodes import tangents_of
from ort_backend.lowering.later import BEHIND

_RUN_BY = "run_by"  # in the `meta` of a node of `BACKWARD`: the indices of tangents by which it runs without a gradient
_NONE: frozenset[int] = frozenset()


def reach(calls: Iterable[fx.Node], tangents: Sequence[fx.Node]) -> dict[fx.Node, frozenset[int]]:
    """For each of `calls`, which are in order, the indices of the `tangents` that it depends on."""
    found: dict[fx.Node, frozenset[int]] = {node: frozenset((i,)) for i, node in enumerate(tangents)}
    for node in calls:
        found[node] = _of(node, found)
    return found


def _of(node: fx.Node, found: Mapping[fx.Node, frozenset[int]]) -> frozenset[int]:
    sources = node.all_input_nodes[:1] if node.target is BEHIND else node.all_input_nodes  # the others it waits for
    return run_by(node).union(*(found.get(source, _NONE) for source in sources))


def depend_on(gradients: Iterable[Any], calls: Iterable[fx.Node], tangents: Sequence[fx.Node]) -> tuple[frozenset[int], ...]:
    """For each of `gradients`, nodes or None, the indices of the `tangents` that it depends on; `calls` are in order."""
    found = reach(calls, tangents)
    return tuple(found.get(node, _NONE) for node in gradients)


def run_by(backward: fx.Node) -> frozenset[int]:
    """The tangents by which a Function's backward runs where it has no gradient."""
    return backward.meta.get(_RUN_BY, _NONE)


def note_runs(graph: fx.Graph) -> None:
    """Writes down for each Function of a joint graph, in place, the tangents by which autograd runs its backward without a gradient."""
    backwards = {forward: node for node in graph.find_nodes(op="call_function", target=BACKWARD) if (forward := _forward_of(node)) is not None}
    if len(backwards) < 2:
        return
    found = reach((), tangents_of(graph))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found[node] = _of(node, found)
        if node.target is BACKWARD and found[node] and (forward := _forward_of(node)) is not None:
            for maker in _left_without(forward):
                if (other := backwards.get(maker)) is not None:  # behind this one, as autograd has run them
                    other.meta[_RUN_BY] = run_by(other) | found[node]


def await_tangents(graph: fx.Graph) -> None:
    """Lets backwards that run without a gradient wait, in place, for a tangent by which they do: a partition took them for the forward's."""
    tangents = tangents_of(graph)
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        if numbers := run_by(node):
            handle: Any = node.args[1]
            with graph.inserting_before(node):
                later = graph.call_function(BEHIND, (handle, tangents[min(numbers)]))
            later.meta = {"val": handle.meta["val"]}
            node.args = (node.args[0], later, *node.args[2:])


def _forward_of(backward: fx.Node) -> fx.Node | None:
    handle: Any = backward.args[1]
    is_made_here = handle.target is operator.getitem and handle.args[0].target is FORWARD
    return handle.args[0] if is_made_here else None


def _left_without(forward: fx.Node) -> Iterator[fx.Node]:
    """The Functions that made those tensors of a Function's, themselves or by way of PyTorch's operators, for which its backward returns None."""
    tensors, _, number = forward.args
    site: Any = SITES[number]  # type: ignore[index]
    waiting = [one for i, one in enumerate(tensors) if site.needs_gradient(i) and not site.behaviour.gradients[i]]  # type: ignore[arg-type]
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is operator.getitem and node.args[0].target is FORWARD:
            maker, place = node.args
            if place not in SITES[maker.args[2]].behaviour.non_differentiable:
                yield maker
        elif node.target is not torch.ops.aten.detach.default:
            waiting.extend(node.all_input_nodes)
