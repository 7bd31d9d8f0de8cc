"""Sums over a dimension in front of a few numbers, such as the points of a neighbourhood, on the CPU: with it last, or as means of windows.

ONNX Runtime's ReduceSum and ReduceMean multiply each such matrix by a row of ones, at 130 ns each. Of (2048, 16, 3) over 16 they take 350 us, with a
Transpose to (2048, 3, 16) in front 45, PyTorch 75. AveragePool has windows for them: (8192, 8, 32) takes 1100 us, so 390, PyTorch 320, (2048, 16, 64)
takes 360, 270 and 185. It multiplies by 1 / 8: only where that is exact (AMD EPYC of family 25, model 17; 1.19.2 and 1.32.0 alike).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.fast_loops.rewriting import are_fixed, keeps_dims, replace, sum_axes
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.symbolic import example, vector_of_sizes

# Elements from which on a Transpose is worth it.
_MANY = 4096
# Numbers behind the dimension: up to the first always, up to the second where a matrix has few elements, and there are many.
_FEW, _SOME = 8, 16
_SMALL_MATRIX, _MATRICES = 256, 256
# What is summed in windows, and elements of one.
_WINDOWS, _LARGEST_WINDOW = (2, 4, 8, 16), 1024


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
        value: Any = node.inputs[0]
        first, behind = axes[0], axes[-1] + 1
        parts = value.shape[:first], value.shape[first:behind], value.shape[behind:]
        if axes != list(range(first, behind)) or (len(axes) > 1 and not are_fixed(parts[1])):
            continue
        sizes = [math.prod(example(size, hints, unknown=_MANY) for size in part) for part in parts]
        is_fixed = are_fixed((*parts[1], *parts[2])) and sum(not isinstance(size, int) for size in parts[0]) <= 1
        if value.dtype == ir.DataType.FLOAT and is_fixed and _has_windows(*sizes):
            replace(graph, node, "narrow", _shaped, op, node, value, axes, _windows)
        elif _is_slow(*sizes):
            replace(graph, node, "narrow", _shaped, op, node, value, axes, _rows)


def _shaped(op: Any, node: ir.Node, value: Any, axes: list[int], write: Callable[..., ir.Value]) -> ir.Value:
    """What `write` writes, in the shape of the node's result."""
    keeps = keeps_dims(node)
    wanted = [1 if d in axes else _size(value, d) for d in range(len(value.shape)) if keeps or d not in axes]
    unknown = [i for i, size in enumerate(wanted) if not isinstance(size, int)]
    total = write(op, node.op_type, value, axes)
    return op.Reshape(total, vector_of_sizes(op, [-1 if unknown == [i] else size for i, size in enumerate(wanted)]))


def _rows(op: Any, kind: str, value: Any, axes: list[int]) -> ir.Value:
    """With what is summed in the last dimension of a matrix: through a Reshape ONNX Runtime's optimizer does not see that the Transpose is none."""
    order = [*(d for d in range(len(value.shape)) if d not in axes), *axes]
    moved = typed(op.Transpose(value, perm=order), value.dtype, [value.shape[d] for d in order])
    summed: Any = [_size(value, d) for d in axes]
    rows = op.Reshape(moved, vector_of_sizes(op, [-1, *(summed if len(summed) == 1 else [math.prod(summed)])]))
    return getattr(op, kind)(rows, int64s(op, [1]), keepdims=0)


def _windows(op: Any, kind: str, value: Any, axes: list[int]) -> ir.Value:
    summed, numbers = (math.prod(sizes) for sizes in (value.shape[axes[0] : axes[-1] + 1], value.shape[axes[-1] + 1 :]))
    mean = op.AveragePool(op.Reshape(value, int64s(op, [-1, 1, summed, numbers])), kernel_shape=[summed, 1])
    return mean if kind == "ReduceMean" else op.Mul(mean, constant(op, float(summed), value.dtype))


def _size(value: Any, d: int) -> int | tuple[ir.Value, int]:
    """A size, or whose it is."""
    return value.shape[d] if isinstance(value.shape[d], int) else (value, d)


def _is_slow(matrices: int, summed: int, numbers: int) -> bool:
    if matrices == 1 or numbers == 1 or summed == 1 or matrices * summed * numbers < _MANY:
        return False
    return numbers < _FEW or (numbers <= _SOME and summed * numbers <= _SMALL_MATRIX and matrices >= _MATRICES)


def _has_windows(matrices: int, summed: int, numbers: int) -> bool:
    return matrices >= _MATRICES and summed in _WINDOWS and numbers >= _FEW and summed * numbers <= _LARGEST_WINDOW
