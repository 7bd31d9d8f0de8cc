"""`torch.cond` as ONNX's If, `scan` and `map` over rows as Scans: each body is lowered as a graph of its own.

PyTorch runs a body operator by operator, each through several dispatches, a loop's at every step. Where a body needs PyTorch, the whole node stays
there: for an operator that has no kernel, or a far slower one, for random or complex numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.errors import LoweringError
from ort_backend.lowering.constants import constant
from ort_backend.lowering.fast_loops import use_fast_loops
from ort_backend.lowering.fast_loops.rewriting import are_named
from ort_backend.lowering.fx_nodes import attribute, copied, values_read
from ort_backend.lowering.kernels.slow_compositions import has_slow_body
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.provenance import newest
from ort_backend.lowering.registry import Unsupported
from ort_backend.lowering.scan import Body, scan
from ort_backend.lowering.simplify import simplify
from ort_backend.lowering.splitting.saved import behind_yield
from ort_backend.lowering.unread import empty
from ort_backend.target import OrtTarget

if TYPE_CHECKING:
    from ort_backend.lowering.graph import GraphLowering

COND, SCAN, MAP = torch.ops.higher_order.cond, torch.ops.higher_order.scan, torch.ops.higher_order.map_impl
CONTROL_FLOW = (COND, SCAN, MAP)


def write(lowering: GraphLowering, node: fx.Node) -> tuple[list[Any] | None, str | None]:
    """The results of a node with bodies, None for one that nothing reads; or why the bodies do not run on ONNX Runtime alone."""
    mark = len(lowering.graph)
    try:
        if lowering.target.device_type != "cpu":
            raise Unsupported("control flow on a device is PyTorch's")
        if not lowering.strict and has_slow_body(node, lowering.target):
            raise Unsupported("its body takes longer in plain ONNX operators than by PyTorch's kernels")
        results = _branches(lowering, node) if node.target is COND else _loop(lowering, node)
        return lowering.stamped(results, node.meta["val"]), None
    except Unsupported as unsupported:
        lowering.graph.remove(newest(lowering.graph, len(lowering.graph) - mark), safe=True)
        return None, str(unsupported)


def _branches(lowering: GraphLowering, node: fx.Node) -> list[ir.Value | None]:
    """An If, whose branches read what is around them where it lies."""
    if len(node.args) != 4 or "unbacked_bindings" in node.meta:
        raise Unsupported("its results have sizes that follow from values")
    given = [lowering.value(one) for one in (node.args[0], *node.args[3])]  # type: ignore[misc]
    if not isinstance(given[0], ir.Value) or given[0].dtype != ir.DataType.BOOL:
        raise Unsupported(f"the condition, {node.args[0]}, is no boolean of the graph")
    wanted = values_read(node, len(node.meta["val"]))
    results = [i for i, fake in enumerate(node.meta["val"]) if wanted[i] and fake is not None]
    if not results:
        return [None] * len(wanted)
    made = _if_behind_yield if behind_yield(lowering.graph)[0] else _if_where_it_stands
    return _at(results, made(lowering, node, given, results), len(wanted))


def _if_where_it_stands(lowering: GraphLowering, node: fx.Node, given: Sequence[Any], results: Sequence[int]) -> list[ir.Value]:
    return _if(lowering, functools.partial(lowering.op.If, _outputs=len(results)), node, given, results)


def _if_behind_yield(lowering: GraphLowering, node: fx.Node, given: Sequence[Any], results: Sequence[int]) -> list[ir.Value]:
    """An If in a Scan of one step, which what is computed goes into as rows; nothing is copied.

    ONNX Runtime 1.19.2 sorts the nodes behind the `YieldOp` by the inputs that they have, and ends the process where a body reads what is none. A
    gradient is the last of states that begin as what it is the gradient of: so it lies where the Scan's caller wants it.
    """
    read = [given[0], *(one for i, one in enumerate(given[1:]) if any(_reads(branch, i) for branch in node.args[1:3]))]
    computed = list(dict.fromkeys(one for one in read if isinstance(one, ir.Value) and one.producer() is not None))
    if not computed:
        return _if_where_it_stands(lowering, node, given, results)
    fakes = {i: node.meta["val"][i] for i in results}
    begins = {i: like for i, fake in fakes.items() if (like := _alike(read, fake, lowering)) is not None}
    order = [*begins, *(i for i in results if i not in begins)]

    def step(body: Body, before: list[ir.Value], rows: list[ir.Value], _weights: list[Any]) -> tuple[list[ir.Value], list[ir.Value]]:
        row_of = dict(zip(computed, rows))
        inside = [row_of.get(one, one) if isinstance(one, ir.Value) else one for one in given]
        made = _if(lowering, functools.partial(body, "If", outputs=len(order)), node, inside, order)
        return made[: len(before)], made[len(before) :]

    first = constant(lowering.op, [0], ir.DataType.INT64)
    rows = [typed(lowering.op.Unsqueeze(one, first), one.dtype, [1, *one.shape]) for one in computed]  # type: ignore[misc]
    made = scan(lowering.op, step, list(begins.values()), rows, ranks=[fakes[i].dim() + 1 for i in order[len(begins) :]])
    values = dict(zip(order, [*made[: len(begins)], *(lowering.op.Squeeze(one, first) for one in made[len(begins) :])], strict=True))
    return [values[i] for i in results]


def _reads(branch: Any, i: int) -> bool:
    """Whether a branch reads an operand."""
    return bool(attribute(branch).graph.find_nodes(op="placeholder")[i].users)


def _alike(values: Sequence[Any], fake: Any, lowering: GraphLowering) -> ir.Value | None:
    """One of the values that has the dtype and shape of a result, as far as these are known."""
    dtype, shape = lowering.type_of(fake)
    if not are_named(shape):
        return None
    return next((one for one in values if isinstance(one, ir.Value) and one.dtype == dtype and one.shape == shape), None)


def _at(places: Sequence[int], values: Sequence[ir.Value], count: int) -> list[ir.Value | None]:
    """Values at their places among so many."""
    placed = dict(zip(places, values, strict=True))
    return [placed.get(i) for i in range(count)]


def _if(lowering: GraphLowering, write_if: Callable[..., Any], node: fx.Node, given: Sequence[Any], results: Sequence[int]) -> list[ir.Value]:
    """The If itself, of a condition and operands: the `results` of each branch."""
    branches: list[ir.Graph] = []
    for branch in node.args[1:3]:
        body = Body()
        try:
            outputs = _lowered(lowering, body, attribute(branch), given[1:], results)  # type: ignore[arg-type]
        except Unsupported:
            for written in branches:
                empty(written)
            raise
        branches.append(ir.Graph([], outputs, nodes=body.nodes, name=body.name))
    made = write_if(given[0], then_branch=ir.AttrGraph("then_branch", branches[0]), else_branch=ir.AttrGraph("else_branch", branches[1]))
    made = [made] if isinstance(made, ir.Value) else list(made)
    return [typed(value, one.dtype, one.shape) for value, one in zip(made, branches[0].outputs, strict=True)]


def _loop(lowering: GraphLowering, node: fx.Node) -> list[ir.Value | None]:
    if len(node.args) != (4 if node.target is SCAN else 3):
        raise Unsupported("it takes other arguments than in torch 2.13")
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
    return _at((*range(len(states)), *results), made, len(wanted))


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
        empty(inner.graph)
        raise Unsupported(f"in its body, {str(refusal).splitlines()[0]}") from refusal
    use_fast_loops(inner.op, inner.graph, inner._builder.hints, inner.target.threads)
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
    maker = value.producer()
    is_own = maker is not None and maker.graph is inner.graph and value not in inner.graph.outputs
    return value if is_own else inner.fresh(value, node.meta["val"])
