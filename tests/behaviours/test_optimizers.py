"""Which of ONNX Runtime's graph optimizers are left out, and for which graphs only."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ort_backend.runtime.session import _harmful_optimizers

SIZES = {"large": [1200, 1200], "small": [2, 3], "empty": [0, 3]}


def _expanded(sizes: list[int], *, constant: bool) -> ir.Model:
    """y = x + an Expand: of a constant, or of x itself."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 1]))
    number, shape = (
        ir.Value(name=name, const_value=ir.tensor(np.array(value, dtype)))
        for name, value, dtype in (("number", 0, np.float32), ("shape", sizes, np.int64))
    )
    expand = ir.node("Expand", [number if constant else x, shape])
    expand.outputs[0].type, expand.outputs[0].shape = x.type, ir.Shape(sizes)
    add = ir.node("Add", [x, expand.outputs[0]])
    graph = ir.Graph([x], add.outputs, nodes=[expand, add], initializers=[number, shape], opset_imports={"": 18}, name="expanded")
    return ir.Model(graph, ir_version=9)


@pytest.mark.parametrize(
    ("size", "left_out"), [("large", ["ConstantFolding"]), ("empty", ["NoopElimination"]), ("small", [])], ids=["large", "empty", "small"]
)
def test_a_repeated_constant_counts_and_a_broadcast_tensor_does_not(size: str, left_out: list[str]) -> None:
    assert _harmful_optimizers(_expanded(SIZES[size], constant=True), "CPUExecutionProvider") == left_out
    assert _harmful_optimizers(_expanded(SIZES[size], constant=False), "CPUExecutionProvider") == []
