"""Sums over a dimension in front of a few numbers, such as the points of a neighbourhood, on the CPU: with that dimension last.

ONNX Runtime's ReduceSum and ReduceMean multiply each such matrix by a row of ones, at 130 ns each. Of (2048, 16, 3) over 16 they take 350 us, with a
Transpose to (2048, 3, 16) in front 45, PyTorch 75; of (2048, 16, 16) 290 and 145 (AMD EPYC of family 25, model 17; 1.19.2 and 1.32.0 alike).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import int64s
from ort_backend.lowering.fast_loops.long_sums import sum_axes
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.provenance import newest, take_place
from ort_backend.lowering.symbolic import example, vector_of_sizes

# Elements from which on a Transpose is worth it.
_MANY = 4096
# Numbers behind the dimension: up to the first always, up to the second where a matrix has few elements, and there are many.
_FEW, _SOME = 8, 16
_SMALL_MATRIX, _MATRICES = 256, 256


def sum_narrow(op: Any, graph: ir.Graph, hints: Mapping[str, int | None]) -> None:
    """Rewrites sums and means over dimensions in front of few numbers, in a finished graph, in place.

    Args:
        op: The builder of the graph.
        graph: The finished graph.
        hints: The examples of symbolic sizes, by name; None where a size follows from values.
    """
    for node in list(graph):
        if node.domain or node.op_type not in ("ReduceSum", "ReduceMean") or (axes := sum_axes(node)) is None:
            continue
        value = node.inputs[0]
        assert value is not None and value.shape is not None
        rank, first, behind = len(value.shape), axes[0], axes[-1] + 1
        parts = value.shape[:first], value.shape[first:behind], value.shape[behind:]
        if (
            axes != list(range(first, behind))
            or first == 0
            or behind == rank
            or (len(axes) > 1 and not all(isinstance(size, int) for size in parts[1]))
        ):
            continue
        if not _is_slow(*(math.prod(example(size, hints, unknown=_MANY) for size in part) for part in parts)):
            continue
        before = len(graph)
        total = _written(op, node, value, axes)
        take_place(graph, node, newest(graph, len(graph) - before), total, f"{node.outputs[0].name}/narrow")


def _written(op: Any, node: ir.Node, value: Any, axes: list[int]) -> ir.Value:
    """With what is summed in the last dimension of a matrix: through a Reshape ONNX Runtime's optimizer does not see that the Transpose is none."""
    rank = len(value.shape)
    order = [*(d for d in range(rank) if d not in axes), *axes]
    moved = typed(op.Transpose(value, perm=order), value.dtype, [value.shape[d] for d in order])
    summed: Any = [_size(value, d) for d in axes]
    rows = op.Reshape(moved, vector_of_sizes(op, [-1, *(summed if len(summed) == 1 else [math.prod(summed)])]))
    total = getattr(op, node.op_type)(rows, int64s(op, [1]), keepdims=0)
    keeps = node.attributes["keepdims"].as_int() if "keepdims" in node.attributes else 1
    sizes = [1 if d in axes else _size(value, d) for d in range(rank) if keeps or d not in axes]
    unknown = [i for i, size in enumerate(sizes) if not isinstance(size, int)]
    return op.Reshape(total, vector_of_sizes(op, [-1 if unknown == [i] else size for i, size in enumerate(sizes)]))


def _size(value: Any, d: int) -> int | tuple[ir.Value, int]:
    """A size, or whose it is."""
    return value.shape[d] if isinstance(value.shape[d], int) else (value, d)


def _is_slow(matrices: int, summed: int, numbers: int) -> bool:
    if numbers == 1 or summed == 1 or matrices * summed * numbers < _MANY:
        return False
    return numbers < _FEW or (numbers <= _SOME and summed * numbers <= _SMALL_MATRIX and matrices >= _MATRICES)
