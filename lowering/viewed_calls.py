"""Reshapes beside nodes that call PyTorch on a CUDA device become views inside the calls.

What such a node returns is not ONNX Runtime's memory, and a `Reshape` behind it copies: of the 316 in a step of GPT-2 small under autocast 139 did,
2.1 GB (1.19.2, seen over stand-in libraries). A view of a tensor costs a microsecond, and no kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.python_op import PythonCall
from ort_backend.target import TRITON

_VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}  # of their first input
# The sizes of a view, -1 for the one that is not known before the run.
View = tuple[int, ...]


def view_in_calls(graph: ir.Graph, calls: Sequence[PythonCall]) -> list[PythonCall]:
    """Rewrites the graph in place; the calls of its nodes, with the views in them."""
    inputs: dict[ir.Node, dict[int, View]] = {}
    outputs: dict[ir.Node, dict[int, View]] = {}
    nodes = [node for node in graph if node.op_type == TRITON]
    for node in nodes:
        for i in range(len(node.outputs)):
            _view_output(node, i, inputs, outputs)
    for node in nodes:
        for i, value in enumerate(node.inputs):
            if value is not None and i not in inputs.get(node, {}):
                _view_input(node, i, value, inputs)
    for node in reversed(graph):
        if node.op_type in _VIEWS and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    views = {node.attributes["func_name"].as_string(): (inputs.get(node, {}), outputs.get(node, {})) for node in nodes}
    return [_with_views(call, *views[call.name]) if call.name in views else call for call in calls]


def _view_output(node: ir.Node, i: int, inputs: dict[ir.Node, dict[int, View]], outputs: dict[ir.Node, dict[int, View]]) -> None:
    """Where all but calls of PyTorch reads a result in one other shape, the call returns it in that one; the other calls view it as it was."""
    value = node.outputs[i]
    uses = list(value.uses())
    reshapes = [use.node for use in uses if use.node.op_type in _VIEWS and use.idx == 0]
    others = [use for use in uses if use.node not in reshapes]
    if not reshapes or value.is_graph_output() or any(use.node.op_type != TRITON for use in others):
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
        inputs.setdefault(use.node, {})[use.idx] = before
    outputs.setdefault(node, {})[i] = view
    _take_over(value, first)


def _take_over(value: ir.Value, reshaped: ir.Value) -> None:
    """Puts `value` where `reshaped` is read, also as a graph output, in its shape and under its name."""
    reshape = reshaped.producer()
    assert reshape is not None and isinstance(reshape.graph, ir.Graph)
    name, value.shape, reshaped.name = reshaped.name, reshaped.shape, f"{reshaped.name}_before"
    reshaped.replace_all_uses_with(value, replace_graph_outputs=True)
    reshape.graph.remove(reshape, safe=True)
    value.name = name


def _view_input(node: ir.Node, i: int, value: ir.Value, inputs: dict[ir.Node, dict[int, View]]) -> None:
    """What nothing but calls of PyTorch reads in a shape of its own they view themselves."""
    reshape = value.producer()
    if reshape is None or reshape.op_type not in _VIEWS or value.is_graph_output() or (view := _sizes(value)) is None:
        return
    source = reshape.inputs[0]
    if source is None or any(use.node.op_type != TRITON for use in value.uses()):
        return
    inputs.setdefault(node, {})[i] = view
    node.replace_input_with(i, source)


def _sizes(value: ir.Value) -> View | None:
    """None where they do not tell a view: two are not known, or a tensor has no elements."""
    if value.shape is None:
        return None
    sizes = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return None if sizes.count(-1) > 1 or 0 in sizes else sizes


def _with_views(call: PythonCall, inputs: Mapping[int, View], outputs: Mapping[int, View]) -> PythonCall:
    function = call.function
    if not inputs and not outputs or function is None:
        return call
    first = 1 if call.allocates else 0  # of the arguments that are tensors
    arriving = [(first + i, view) for i, view in inputs.items()]
    leaving = list(outputs.items())

    def between_views(*given: Any) -> Sequence[torch.Tensor]:
        arguments = list(given)
        for i, view in arriving:
            arguments[i] = arguments[i].view(view)
        made = list(function(*arguments))
        for i, view in leaving:
            made[i] = made[i].view(view)
        return made

    return dataclasses.replace(call, function=between_views)
