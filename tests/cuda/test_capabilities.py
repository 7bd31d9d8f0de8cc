"""What the CUDA provider has a kernel for: asked of ONNX Runtime over stand-in libraries, and known of kernels that are registered but not right."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from onnxruntime.capi import _pybind_state as C

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


@pytest.mark.parametrize(
    "said",
    [
        "[ONNXRuntimeError] : 1 : FAIL : Exception during initialization: /onnxruntime_src/onnxruntime/core/optimizer/transformer_memcpy.cc:253 bool "
        "onnxruntime::TransformerMemcpyImpl::IsNodeCompatibleWithProvider(const onnxruntime::Node&) const !node_provider_type.empty() was false. "
        "Provider type for ReduceMax node with name '' is not set.",
        "[ONNXRuntimeError] : 1 : FAIL : Type Error: Type parameter (T) of Optype (Sub) bound to different types (tensor(bfloat16) and tensor(float) "
        "in node ().",
    ],
    ids=["no provider", "dtypes"],
)
def test_what_onnxruntime_says_of_a_node_without_a_kernel(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 1.31.1 says it on a GPU of a LogSoftmax in bfloat16, a function of which one step has no kernel."""

    def refuse(*_: object) -> None:
        raise C.Fail(said)

    monkeypatch.setattr(capabilities, "check_provider", lambda *_: None)
    monkeypatch.setattr(capabilities, "_probed", {})
    monkeypatch.setattr(capabilities, "_providers", refuse)
    x, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.BFLOAT16), shape=ir.Shape([2, 3])) for name in "xy")
    assert not capabilities.has_kernel(ir.Node("", "LogSoftmax", [x], outputs=[y]), provider=CUDA, opset=18)


def test_dtypes_that_do_not_go_together() -> None:
    values = [ir.Value(name=name, type=ir.TensorType(dtype)) for name, dtype in zip("ab", (ir.DataType.FLOAT16, ir.DataType.FLOAT))]
    assert not capabilities.has_kernel(ir.Node("", "Sub", values), provider="CPUExecutionProvider", opset=18)
