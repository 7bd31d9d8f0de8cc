"""What lies before and behind the `YieldOp` of a training graph, and what waits in memory between the two."""

from __future__ import annotations

from collections.abc import Sequence, Set

import onnx_ir as ir


def kept_bytes(graph: ir.Graph, hints: dict[str, int]) -> int:
    """Bytes of what crosses the `YieldOp`; a reshape shares the memory of what it reshapes."""
    before: set[ir.Value] = set()
    kept: set[ir.Value] = set()
    passed = False
    for node in graph:
        if node.op_type == "YieldOp":
            passed = True
        elif not passed:
            before.update(node.outputs)
        else:
            kept.update(_memory(value) for value in node.inputs if value is not None and _memory(value) in before)
    return sum(_bytes(value, hints) for value in kept)


def read_behind_yield(graph: ir.Graph, handed_out: Sequence[ir.Value]) -> set[ir.Value]:
    """Which of the values that the `YieldOp` hands out lie in memory that the backward reads. Each has memory of its own."""
    own = set(handed_out)
    read: set[ir.Value] = set()
    passed = False
    for node in graph:
        if passed:
            read.update(_memory(value, own) for value in node.inputs if value is not None)
        passed = passed or node.op_type == "YieldOp"
    return own & read


def behind_yield(graph: ir.Graph) -> tuple[list[ir.Value], set[ir.Value]]:
    """The tangents that come in at the `YieldOp`, and every value that depends on one of them: not on its shape alone, which may be folded."""
    tangents: list[ir.Value] = []
    behind: set[ir.Value] = set()
    for node in graph:
        if node.op_type == "YieldOp":
            tangents = list(node.outputs)
            behind.update(tangents)
        elif tangents and node.op_type not in ("Shape", "Size") and not behind.isdisjoint(value for value in node.inputs if value is not None):
            behind.update(node.outputs)
    return tangents, behind


def sides_of_yield(graph: ir.Graph) -> dict[ir.Node, int]:
    """1 for nodes in front of the `YieldOp`, 2 for those behind it; others have none."""
    tangents, behind = behind_yield(graph)
    if not tangents:
        return {}
    sides = {node: 2 for node in graph if not behind.isdisjoint(node.outputs)}
    waiting = [value.producer() for value in tangents[0].producer().inputs if value is not None]  # type: ignore[union-attr]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in sides:
            sides[node] = 1
            waiting += [value.producer() for value in node.inputs if value is not None]
    return sides


def _memory(value: ir.Value, own: Set[ir.Value] = frozenset()) -> ir.Value:
    """The value in whose memory `value` lies; those in `own` lie in their own."""
    producer = value.producer()
    while value not in own and producer is not None and producer.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"):
        value = producer.inputs[0]  # type: ignore[assignment]
        producer = value.producer()
    return value


def _bytes(value: ir.Value, hints: dict[str, int]) -> int:
    if value.dtype is None or value.shape is None:
        return 0
    count = 1
    for size in value.shape:
        count *= size if isinstance(size, int) else hints.get(size.value or "") or 1
    return int(count * value.dtype.itemsize)
