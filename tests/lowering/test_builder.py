"""The builder that remembers: what it says of a node is what onnxscript's own says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript
import pytest

from ort_backend.lowering import builder

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def _graph() -> ir.Graph:
    return ir.Graph([], [], nodes=[], opset_imports={"": 18, "com.microsoft": 1}, name="test")


def _tensor(op: Any, name: str, numbers: Any) -> ir.Value:
    return op.builder.initializer(ir.tensor(np.array(numbers)), name=name)


def _several(op: Any) -> list[ir.Value]:
    """Nodes that differ in one thing that inference looks at: dtype, sizes, symbols, attributes, constants."""
    x = op.builder.input("x", FLOAT, [2, 3, 4])
    symbolic = op.builder.input("s", FLOAT, ["batch", 3, 4])
    rows = op.builder.input("rows", INT64, [2])
    made = [
        op.Transpose(x, perm=[2, 0, 1]),
        op.Transpose(x, perm=[0, 2, 1]),
        op.Transpose(symbolic, perm=[0, 2, 1]),
        op.Cast(x, to=INT64),
        op.Cast(x, to=ir.DataType.DOUBLE),
        op.Reshape(x, _tensor(op, "flat", [6, 4])),
        op.Reshape(x, _tensor(op, "tall", [12, 2])),
        op.Reshape(symbolic, _tensor(op, "kept", [0, -1])),
        op.ReduceSum(x, _tensor(op, "axis", [0]), keepdims=0),
        op.ReduceSum(x, _tensor(op, "axis_1", [1]), keepdims=0),
        op.Gather(x, rows, axis=1),
        op.Add(x, 1.0),
        op.ConstantOfShape(_tensor(op, "size", [2, 5]), value=ir.tensor([1], dtype=INT64)),
        op.ConstantOfShape(_tensor(op, "size_1", [2, 5]), value=ir.tensor([1.0], dtype=FLOAT)),
    ]
    made += op.Split(x, num_outputs=2, axis=2, _outputs=2)
    return [*made, op.Gelu(x, _domain="com.microsoft", _version=1)]


def _known(values: list[ir.Value]) -> list[tuple[ir.DataType | None, str]]:
    return [(value.dtype, str(value.shape)) for value in values]


def test_remembered_nodes_have_the_types_that_onnxscript_infers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_inferred", {})
    expected = _known(_several(onnxscript.GraphBuilder(_graph()).op))
    assert len(set(expected)) == 16
    assert _known(_several(builder.Builder(_graph()).op)) == expected
    size = len(builder._inferred)
    assert _known(_several(builder.Builder(_graph()).op)) == expected
    assert len(builder._inferred) == size


@pytest.mark.parametrize("change", [lambda op, x: op.Transpose(x, perm=[1, 0]), lambda op, x: op.Unsqueeze(x, [0])])
def test_onnx_is_asked_once(monkeypatch: pytest.MonkeyPatch, change: Callable[..., ir.Value]) -> None:
    monkeypatch.setattr(builder, "_inferred", {})
    asked = []
    inherited = onnxscript.GraphBuilder._infer_shapes
    monkeypatch.setattr(onnxscript.GraphBuilder, "_infer_shapes", lambda self, node: (asked.append(node.op_type), inherited(self, node)))
    op = builder.Builder(_graph()).op
    for i in range(3):
        change(op, op.builder.input(f"x{i}", FLOAT, [2, 3]))
    assert len(asked) == 1


def test_a_node_with_a_body_is_inferred_anew() -> None:
    """Scan's body may be anything: it has no place in a key."""
    node = ir.node("Scan", [], {"body": _graph(), "num_scan_inputs": 1}, num_outputs=1)
    assert builder._key(node) is None
