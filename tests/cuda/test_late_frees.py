"""Nodes whose kernels for CUDA leave memory of the host to be freed: which they are, and that a run for which the host waits frees it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch

from ort_backend.runtime.late_frees import frees_late
from ort_backend.runtime.session import Program, Session, SessionConfig

# Operator, sizes of the inputs, sizes of the outputs, whether memory is left.
CASES = [
    ("Concat", [(2, 3), (2, 3)], [(4, 3)], False),
    ("Concat", [(2, 3), (1, 3)], [(3, 3)], True),
    ("Concat", [(0, 3), (2, 3)], [(2, 3)], True),
    ("Split", [(4, 3)], [(2, 3), (2, 3)], False),
    ("Split", [(4, 3)], [(3, 3), (1, 3)], True),
    ("MatMul", [(2, 3, 4), (4, 5)], [(2, 3, 5)], False),
    ("MatMul", [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], False),
    ("MatMul", [(2, 1, 3, 4), (2, 6, 4, 5)], [(2, 6, 3, 5)], True),
    ("Relu", [(2, 3)], [(2, 3)], False),
]


def _model(op_type: str, given: list[tuple[int, ...]], made: list[tuple[int, ...]]) -> ir.Model:
    def value(name: str, size: tuple[int, ...]) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(size))

    inputs, outputs = ([value(f"{name}{i}", size) for i, size in enumerate(sizes)] for name, sizes in (("x", given), ("y", made)))
    attributes = {"Concat": [ir.AttrInt64("axis", 0)], "Split": [ir.AttrInt64("axis", 0)]}.get(op_type, [])
    constants: list[ir.Value] = []
    nodes = []
    if op_type == "Split":
        sizes = ir.node("Constant", [], {"value": ir.tensor([size[0] for size in made])}, name="sizes")
        nodes, constants = [sizes], list(sizes.outputs)
    nodes.append(ir.Node("", op_type, [*inputs, *constants], attributes, outputs=outputs, name="node"))
    return ir.Model(ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 18}, name="graph"), ir_version=9)


@pytest.mark.parametrize(("op_type", "given", "made", "expected"), CASES)
def test_what_leaves_memory(op_type: str, given: list[tuple[int, ...]], made: list[tuple[int, ...]], expected: bool) -> None:
    assert frees_late(_model(op_type, given, made)) is expected


@pytest.mark.parametrize(("sizes", "expected"), [(("n", "n"), False), (("n", "m"), True), (("n", None), True), ((None, None), True)], ids=str)
def test_sizes_that_are_not_known(sizes: tuple[str | None, ...], expected: bool) -> None:
    parts = [ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([size, 3])) for i, size in enumerate(sizes)]
    total = ir.Value(name="total")
    node = ir.Node("", "Concat", parts, [ir.AttrInt64("axis", 0)], outputs=[total])
    assert frees_late(ir.Model(ir.Graph(parts, [total], nodes=[node], name="graph"), ir_version=9)) is expected


@pytest.mark.parametrize(("op_type", "given", "made", "expected"), CASES[:2])
def test_the_host_waits_for_runs_that_leave_memory(op_type: str, given: list[tuple[int, ...]], made: list[tuple[int, ...]], expected: bool) -> None:
    assert not Program.of(_model(op_type, given, made)).frees_late  # the CPU provider leaves none
    program = Program.of(_model(op_type, given, made), "CUDAExecutionProvider")
    session = Session(program, SessionConfig(), [])
    session.on_cuda = True
    try:
        waits = session.run_options([torch.device("cuda")]).get_run_config_entry("disable_synchronize_execution_providers") != "1"
    except RuntimeError:  # it has no such entry
        waits = True
    session.on_cuda = False
    assert waits is expected


def test_memory_is_left_by_these_alone(over_stand_in: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = """
import sys
sys.path.insert(0, "tests/cuda")
import numpy as np, onnx_ir as ir, onnxruntime as ort
from onnxruntime.capi import _pybind_state as C
from ort_backend.runtime import cuda
from test_late_frees import CASES, _model

device = C.OrtDevice(C.OrtDevice.cuda(), C.OrtDevice.default_memory(), 0)
options = cuda.provider_options(0, cuda.Numerics(tf32=False, algorithms="DEFAULT"), None, {})
settings = ort.SessionOptions()
settings.log_severity_level = 4
for op_type, given, made, _ in CASES:
    for waits in (False, True):
        data = ir.to_proto(_model(op_type, given, made)).SerializeToString()
        session = ort.InferenceSession(data, settings, providers=[("CUDAExecutionProvider", options)])
        run_options = ort.RunOptions()
        if not waits:
            run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        feeds, fetches = C.OrtValueVector(), C.OrtValueVector()
        for size in given:
            feeds.push_back(C.OrtValue.ortvalue_from_numpy(np.zeros(size, np.float32), device))
        print("RUN", file=sys.stderr, flush=True)
        names = [f"x{i}" for i in range(len(given))], [f"y{i}" for i in range(len(made))]
        session._sess.run_with_ortvaluevector(run_options, names[0], feeds, names[1], fetches, [device] * len(made))
        print("CLOSE", file=sys.stderr, flush=True)
        del fetches, session
print("RUN", file=sys.stderr, flush=True)
"""
    log = over_stand_in(code, FAKECUDA_TRACE="1").stderr
    found = [["cudaLaunchHostFunc" in part for part in run.split("CLOSE")] for run in log.split("RUN")[1:-1]]
    expected = [[leaves and waits, leaves and not waits] for *_, leaves in CASES for waits in (False, True)]
    assert found == expected
