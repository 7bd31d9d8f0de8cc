"""Casts of large tensors to and from half precision by PyTorch's kernels: ONNX Runtime's convert one number after the other.

Autocast casts parameters, and on the CPU ONNX Runtime's kernels compute between casts to float32, so that these stand all over a graph in half
precision. They are found in the finished ONNX graph, as most of them are no nodes of the FX graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.dtypes import to_torch
from ort_backend.lowering.kernels.kernel_choice import faster_cast, pytorch_may_run
from ort_backend.lowering.lowered import Outside
from ort_backend.lowering.provenance import newest, take_place
from ort_backend.lowering.python_op import PythonCall, write_python_op
from ort_backend.lowering.symbolic import example
from ort_backend.target import OrtTarget

_TITLE = "aten::_to_copy"


def give_casts_away(op: Any, graph: ir.Graph, target: OrtTarget, hints: Mapping[str, int | None]) -> tuple[list[PythonCall], list[Outside]]:
    """Replaces, in place, each `Cast` that PyTorch's kernel is faster at by a `PythonOp`; those of one value to one dtype by one.

    Args:
        op: The builder of the graph.
        graph: The finished graph.
        target: The ONNX Runtime that it is for.
        hints: The examples of symbolic sizes, by name; None where a size follows from values.

    Returns:
        The callables to register, and what to say of them in the report.
    """
    calls: list[PythonCall] = []
    outside: list[Outside] = []
    if not target.python_op or not pytorch_may_run(target):
        return calls, outside
    made: dict[tuple[ir.Value, ir.DataType | None], ir.Value] = {}
    for node in list(graph):
        if node.op_type == "YieldOp":
            made.clear()  # what the backward casts once more needs no memory until then
        if node.op_type != "Cast" or (source := node.inputs[0]) is None or (ratio := _gain(source, node.outputs[0], hints)) is None:
            continue
        result, key = node.outputs[0], (source, node.outputs[0].dtype)
        if key in made and not result.is_graph_output():
            result.replace_all_uses_with(made[key])
            graph.remove(node, safe=True)
            continue
        before, where = len(graph), node.metadata_props.get("stack_trace", "")
        made[key], call = _write(op, source, result)
        take_place(graph, node, newest(graph, len(graph) - before), made[key], call.name)
        calls.append(call)
        outside.append(Outside(_TITLE, f"PyTorch's kernel is {ratio:.1f} times as fast at this size", where, True))
    return calls, outside


def _gain(source: ir.Value, result: ir.Value, hints: Mapping[str, int | None]) -> float | None:
    shape = source.shape if source.shape is not None else result.shape
    if source.dtype is None or result.dtype is None or shape is None:
        return None
    return faster_cast(to_torch(source.dtype), to_torch(result.dtype), math.prod(example(size, hints) for size in shape))


def _write(op: Any, source: ir.Value, result: ir.Value) -> tuple[ir.Value, PythonCall]:
    dtypes = [to_torch(value.dtype) for value in (source, result)]  # type: ignore[arg-type]
    rank = len(source.shape if source.shape is not None else result.shape)  # type: ignore[arg-type]
    given, wanted = (torch.empty((0,) * rank, dtype=dtype) for dtype in dtypes)
    values, call = write_python_op(op, torch.ops.aten._to_copy.default, _TITLE, (source,), {"dtype": wanted.dtype}, wanted, [given])
    assert values[0] is not None
    return values[0], call
