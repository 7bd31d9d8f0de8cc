"""Sums of columns, on the CPU, as products with a row of ones.

ONNX Runtime adds a row to the next; of few rows it does so a column at a time. 16 rows of 16,384 take ReduceSum 250 us, MatMul 21 and PyTorch 25;
2 rows of 65,536 take 164, 24 and 29, 1024 of 1024 take 90, 58 and 147, 512 of 32,000 take 4400, 2100 and 5600 (AMD EPYC of family 25, model 17;
1.19.2 and 1.32.0 alike). Each column is summed by itself: what is not finite stays in its own. Gradients of biases and of scales are such sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.fast_loops.rewriting import keeps_dims, product, replace, row_of_ones, shape_with_unknown, sum_axes
from ort_backend.lowering.symbolic import example

# Elements from which on a product is faster, and rows up to which a constant for them is held.
_MANY, _MOST_ROWS = 2048, 65536


def sum_columns(op: Any, graph: ir.Graph, hints: Mapping[str, int | None]) -> None:
    """Rewrites sums and means over the first dimensions, in float32, in a finished graph, in place.

    In float64 a product would keep ONNX Runtime from fusing others (`runtime.harmful_optimizers`).

    Args:
        op: The builder of the graph.
        graph: The finished graph.
        hints: The examples of symbolic sizes, by name; None where a size follows from values.
    """
    for node in list(graph):
        if node.domain or node.op_type not in ("ReduceSum", "ReduceMean") or (axes := sum_axes(node)) is None:
            continue
        value: Any = node.inputs[0]
        rows, columns = value.shape[: axes[-1] + 1], value.shape[axes[-1] + 1 :]
        if any(size != 1 for d, size in enumerate(rows) if d not in axes) or sum(not isinstance(size, int) for size in (*rows, *columns)) > 1:
            continue  # a Reshape can find out one size alone
        count, numbers = (math.prod(example(size, hints, unknown=_MANY) for size in part) for part in (rows, columns))
        if value.dtype == ir.DataType.FLOAT and numbers > 1 and 1 < count <= _MOST_ROWS and count * numbers >= _MANY:
            replace(graph, node, "columns", _written, op, node, value, axes)


def _written(op: Any, node: ir.Node, value: Any, axes: list[int]) -> ir.Value:
    rows, columns = value.shape[: axes[-1] + 1], value.shape[axes[-1] + 1 :]
    count = product(rows)
    matrix = value if len(rows) == len(columns) == 1 else op.Reshape(value, int64s(op, [count, product(columns)]))
    if count >= 0:
        ones = row_of_ones(op, count, value.dtype)
    else:
        ones = op.Expand(constant(op, 1.0, value.dtype), op.Concat(int64s(op, [1]), op.Shape(matrix, start=0, end=1), axis=0))
    total = op.MatMul(ones, matrix)
    if node.op_type == "ReduceMean":
        number = constant(op, float(count), value.dtype) if count >= 0 else op.Cast(op.Shape(matrix, start=0, end=1), to=value.dtype)
        total = op.Div(total, number)
    keeps = keeps_dims(node)
    return op.Reshape(total, shape_with_unknown(op, (1 if d in axes else size for d, size in enumerate(value.shape) if keeps or d not in axes)))
