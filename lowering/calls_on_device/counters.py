"""Counters of steps on a CUDA device, such as a batch normalization's: one call of PyTorch counts them all.

A node of ONNX Runtime's that adds 1 to a single number costs the host as much as any other, some 14 microseconds (a machine with an H100, 2026-11;
ResNet-50 has 53 of them).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from ort_backend.lowering.lowered import Outside
from ort_backend.lowering.python_op import MS, PythonCall, unique_name
from ort_backend.target import TRITON

# Fewer are not worth a call.
_FEWEST = 4
_TITLE = "aten::_foreach_add"


def count_together(graph: ir.Graph) -> tuple[list[PythonCall], list[Outside]]:
    """Rewrites a graph in place.

    Returns:
        The callable of the new node, and what to say of it in the report.
    """
    inputs = set(graph.inputs)
    counts = [node for node in graph if node.op_type == "Add" and not node.domain and node.inputs[0] in inputs and _adds_one(node)]
    if len(counts) < _FEWEST or len({node.inputs[0] for node in counts}) < len(counts):
        return [], []
    call = PythonCall(unique_name(_TITLE), _TITLE, count_all, op_type=TRITON)
    made = []
    for node in counts:
        old = node.outputs[0]
        new = ir.Value(name=old.name, type=old.type, shape=old.shape)
        old.name = f"{old.name}_before"
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        made.append(new)
    node = ir.Node(MS, TRITON, [one.inputs[0] for one in counts], [ir.AttrString("func_name", call.name)], version=1, outputs=made)
    graph.insert_before(counts[0], node)
    graph.remove(counts, safe=True)
    return [call], [Outside(call.title, "one kernel of PyTorch's counts all steps", "", True)]


def count_all(*counters: Tensor) -> Sequence[Tensor]:
    """Each, and 1 more."""
    return torch._foreach_add(list(counters), 1)


def _adds_one(node: ir.Node) -> bool:
    number, added = node.inputs
    if number is None or added is None or number.dtype != ir.DataType.INT64 or number.shape is None or number.shape.rank() != 0:
        return False
    constant = ir.convenience.get_const_tensor(added)
    return constant is not None and constant.size == 1 and constant.numpy().item() == 1
