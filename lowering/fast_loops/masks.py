"""Booleans as numbers, on the CPU: as bytes that are dequantized, which ONNX Runtime does with the processor's vectors.

For 786,432 of them, in us (AMD EPYC of family 25, model 17):

====================================================  ======  ======
graph                                                 1.19.2  1.32.0
====================================================  ======  ======
Cast to float32                                          431      77
Cast to uint8, DequantizeLinear                          100     101
a tensor times a mask, scaled (dropout)                  672     267
the same, dequantized by the scale                       180     180
DropoutGrad                                              645    none
count of the true ones in int64 along a dimension        700     490
the same in float32                                      175     175
====================================================  ======  ======

PyTorch takes 430 for the cast, 680 for dropout. These lie in the processor's caches: in a step of a 4-layer GPT with dropout behind each linear layer
DropoutGrad took 18.0 ms, the three nodes 16.5. Two Casts in a row would be 84, but ONNX Runtime makes one of them at any level of optimization.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import constant
from ort_backend.lowering.fast_loops.rewriting import keeps_dims, product, replace
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.symbolic import example

# Elements from which on the additional node is worth it.
LARGE = 1 << 13
# Up to here every whole number is one of float32.
_MOST = 1 << 24


def dequantize_masks(op: Any, graph: ir.Graph, hints: Mapping[str, int | None]) -> None:
    """Rewrites Casts of booleans to float32, and counts of them, in a finished graph, in place.

    Args:
        op: The builder of the graph.
        graph: The finished graph.
        hints: The examples of symbolic sizes, by name; None where a size follows from values.
    """
    # Behind the `YieldOp` by another dtype: of the same nodes ONNX Runtime would make one, and keep its result for the backward.
    byte = ir.DataType.UINT8
    for node in list(graph):
        if node.op_type == "YieldOp":
            byte = ir.DataType.INT8
        if node.domain or node.op_type != "Cast" or (mask := node.inputs[0]) is None or mask.dtype != ir.DataType.BOOL or mask.shape is None:
            continue
        if math.prod(example(size, hints, unknown=LARGE) for size in mask.shape) < LARGE or node.outputs[0].is_graph_output():
            continue
        if node.outputs[0].dtype == ir.DataType.FLOAT:
            _dequantize(op, graph, node, mask, byte)
        elif node.outputs[0].dtype == ir.DataType.INT64:
            _count(op, graph, node, mask, byte)


def _dequantize(op: Any, graph: ir.Graph, cast: ir.Node, mask: ir.Value, byte: ir.DataType) -> None:
    """By the factor that comes next, where there is one."""
    users = list(cast.outputs[0].uses())
    if len(users) == 1 and users[0].node.op_type == "Mul" and users[0].node.graph is graph and not users[0].node.domain:
        scaled = users[0].node
        factor = scaled.inputs[1 - users[0].idx]
        if factor is not None and factor.const_value is not None and factor.shape is not None and len(factor.shape) == 0:
            replace(graph, scaled, "bytes", _scaled, op, mask, factor, byte)
            return
    replace(graph, cast, "bytes", _scaled, op, mask, constant(op, 1.0, ir.DataType.FLOAT), byte)


def _scaled(op: Any, mask: ir.Value, factor: ir.Value, byte: ir.DataType) -> ir.Value:
    """With a zero point, for its dtype: behind a Transpose ONNX Runtime's optimizer writes a QuantizeLinear, which else gives uint8 (1.19.2)."""
    return op.DequantizeLinear(typed(op.Cast(mask, to=byte), byte, mask.shape), factor, constant(op, 0, byte))


def _count(op: Any, graph: ir.Graph, cast: ir.Node, mask: ir.Value, byte: ir.DataType) -> None:
    """The sums of a mask in int64, where each is of few enough."""
    for use in list(cast.outputs[0].uses()):
        total = use.node
        if total.op_type != "ReduceSum" or total.domain or total.graph is not graph:
            continue
        assert mask.shape is not None
        given = total.inputs[1] if len(total.inputs) > 1 else None
        axes = range(len(mask.shape)) if given is None else () if given.const_value is None else map(int, given.const_value.numpy())
        lengths = [mask.shape[axis] for axis in axes]
        if lengths and 0 <= product(lengths) <= _MOST:
            replace(graph, total, "count", _counted, op, total, mask, byte)


def _counted(op: Any, total: ir.Node, mask: ir.Value, byte: ir.DataType) -> ir.Value:
    numbers = typed(_scaled(op, mask, constant(op, 1.0, ir.DataType.FLOAT), byte), ir.DataType.FLOAT, mask.shape)
    count = op.ReduceSum(numbers, *total.inputs[1:], keepdims=int(keeps_dims(total)))
    return op.Cast(typed(count, ir.DataType.FLOAT, total.outputs[0].shape), to=ir.DataType.INT64)
