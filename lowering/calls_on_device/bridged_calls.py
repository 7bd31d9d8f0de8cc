"""What lies between two calls of PyTorch on a CUDA device is a call as well, where ONNX Runtime's kernel would do no better.

A ReLU between two convolutions that PyTorch runs ends one node and begins another (`merged_calls`), which costs the host 80 to 120 microseconds, and
the kernel 10 (a machine with an H100, 2026-11). ResNet-50 in bfloat16 had 87 such nodes for its 269 calls, and waited for the host.
Casts of what a call has made for results of the graph, such as gradients of weights, are calls likewise: a node of ONNX Runtime's less for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from ort_backend.lowering.dtypes import to_torch
from ort_backend.lowering.lowered import Outside
from ort_backend.lowering.python_op import MS, PythonCall, Recipe, Slot, callable_of, unique_name
from ort_backend.lowering.splitting.saved import sides_of_yield
from ort_backend.target import TRITON

# PyTorch's functions, which take what the operators take, and are as fast as ONNX Runtime's kernels or faster (`device_kernels`).
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {"Relu": torch.relu, "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul}
_DTYPES = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def bridge_calls(graph: ir.Graph, calls: Sequence[PythonCall]) -> tuple[list[PythonCall], list[Outside]]:
    """Rewrites a graph in place.

    Args:
        graph: With the nodes of the calls.
        calls: All callables of the graph's nodes.

    Returns:
        The callables of new nodes, and what to say of them in the report.
    """
    graph.sort()
    found = _between(graph, {call.name for call in calls})
    made = [(node, _call(node)) for node in found]
    for node, call in made:
        _replace(graph, node, call.name)
    return [call for _, call in made], [_said(node, call) for node, call in made]


def _between(graph: ir.Graph, names: Set[str]) -> list[ir.Node]:
    sides = sides_of_yield(graph)
    called = {node for node in graph if callable_of(node) in names}
    candidates = [node for node in graph if _is_simple(node)]
    leads = set(called)  # to a call on the same side, by nothing but candidates
    for node in reversed(candidates):
        users = [use.node for value in node.outputs for use in value.uses()]
        if any(user in leads and sides.get(user) == sides.get(node) for user in users) or _is_last_cast(node):
            leads.add(node)
    found = []
    for node in candidates:
        if node in leads and _joins(node, called, sides):
            called.add(node)
            found.append(node)
    return found


def _joins(node: ir.Node, called: Set[ir.Node], sides: Mapping[ir.Node, int]) -> bool:
    """Whether it needs calls of its side, and nothing else that is computed there: that might need one of them."""
    makers = [maker for value in node.inputs if value is not None and (maker := value.producer()) is not None]
    beside = [maker for maker in makers if sides.get(maker) == sides.get(node)]
    return bool(beside) and all(maker in called for maker in beside)


def _is_simple(node: ir.Node) -> bool:
    if node.domain or not (node.op_type in _FUNCTIONS or node.op_type == "Cast"):
        return False
    values = [*node.inputs, *node.outputs]
    return all(value is not None and value.dtype in _DTYPES and value.const_value is None for value in values)


def _is_last_cast(node: ir.Node) -> bool:
    value = node.inputs[0]
    assert value is not None
    return node.op_type == "Cast" and node.outputs[0].is_graph_output() and len(value.uses()) == 1 and not value.is_graph_output()


def _call(node: ir.Node) -> PythonCall:
    dtypes = [_dtype(value) for value in (*node.inputs, *node.outputs)]
    slots = tuple(Slot(i, dtype) for i, dtype in enumerate(dtypes[:-1]))
    target: Callable[..., Tensor] = torch.Tensor.to if node.op_type == "Cast" else _FUNCTIONS[node.op_type]
    more: tuple[Any, ...] = (dtypes[-1],) if node.op_type == "Cast" else ()
    recipe = Recipe(target, (*slots, *more), {}, slots, ((None, dtypes[-1], None),))
    title = f"aten::{'to' if node.op_type == 'Cast' else node.op_type.lower()}"
    return PythonCall(unique_name(title), title, functools.partial(_called, target, more), op_type=TRITON, recipe=recipe)


def _dtype(value: ir.Value | None) -> torch.dtype:
    assert value is not None and value.dtype is not None
    return to_torch(value.dtype)


def _called(target: Callable[..., Tensor], more: Sequence[Any], *given: Tensor) -> Sequence[Tensor]:
    return [target(*given, *more)]


def _replace(graph: ir.Graph, node: ir.Node, name: str) -> None:
    old = node.outputs[0]
    new = ir.Value(name=old.name, type=old.type, shape=old.shape)
    old.name = f"{old.name}_before"
    call = ir.Node(MS, TRITON, node.inputs, [ir.AttrString("func_name", name)], version=1, outputs=[new], metadata_props=dict(node.metadata_props))
    graph.insert_before(node, call)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _said(node: ir.Node, call: PythonCall) -> Outside:
    props: Mapping[str, str] = node.metadata_props
    return Outside(call.title, "it lies between calls of PyTorch", props.get("stack_trace", ""), True)
