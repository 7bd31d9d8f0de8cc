"""Square roots of float32 where ONNX Runtime's CPU kernel does not round them rightly: taken in float64.

The kernel of 1.19.2 (that of 1.32.0 is right) is one unit off for four of ten numbers, and gives NaN for infinity, 0 for denormal numbers. Programs
compare roots: `out <= math.sqrt(1e-5)` behind `var.clamp(min=1e-5).sqrt()` in torch_geometric. PyTorch's, where they are MKL's, are one unit off for
one of five, but few numbers are wrong in both. The root in float64, rounded to float32, is the root rounded once (Figueroa, "When is double
rounding innocuous?", 1995).
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from ort_backend.runtime.probe import result_of

_NUMBERS = np.concatenate([np.array([np.inf, 1e-5, 1e-8, 2.0], np.float32), np.linspace(0.01, 1, 60, dtype=np.float32)])


@functools.cache
def is_inexact() -> bool:
    """Whether this ONNX Runtime's kernel rounds wrongly; asked once in a process, by running it."""
    return not np.array_equal(result_of("Sqrt", _NUMBERS), np.sqrt(_NUMBERS))


def take_in_float64(model: ir.Model) -> None:
    """Writes, in place, `Cast(Sqrt(Cast(x)))` where the model has `Sqrt` of float32."""
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        x = node.inputs[0] if node.op_type == "Sqrt" and not node.domain else None
        if x is None or x.dtype != ir.DataType.FLOAT:
            continue
        wide = ir.node("Cast", [x], {"to": ir.DataType.DOUBLE}, name=f"{node.name}_wide")
        root = ir.node("Sqrt", [wide.outputs[0]], name=f"{node.name}_root")
        narrow = ir.node("Cast", [root.outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{node.name}_narrow")
        for made in (wide, root, narrow):
            made.outputs[0].shape = x.shape
            made.outputs[0].type = ir.TensorType(ir.DataType.FLOAT if made is narrow else ir.DataType.DOUBLE)
            made.metadata_props.update(node.metadata_props)
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], [wide, root, narrow], node.outputs, narrow.outputs)
