"""What the CPU provider has slow or imprecise loops for, written in another form: passes over a finished ONNX graph, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.fast_loops.column_sums import sum_columns
from ort_backend.lowering.fast_loops.few_pixels import multiply_few_pixels
from ort_backend.lowering.fast_loops.last_gathers import gather_rows
from ort_backend.lowering.fast_loops.late_expands import expand_late
from ort_backend.lowering.fast_loops.long_sums import split_long_sums
from ort_backend.lowering.fast_loops.masks import dequantize_masks
from ort_backend.lowering.fast_loops.narrow_broadcasts import repeat_narrow
from ort_backend.lowering.fast_loops.narrow_sums import sum_narrow
from ort_backend.lowering.fast_loops.single_columns import align_numbers
from ort_backend.lowering.fast_loops.transposed_products import transpose_once
from ort_backend.lowering.fast_loops.transposes import split_transposes
from ort_backend.lowering.unread import drop_unread_nodes

_PASSES = (
    multiply_few_pixels, expand_late, dequantize_masks, split_long_sums, sum_columns, sum_narrow, align_numbers, repeat_narrow, gather_rows,
    split_transposes,
)  # fmt: skip


def use_fast_loops(op: Any, graph: ir.Graph, hints: Mapping[str, int | None], threads: int) -> None:
    """Rewrites a finished graph for the CPU provider, in place.

    Args:
        op: The builder of the graph.
        graph: The finished graph.
        hints: The examples of symbolic sizes, by name; None where a size follows from values.
        threads: How many threads a kernel runs on.
    """
    for rewrite in _PASSES:
        rewrite(op, graph, hints)
    transpose_once(op, graph, hints, threads)
    drop_unread_nodes(graph)
