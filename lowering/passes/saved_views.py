"""What is saved for a backward becomes contiguous: sessions take contiguous tensors without a copy, no others.

The backward gets what its saved views are views of, and takes the views again. What the program writes to in between it gets as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false

from ort_backend.lowering.memory_order import READS_STRIDES
from ort_backend.lowering.splitting.partition import root

aten = torch.ops.aten


def save_bases(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Rewrites both halves of a partition, in place.

    Args:
        forward: Returns `num_fwd_outputs` outputs, then the saved tensors, then the saved sizes.
        backward: Takes the saved sizes, the saved tensors, then the tangents.
        num_fwd_outputs: See `forward`.
    """
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    saved: list[fx.Node] = results[num_fwd_outputs:]
    tensors = [node for node in saved if isinstance(node.meta.get("val"), torch.Tensor)]
    sizes = [node for node in saved if isinstance(node.meta.get("val"), torch.SymInt)]
    if len(tensors) + len(sizes) < len(saved):
        return
    arriving = dict(zip([*sizes, *tensors], backward.graph.nodes))  # saved node -> the backward's placeholder
    chains = {node: chain for node in tensors if (chain := _chain(node, arriving))}
    if not chains:
        return
    kept = list(dict.fromkeys([*(node for node in tensors if node not in chains), *(root(node, through_copies=False) for node in chains)]))
    for base in kept:
        if base not in arriving:
            with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
                arriving[base] = backward.graph.placeholder(base.name)
            arriving[base].meta = dict(base.meta)
    for node, chain in chains.items():
        arriving[node].replace_all_uses_with(_again(backward.graph, chain, arriving))
        backward.graph.erase_node(arriving[node])
    _arrange(backward.graph, [arriving[node] for node in (*sizes, *kept)])
    _save(forward.graph, results[:num_fwd_outputs], [*kept, *sizes])
    forward.recompile()
    backward.recompile()


def lay_out(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Says of the saved tensors that nobody but the backward sees that they are contiguous, so that sessions make them so."""
    if any(node.target in READS_STRIDES for half in (forward, backward) for node in half.graph.nodes):
        return
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    seen = {root(node) for node in results[:num_fwd_outputs] if isinstance(node, fx.Node)}
    arriving = {node.target: node for node in backward.graph.nodes if node.op == "placeholder"}  # whose name is another where one is computed again
    for node in results[num_fwd_outputs:]:
        fake = node.meta.get("val")
        if (
            isinstance(fake, torch.Tensor)
            and node.op == "call_function"
            and root(node) is node
            and node not in seen
            and not is_contiguous_or_false(fake)
        ):
            node.meta["val"] = arriving[node.name].meta["val"] = torch.empty_like(fake, memory_format=torch.contiguous_format)


def save_copies(forward: fx.GraphModule, num_fwd_outputs: int, written: Collection[str]) -> None:
    """Saves copies of those arguments that AOTAutograd writes to behind the forward; PyTorch's partition does not allow for it (seen in torch 2.13).

    `written` has the names of their placeholders.
    """
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    for i in range(num_fwd_outputs, len(results)):
        if results[i].op == "placeholder" and results[i].name in written:
            with forward.graph.inserting_before(forward.graph.output_node()):
                copied = forward.graph.call_function(aten.clone.default, (results[i],))
            copied.meta = {**results[i].meta, "val": torch.empty_like(results[i].meta["val"])}
            results[i] = copied
    _save(forward.graph, results[:num_fwd_outputs], results[num_fwd_outputs:])
    forward.recompile()


def drop_unread(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Saves nothing for a backward that it does not read."""
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    arriving = {node.target: node for node in backward.graph.nodes if node.op == "placeholder"}
    unread = [node for node in results[num_fwd_outputs:] if isinstance(node.meta.get("val"), torch.Tensor) and not arriving[node.name].users]
    for node in unread:
        backward.graph.erase_node(arriving[node.name])
    _save(forward.graph, results[:num_fwd_outputs], [node for node in results[num_fwd_outputs:] if node not in unread])
    forward.recompile()
    backward.recompile()


def _chain(node: fx.Node, arriving: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The views from a base to `node`; none if it is no view, if the backward lacks a size that they need, or if autograd counts it apart."""
    base, chain = root(node, through_copies=False), []
    while node is not base:
        if node.meta.get("saved_tensor_with_no_vc_check") or any(source not in arriving for source in node.all_input_nodes[1:]):
            return []
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return chain[::-1]


def _again(graph: fx.Graph, chain: Sequence[fx.Node], arriving: dict[fx.Node, fx.Node]) -> fx.Node:
    """The chain of views, taken behind the last placeholder."""
    made = dict(arriving)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for node in chain:
            made[node] = graph.node_copy(node, lambda one: made[one])
    return made[chain[-1]]


def _arrange(graph: fx.Graph, first: Sequence[fx.Node]) -> None:
    """Puts placeholders in front of all others, in this order."""
    for node in reversed(first):
        front = next(iter(graph.nodes))
        if front is not node:
            front.prepend(node)


def _save(graph: fx.Graph, outputs: Sequence[Any], saved: Sequence[fx.Node]) -> None:
    """Makes a forward return other saved values."""
    output = graph.output_node()
    described = output.meta.get("desc")
    if described is not None:  # AOTAutograd's names of the results, the saved ones by number
        output.meta["desc"] = described[: len(outputs) + len(saved)]
    output.args = ((*outputs, *saved),)
