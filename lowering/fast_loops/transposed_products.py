"""Matrix products whose left side is a transpose, on the CPU, with the transpose made once.

ONNX Runtime's product takes the right side 128 columns at a time, and transposes the left one again for each such block. Gradients of weights are
products of this kind. Of what a Gemm takes for one, on one thread (AMD EPYC of family 25, model 17; 1.19.2 and 1.32.0 alike):

- A Transpose in front of the product: 0.83 to 0.98 where the product has 320 columns or more. The rows of the transpose must not lie a multiple of
  4 KB apart (`product_choice.product_by_onednn`): 0.97 to 1.06 there.
- The product the other way round, (right^T left)^T, where it has thousands of rows: 0.76 to 0.91, for the gradient of a vocabulary of 4,000 with
  512 tokens and width 384 16.8 ms and not 20.8.

A Transpose runs on one thread, a product on all of them: with more threads products must be wider.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.fast_loops.rewriting import attributes_of, replace
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.symbolic import example

# Multiplications from which on another node is worth it.
_MANY = 1.5e7
# Columns of the product, for each thread, from which on a Transpose takes less than it saves. It takes more where the numbers that it brings
# together lie a multiple of 1 KB apart: those are of so many bytes that they share a place in the first cache.
_COLUMNS, _COLUMNS_IF_ALIGNED = 192, 320
# Floating point numbers in 4 KB, in 1 KB.
_PAGE, _ALIGNED = 1024, 256
# Rows of the product, and numbers to sum over, from which on it is made the other way round.
_TALL, _LONG = 4000, 256


def transpose_once(op: Any, graph: ir.Graph, hints: Mapping[str, int | None], threads: int) -> None:
    """Rewrites Gemms in float32 whose left side is a transpose, in a finished graph, in place.

    Args:
        op: The builder of the graph.
        graph: The finished graph.
        hints: The examples of symbolic sizes, by name; None where a size follows from values.
        threads: How many threads a kernel runs on.
    """
    for node in list(graph):
        if not _has_transposed_left(node):
            continue
        left, right = node.inputs
        (depth, rows), columns = (example(size, hints) for size in left.shape), example(right.shape[1], hints)  # type: ignore[union-attr, index]
        if depth * rows * columns < _MANY:
            continue
        if threads == 1 and rows >= _TALL and depth >= _LONG:
            replace(graph, node, "swapped", _other_way_round, op, left, right)
        elif depth % _PAGE and columns >= threads * _least_columns(rows):
            replace(graph, node, "transposed", _in_front, op, left, right)


def _has_transposed_left(node: ir.Node) -> bool:
    """Whether it is left^T right."""
    attributes = attributes_of(node)
    if node.domain or node.op_type != "Gemm" or len(node.inputs) != 2 or attributes.get("alpha", 1.0) != 1.0:
        return False
    known = all(value is not None and value.dtype == ir.DataType.FLOAT and value.shape is not None for value in node.inputs)
    return known and bool(attributes.get("transA")) and not attributes.get("transB")


def _least_columns(rows: int) -> int:
    return _COLUMNS_IF_ALIGNED if rows % _ALIGNED == 0 and rows > _ALIGNED else _COLUMNS


def _transposed(op: Any, value: Any) -> ir.Value:
    """The transpose behind a Flatten, which ONNX Runtime's optimizer does not look through: it would make a Gemm of both again."""
    depth, rows = value.shape
    return typed(op.Flatten(op.Transpose(value, perm=[1, 0])), value.dtype, [rows, depth])


def _in_front(op: Any, left: Any, right: Any) -> ir.Value:
    return op.MatMul(_transposed(op, left), right)


def _other_way_round(op: Any, left: Any, right: Any) -> ir.Value:
    return op.Transpose(op.MatMul(_transposed(op, right), left), perm=[1, 0])
