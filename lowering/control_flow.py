"""`scan`, and `map` over rows, as ONNX Scans: the body is lowered as a graph of its own.

PyTorch runs a body operator by operator at every step, each through several dispatches. Where a body needs PyTorch, the whole loop stays there: for
an operator that has no kernel, or a far slower one, for random or complex numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.errors import LoweringError
from ort_backend.lowering.fx_nodes import attribute, copied, values_read
from ort_backend.lowering.kernels.slow_compositions import is_slow_loop
from ort_backend.lowering.provenance import newest
from ort_backend.lowering.registry import Unsupported
from ort_backend.lowering.scan import Body, scan
from ort_backend.lowering.simplify import simplify
from ort_backend.target import OrtTarget

if TYPE_CHECKING:
    from ort_backend.lowering.graph import GraphLowering

SCAN, MAP = torch.ops.higher_order.scan, torch.ops.higher_order.map_impl
LOOPS = (SCAN, MAP)


def write(lowering: GraphLowering, node: fx.Node) -> tuple[list[Any] | None, str | None]:
    """The results of a loop over rows, None for one that nothing reads; or why its body does not run on ONNX Runtime alone."""
    mark = len(lowering.graph)
    try:
        return lowering.stamped(_loop(lowering, node), node.meta["val"]), None
    except Unsupported as unsupported:
        lowering.graph.remove(newest(lowering.graph, len(lowering.graph) - mark), safe=True)
        return None, str(unsupported)


def _loop(lowering: GraphLowering, node: fx.Node) -> list[ir.Value | None]:
    if lowering.target.device_type != "cpu":
        raise Unsupported("loops on a device are PyTorch's")
    if len(node.args) != (4 if node.target is SCAN else 3):
        raise Unsupported("it takes other arguments than in torch 2.13")
    if not lowering.strict and is_slow_loop(node, lowering.target):
        raise Unsupported("its body takes longer in plain ONNX operators than by PyTorch's kernels")
    body: Any = attribute(node.args[0])  # type: ignore[arg-type]
    first, rows, read = node.args[1:4] if node.target is SCAN else ((), *node.args[1:3])
    states, steps = ([_tensor(lowering, one) for one in part] for part in (first, rows))  # type: ignore[union-attr]
    operands = [lowering.value(one) for one in read]  # type: ignore[union-attr]
    wanted = values_read(node, len(node.meta["val"]))
    results = [i for i in range(len(states), len(wanted)) if wanted[i]]

    def step(written: Body, before: list[ir.Value], row: list[ir.Value], weights: list[Any]) -> tuple[list[ir.Value], list[ir.Value]]:
        inside = iter(weights)
        arguments = [*before, *row, *(next(inside) if isinstance(one, ir.Value) else one for one in operands)]
        after = _lowered(lowering, written, body, arguments, [*range(len(states)), *results])
        return after[: len(states)], after[len(states) :]

    weights = [one for one in operands if isinstance(one, ir.Value)]
    made = scan(lowering.op, step, states, steps, weights, ranks=[node.meta["val"][i].dim() for i in results])
    values = dict(zip((*range(len(states)), *results), made, strict=True))
    return [values.get(i) for i in range(len(wanted))]


def _tensor(lowering: GraphLowering, node: Any) -> ir.Value:
    value = lowering.value(node)
    if not isinstance(value, ir.Value):
        raise Unsupported(f"{node} is no tensor")
    return value


def _lowered(lowering: GraphLowering, body: Body, module: fx.GraphModule, arguments: Sequence[Any], wanted: Sequence[int]) -> list[ir.Value]:
    """Writes `module` into a body: of its results the `wanted` ones, each a value of its own."""
    inner = lowering.inside(body.name)
    graph = _prepared(module, inner.target)
    try:
        for placeholder, argument in zip(graph.find_nodes(op="placeholder"), arguments, strict=True):
            inner.bind(placeholder, argument)
        inner.run([one for one in graph.nodes if one.op in ("call_function", "get_attr")])
        for i in wanted:
            inner.graph.outputs.append(_own(inner, graph.output_node().args[0][i]))  # type: ignore[index]
    except LoweringError as refusal:
        inner.graph.outputs.clear()
        inner.graph.remove(list(inner.graph), safe=True)  # what they read is read by others
        raise Unsupported(f"in its body, {str(refusal).splitlines()[0]}") from refusal
    return body.take(inner.graph)


def _prepared(module: fx.GraphModule, target: OrtTarget) -> fx.Graph:
    """The graph of a body as the lowerings take it, a copy: what is a copy for PyTorch alone, so that no result shares memory, is a view."""
    graph = copied(module).graph
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            view = getattr(getattr(torch.ops.aten, node.target._opname.removesuffix("_copy"), None), node.target._overloadname, None)
            node.target = view if view is not None and view.is_view else node.target
    simplify(graph, target, everywhere=True)
    return graph


def _own(inner: GraphLowering, node: Any) -> ir.Value:
    """A result of the body, which may be no input of it, nor something around it, nor another result."""
    value = inner.value(node) if isinstance(node, fx.Node) else node
    if not isinstance(value, ir.Value):
        raise Unsupported(f"it returns {node}, which is no tensor")
    return value if value.producer() is not None and value not in inner.graph.outputs else inner.fresh(value, node.meta["val"])
