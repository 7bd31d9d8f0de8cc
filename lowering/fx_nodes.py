"""What an FX node was given, and what it stands for."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

aten = torch.ops.aten

# Results that are their first argument.
REFERENCES = {aten.detach.default, aten.alias.default}
# The same elements in another shape.
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def graph_modules(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """A traced module, and those inside it, such as the bodies of checkpoints."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """The tangents of a joint or a backward graph, in order."""
    return [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Another module with a graph of its own, over the same tensors and modules."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an operator by their names in its schema, with the defaults of those that are left out."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return {**{one.name: one.default_value for one in schema}, **dict(zip((one.name for one in schema), node.args)), **node.kwargs}


class Convolution(NamedTuple):
    """What a convolution, or the backward of one, convolves and how; tensors are fake."""

    image: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    stride: Any
    padding: Any
    dilation: Any
    transposed: bool
    groups: int


def convolution_of(node: fx.Node) -> Convolution | None:
    """The convolution that a node is, or is the backward of; None for any other node."""
    if node.target not in (aten.convolution.default, aten.convolution_backward.default):
        return None
    given = arguments_of(node)
    tensors = (given["input"], given["weight"], given.get("grad_output", node))
    return Convolution(*(one.meta["val"] for one in tensors), *(given[name] for name in Convolution._fields[3:]))


def source_of(value: Any) -> Any:
    """The node that a node refers to; anything else as it is."""
    while isinstance(value, fx.Node) and value.target in REFERENCES:
        value = value.args[0]
    return value


def untransposed(node: Any) -> tuple[fx.Node, bool]:
    """(matrix, whether `node` is its transpose)."""
    swapped = False
    while is_transpose(node):
        node, swapped = node.args[0], not swapped
    return node, swapped


def is_transpose(node: Any) -> bool:
    """Whether a node is the transpose of a matrix."""
    if node.target is aten.permute.default:
        return [axis % 2 for axis in node.args[1]] == [1, 0]
    return node.target is aten.t.default or (node.target is aten.transpose.int and node.args[1] % 2 != node.args[2] % 2)


def call_beside(graph: fx.Graph, beside: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call, where the graph inserts, with the metadata of `beside`, and as a fake tensor what it gives of those of its arguments."""
    made = graph.call_function(target, args, kwargs)
    values, named = fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
    made.meta = {**beside.meta, "val": target(*values, **named)}
    return made


def nodes_in(tree: Any) -> list[fx.Node]:
    """The nodes in nested arguments, in order, each as often as it stands there."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, fx.Node)]


def values_read(node: fx.Node, count: int) -> list[bool]:
    """Of a node with `count` results, whether something reads each."""
    read = {user.args[1] if user.target is operator.getitem else None for user in node.users}
    return [i in read or None in read for i in range(count)]


def written_arguments(graph: fx.Graph, outputs: int | None = None) -> dict[fx.Node, int]:
    """The placeholders that AOTAutograd writes to behind a graph, and at which of the first `outputs` results (None: all) their new values stand.

    From its descriptors (there since torch 2.9).
    """
    described = (graph.output_node().meta.get("desc") or ())[:outputs]
    places = {str(one.mutated_input): i for i, one in enumerate(described) if hasattr(one, "mutated_input")}
    return {node: places[name] for node in graph.find_nodes(op="placeholder") if (name := str(node.meta.get("desc"))) in places}


def attribute(node: fx.Node) -> Any:
    """What a `get_attr` node gets."""
    owner: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        owner = getattr(owner, part)
    return owner
