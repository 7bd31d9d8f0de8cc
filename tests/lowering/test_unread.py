"""What nothing in a graph reads."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ort_backend.lowering.unread import drop_unread_nodes


def test_unread_nodes_go_at_once_with_what_they_alone_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    read = ir.node("Neg", [x])
    shared = ir.node("Abs", read.outputs)
    dead = [ir.node("Exp", shared.outputs)]
    for _ in range(3):
        dead.append(ir.node("Exp", dead[-1].outputs))
    kept = ir.node("Sqrt", shared.outputs)
    called = ir.node("ATen", read.outputs, domain="org.pytorch.aten")
    graph = ir.Graph([x], kept.outputs, nodes=[read, shared, *dead, kept, called], opset_imports={"": 18}, name="unread")
    calls: list[object] = []
    remove = ir.Graph.remove
    monkeypatch.setattr(ir.Graph, "remove", lambda self, nodes, **how: [calls.append(nodes), remove(self, nodes, **how)])
    drop_unread_nodes(graph)
    assert list(graph) == [read, shared, kept, called]
    assert [use.node for use in shared.outputs[0].uses()] == [kept]
    assert len(calls) == 1  # each goes over all outputs of the graph
