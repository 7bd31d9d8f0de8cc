"""Reshapes beside nodes that call PyTorch on a CUDA device become views inside the calls.

What such a node returns is not ONNX Runtime's memory, and a `Reshape` behind it copies: of the 316 in a step of GPT-2 small under autocast 139 did,
2.1 GB (1.19.2, seen over stand-in libraries). A view of a tensor costs a microsecond, and no kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

import onnx_ir as ir

from ort_backend.lowering.python_op import callable_of

_VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}  # of their first input
Sizes = tuple[int, ...]  # -1 for the one that is not known before the run


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of a tensor along one of its dimensions: as `Tensor.narrow`."""

    axis: int
    start: int
    length: int


# A tensor in another shape, or a part of it.
View = Sizes | Part


@dataclasses.dataclass(frozen=True)
class Views:
    """What a call does with tensors before and behind what is called: views, one of the other, by the number of the input or result."""

    inputs: Mapping[int, Sequence[View]] = dataclasses.field(default_factory=dict)
    outputs: Mapping[int, Sequence[View]] = dataclasses.field(default_factory=dict)


def view_in_calls(graph: ir.Graph, takes_parts: Set[str] = frozenset()) -> dict[str, Views]:
    """Rewrites the graph in place; what its calls do instead, by the names of their callables.

    Args:
        graph: With nodes that call PyTorch.
        takes_parts: Names of callables that take tensors with gaps, as parts of others are, as fast as contiguous ones.
    """
    inputs: dict[ir.Node, dict[int, Sequence[View]]] = {}
    outputs: dict[ir.Node, dict[int, Sequence[View]]] = {}
    nodes = [(node, name) for node in graph if (name := callable_of(node)) is not None]
    for node, _ in nodes:
        for i in range(len(node.outputs)):
            _view_output(node, i, inputs, outputs)
    for node, _ in nodes:
        for i, value in enumerate(node.inputs):
            if value is not None and i not in inputs.get(node, {}):
                _view_input(node, i, value, inputs)
    _drop_unread(graph)
    for node, name in nodes:
        if name in takes_parts:
            for i, value in enumerate(node.inputs):
                if value is not None:
                    _take_part(node, i, value, inputs, takes_parts)
    _drop_unread(graph)
    return {name: Views(inputs.get(node, {}), outputs.get(node, {})) for node, name in nodes}


def _drop_unread(graph: ir.Graph) -> None:
    for node in reversed(graph):
        if node.op_type in (*_VIEWS, "Split") and not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)


def _view_output(node: ir.Node, i: int, inputs: dict[ir.Node, dict[int, Sequence[View]]], outputs: dict[ir.Node, dict[int, Sequence[View]]]) -> None:
    """Where all but calls of PyTorch reads a result in one other shape, the call returns it in that one; the other calls view it as it was."""
    value = node.outputs[i]
    uses = list(value.uses())
    reshapes = [use.node for use in uses if use.node.op_type in _VIEWS and use.idx == 0]
    others = [use for use in uses if use.node not in reshapes]
    if not reshapes or value.is_graph_output() or any(callable_of(use.node) is None for use in others):
        return
    if any(use.node.graph is not node.graph for use in uses):  # the body of a loop or branch, whose calls stay as they are
        return
    views = {_sizes(reshape.outputs[0]) for reshape in reshapes}
    view, before = views.pop() if len(views) == 1 else None, _sizes(value) if others else ()
    first, *copies = (reshape.outputs[0] for reshape in reshapes)
    if view is None or before is None or any(copy.is_graph_output() for copy in copies):
        return
    for copy in copies:
        copy.replace_all_uses_with(first)
    for use in others:
        use.node.replace_input_with(use.idx, first)
        inputs.setdefault(use.node, {})[use.idx] = [before]
    outputs.setdefault(node, {})[i] = [view]
    _take_over(value, first)


def _take_over(value: ir.Value, reshaped: ir.Value) -> None:
    """Puts `value` where `reshaped` is read, also as a graph output, in its shape and under its name."""
    reshape = reshaped.producer()
    assert reshape is not None and isinstance(reshape.graph, ir.Graph)
    name, value.shape, reshaped.name = reshaped.name, reshaped.shape, f"{reshaped.name}_before"
    reshaped.replace_all_uses_with(value, replace_graph_outputs=True)
    reshape.graph.remove(reshape, safe=True)
    value.name = name


def _view_input(node: ir.Node, i: int, value: ir.Value, inputs: dict[ir.Node, dict[int, Sequence[View]]]) -> None:
    """What nothing but calls of PyTorch reads in a shape of its own they view themselves."""
    reshape = value.producer()
    if reshape is None or reshape.op_type not in _VIEWS or value.is_graph_output() or (view := _sizes(value)) is None:
        return
    source = reshape.inputs[0]
    if source is None or any(callable_of(use.node) is None for use in value.uses()):
        return
    inputs.setdefault(node, {})[i] = [view]
    node.replace_input_with(i, source)


def _sizes(value: ir.Value) -> Sizes | None:
    """None where they do not tell a view: two are not known, or a tensor has no elements."""
    if value.shape is None:
        return None
    sizes = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return None if sizes.count(-1) > 1 or 0 in sizes else sizes


def _take_part(node: ir.Node, i: int, value: ir.Value, inputs: dict[ir.Node, dict[int, Sequence[View]]], takes_parts: Set[str]) -> None:
    """Where all parts of a tensor are for such calls alone, they take the tensor: nobody copies the parts."""
    split = value.producer()
    if split is None or split.op_type != "Split" or (source := split.inputs[0]) is None or source.shape is None:
        return
    readers = [use.node for part in split.outputs for use in part.uses()]
    if any(part.is_graph_output() or not _has_sizes(part) for part in split.outputs) or not _has_sizes(source):
        return
    if any(reader.graph is not node.graph or callable_of(reader) not in takes_parts for reader in readers):
        return
    axis = split.attributes["axis"].as_int() % len(source.shape) if "axis" in split.attributes else 0
    lengths = [int(part.shape[axis]) for part in split.outputs]  # type: ignore[index,arg-type]
    number = split.outputs.index(value)
    part = Part(axis, sum(lengths[:number]), lengths[number])
    for use in list(value.uses()):
        of_reader = inputs.setdefault(use.node, {})
        of_reader[use.idx] = [part, *of_reader.get(use.idx, ())]
        use.node.replace_input_with(use.idx, source)


def _has_sizes(value: ir.Value) -> bool:
    return value.shape is not None and all(isinstance(size, int) and size > 0 for size in value.shape)
