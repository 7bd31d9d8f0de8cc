"""Numbers beside tensors whose last dimension is 1, on the CPU: as tensors of the same rank.

ONNX Runtime broadcasts a 0-d tensor, or a vector of one element, along rows of one element each: `(N, 1) + 1` takes 630 us for N = 65,536. Beside a
tensor of one element and the same rank it takes 11 (AMD EPYC of family 25, model 17; 1.19.2 and 1.32.0 alike). Means kept for a division, columns of
predictions and of values are such tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.fast_loops.rewriting import BROADCASTING, insert
from ort_backend.lowering.symbolic import example

# Elements of the tensor from which on it counts. ONNX Runtime's own fusions look for 0-d numbers.
_MANY = 4096


def align_numbers(op: Any, graph: ir.Graph, hints: Mapping[str, int | None]) -> None:
    """Gives the numbers beside large tensors whose last dimension is 1 the rank of these, in place.

    Args:
        op: The builder of the graph.
        graph: The finished graph.
        hints: The examples of symbolic sizes, by name; None where a size follows from values.
    """
    for node in list(graph):
        if node.domain or node.op_type not in BROADCASTING or any(value is None or value.shape is None for value in node.inputs):
            continue
        shapes: list[Any] = [value.shape for value in node.inputs]  # type: ignore[union-attr]
        rank = max(map(len, shapes))
        if rank < 2 or any(len(shape) > 0 and shape[-1] != 1 for shape in shapes) or _elements(shapes, hints) < _MANY:
            continue
        for i, shape in enumerate(shapes):
            if len(shape) < rank and all(size == 1 for size in shape):
                number = insert(graph, node, f"number_{i}", _of_rank, op, node.inputs[i], len(shape), rank)
                node.replace_input_with(i, number)


def _elements(shapes: Sequence[ir.Shape], hints: Mapping[str, int | None]) -> int:
    """Elements of the largest."""
    return max(math.prod(example(size, hints, unknown=_MANY) for size in shape) for shape in shapes)


def _of_rank(op: Any, number: Any, rank: int, wanted: int) -> ir.Value:
    if number.const_value is not None and not number.is_graph_input():
        return constant(op, number.const_value.numpy().reshape([1] * wanted), number.dtype)
    return op.Unsqueeze(number, int64s(op, range(wanted - rank)))
