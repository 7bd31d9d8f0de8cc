"""What becomes of the calls of PyTorch in a finished graph for a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_backend.lowering.calls_on_device.bridged_calls import bridge_calls
from ort_backend.lowering.calls_on_device.counters import count_together
from ort_backend.lowering.calls_on_device.merged_calls import merge_calls
from ort_backend.lowering.calls_on_device.parameter_casts import cast_together
from ort_backend.lowering.calls_on_device.picture_order import put_channels_last
from ort_backend.lowering.calls_on_device.viewed_calls import view_in_calls
from ort_backend.lowering.kernels import fused_attention
from ort_backend.lowering.lowered import Outside
from ort_backend.lowering.python_op import PythonCall
from ort_backend.target import OrtTarget


def rewrite_calls(graph: ir.Graph, calls: Sequence[PythonCall], target: OrtTarget) -> tuple[list[PythonCall], list[Outside], int]:
    """Rewrites the graph in place, such that the host has less to do for each call, and tensors lie as the kernels want them.

    Returns:
        The callables of the nodes that there are now, what to say of new ones in the report, and how many nodes less make the same calls.
    """
    outside: list[Outside] = []
    if target.kernels != "onnxruntime":
        for made, said in (cast_together(graph), count_together(graph)):
            calls = [*calls, *made]
            outside += said
    attention = {call.name for call in calls if call.recipe is not None and fused_attention.is_kernel(call.recipe.target)}
    views = view_in_calls(graph, attention)
    calls = put_channels_last(graph, calls, views)
    if target.kernels != "onnxruntime":
        made, said = bridge_calls(graph, calls)
        calls = [*calls, *made]
        outside += said
    merged = merge_calls(graph, calls, views)
    return merged, outside, len(calls) - len(merged)
