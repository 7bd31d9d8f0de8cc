"""ONNX Scans: one small graph, the body, for every step along an axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import constant
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.unread import drop_unread_nodes

_numbers = itertools.count()


class Body:
    """Writes the graph of one step; its names are its own, as a subgraph may not hide names around it."""

    def __init__(self) -> None:
        self.name = f"step{next(_numbers)}"
        self.nodes: list[ir.Node] = []

    def value(self, like: ir.Value, shape: Sequence[Any]) -> ir.Value:
        """An input of the body, of the dtype of `like`."""
        return typed(ir.Value(name=f"{self.name}_{next(_numbers)}"), like.dtype, shape)

    def __call__(self, op_type: str, *inputs: ir.Value, outputs: int = 1, dtype: ir.DataType | None = None, **attributes: Any) -> Any:
        """Writes one node; its results have the dtype of its first input if none is given."""
        node = ir.node(op_type, list(inputs), attributes, num_outputs=outputs, name=f"{self.name}_{len(self.nodes)}")
        for output in node.outputs:
            output.name = f"{self.name}_{next(_numbers)}"
            output.type = inputs[0].type if dtype is None else ir.TensorType(dtype)
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else list(node.outputs)

    def take(self, graph: ir.Graph) -> list[ir.Value]:
        """Takes what another graph is made of, whose inputs are values of this body or around it, and returns its outputs."""
        drop_unread_nodes(graph)
        outputs, nodes = list(graph.outputs), list(graph)
        graph.outputs.clear()
        graph.remove(nodes)
        for value in graph.initializers.values():
            self.nodes.append(ir.node("Constant", [], {"value": value.const_value}, outputs=[ir.Value(type=value.type, shape=value.shape)]))
            value.replace_all_uses_with(self.nodes[-1].outputs[0])
        graph.initializers.clear()
        self.nodes += nodes
        for i, node in enumerate(self.nodes):
            node.name = f"{self.name}_{i}"
            for output in node.outputs:
                output.name = f"{self.name}_{next(_numbers)}"
        return outputs


def numbers(op: Any, count: int | ir.Value) -> ir.Value:
    """0 to `count` - 1 as int64 (count): the rows of a Scan whose steps need to know which one they are."""
    zero, one = (constant(op, number, ir.DataType.INT64) for number in (0, 1))
    if isinstance(count, ir.Value):
        return typed(op.Range(zero, count, one), ir.DataType.INT64, [None])
    return typed(op.Range(zero, constant(op, count, ir.DataType.INT64), one), ir.DataType.INT64, [count])


# (body, states, rows, weights) -> next states, rows of the results
Step = Callable[[Body, list[ir.Value], list[ir.Value], list[ir.Value]], tuple[list[ir.Value], list[ir.Value]]]


def scan(
    op: Any,
    step: Step,
    states: Sequence[ir.Value],
    rows: Sequence[ir.Value],
    weights: Sequence[ir.Value | None] = (),
    *,
    ranks: Sequence[int],
    reverse: bool = False,
    axes: Sequence[int] | None = None,
    result_axes: Sequence[int] | None = None,
) -> list[ir.Value]:
    """Runs `step` over an axis of each of `rows`.

    A body reads weights that are graph inputs where they stand; computed ones come in as states that do not change, at the price of a copy a step:
    what is computed before the `YieldOp` and read by a body behind it takes ONNX Runtime 1.19.2 down as it plans memory.

    Args:
        op: The builder.
        step: Takes the body, the states, one row of each of `rows`, and the weights; returns the next states and the rows of the results.
        states: The states in front of the first step.
        rows: What each step reads.
        weights: What all steps read; None for one that is not there.
        ranks: How many dimensions each of the results has.
        reverse: Whether to go from the last row to the first; results keep their places.
        axes: Along which axis of each of `rows` the steps go: the first, where none are given.
        result_axes: Likewise of the results.

    Returns:
        The states behind the last step, then the results.
    """
    axes = axes or [0] * len(rows)
    body = Body()
    computed = [one for one in weights if one is not None and one.producer() is not None]
    carried = [*states, *computed]
    before = [body.value(state, state.shape) for state in carried]  # type: ignore[arg-type]
    row = [body.value(one, [size for i, size in enumerate(one.shape) if i != at]) for one, at in zip(rows, axes)]  # type: ignore[arg-type]
    inside = dict(zip(computed, before[len(states) :]))
    read = [inside.get(one, one) if one is not None else None for one in weights]
    after, results = step(body, before[: len(states)], row, read)  # type: ignore[arg-type]
    # A result that is a state as well must be a value of its own, and so must a state that does not change.
    results = [body("Identity", one) if one in after or one in before else one for one in results]
    after = [*after, *(body("Identity", one) for one in before[len(states) :])]
    for value, state in zip(after, carried):
        typed(value, state.dtype, state.shape)
    for value, rank in zip(results, ranks, strict=True):
        typed(value, value.dtype, value.shape or [None] * (rank - 1))  # ONNX Runtime's own inference may leave it without a rank
    graph = ir.Graph([*before, *row], [*after, *results], nodes=body.nodes, name=body.name)
    made = op.Scan(
        *carried,
        *rows,
        _outputs=len(carried) + len(ranks),
        body=ir.AttrGraph("body", graph),
        num_scan_inputs=len(rows),
        scan_input_axes=ir.AttrInt64s("scan_input_axes", list(axes)),
        scan_output_axes=ir.AttrInt64s("scan_output_axes", list(result_axes or [0] * len(ranks))),
        scan_input_directions=ir.AttrInt64s("scan_input_directions", [int(reverse)] * len(rows)),
        scan_output_directions=ir.AttrInt64s("scan_output_directions", [int(reverse)] * len(ranks)),
    )
    made = [made] if isinstance(made, ir.Value) else list(made)
    for value, state in zip(made, carried):
        typed(value, state.dtype, state.shape)
    finals, made = made[: len(states)], made[len(carried) :]
    return [*finals, *(typed(value, one.dtype, [None] * rank) for value, one, rank in zip(made, results, ranks))]
