"""What ONNX Runtime's CPU kernels compute, found by running one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from ort_backend.runtime import denormals


def result_of(op_type: str, numbers: np.ndarray, constants: Sequence[np.ndarray] = ()) -> np.ndarray:
    """The first result of an operator of ONNX (opset 18) on the CPU.

    Args:
        op_type: Its name.
        numbers: Its first input, of any shape; float32, as is the result.
        constants: Further inputs, which a graph would have as constants.
    """
    x, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(numbers.shape)) for name in "xy")
    made = [ir.node("Constant", [], {"value": ir.tensor(constant)}) for constant in constants]
    node = ir.Node("", op_type, [x, *(one.outputs[0] for one in made)], outputs=[y])
    model = ir.Model(ir.Graph([x], [y], nodes=[*made, node], opset_imports={"": 18}, name="probe"), ir_version=9)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    denormals.follow_thread(options)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": numbers})[0])
