"""What the CUDA provider has a kernel for: asked of ONNX Runtime over stand-in libraries, and known of kernels that are registered but not right."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch

from ort_backend.runtime import capabilities

CUDA = "CUDAExecutionProvider"


def _scatter(op_type: str, dtype: ir.DataType, reduction: str) -> ir.Node:
    inputs = [ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([4, 4])) for name, kind in zip("xiu", (dtype, ir.DataType.INT64, dtype))]
    return ir.Node("", op_type, inputs, [ir.AttrString("reduction", reduction)])


@pytest.mark.parametrize(
    ("op_type", "dtype", "reduction"),
    [
        ("ScatterND", ir.DataType.BFLOAT16, "add"),
        ("ScatterND", ir.DataType.DOUBLE, "add"),
        ("ScatterND", ir.DataType.INT64, "max"),
        ("ScatterElements", ir.DataType.BFLOAT16, "add"),
        ("ScatterElements", ir.DataType.INT64, "min"),
    ],
)
def test_reductions_that_the_kernel_does_not_compute(op_type: str, dtype: ir.DataType, reduction: str) -> None:
    assert not capabilities.has_kernel(_scatter(op_type, dtype, reduction), provider=CUDA, opset=18)


@pytest.mark.parametrize("op_type", ["ScatterND", "ScatterElements"])
def test_reductions_whose_order_changes_from_run_to_run(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ir.Node] = []
    monkeypatch.setattr(capabilities, "check_provider", lambda *_: None)
    monkeypatch.setattr(capabilities, "_probed", {})
    monkeypatch.setattr(capabilities, "_probe", lambda node, *_: asked.append(node) is None)
    node = _scatter(op_type, ir.DataType.FLOAT, "add")
    assert capabilities.has_kernel(node, provider=CUDA, opset=18)
    torch.use_deterministic_algorithms(True)
    try:
        assert not capabilities.has_kernel(node, provider=CUDA, opset=18)  # although there is one, which is known
        assert capabilities.has_kernel(_scatter(op_type, ir.DataType.FLOAT, "none"), provider=CUDA, opset=18)
    finally:
        torch.use_deterministic_algorithms(False)
    assert capabilities.has_kernel(node, provider=CUDA, opset=18) and len(asked) == 2


def test_only_the_cpu_provider_has_it(over_stand_in: Callable[..., object]) -> None:
    over_stand_in("""
import onnx_ir as ir
from ort_backend.runtime.capabilities import has_kernel
def node(op_type, *dtypes, **attributes):
    inputs = [ir.Value(name=f"v{i}", type=ir.TensorType(dtype), shape=ir.Shape([2])) for i, dtype in enumerate(dtypes)]
    return ir.Node("", op_type, inputs, [ir.AttrString(*one) for one in attributes.items()])
D = ir.DataType
asked = [
    node("Pad", D.INT64, D.INT64),
    node("Pad", D.FLOAT, D.INT64),
    node("ScatterND", D.FLOAT, D.INT64, D.FLOAT, reduction="add"),
    node("ScatterElements", D.INT64, D.INT64, D.INT64, reduction="none"),
]
found = [has_kernel(one, provider="CUDAExecutionProvider", opset=18) for one in asked]
assert found == [False, True, True, True], found
""")
