"""Casts of parameters to half precision on a CUDA device: one call of PyTorch for all of them, with a few kernels.

Under autocast each weight and bias is cast in each step. A node of ONNX Runtime's for each costs the host some 14 microseconds, and its memory more
(a machine with an H100, 2026-11; GPT-2 small has 98 of them, BERT-base 200), and the device runs as many small kernels.

The casts lie in one block of memory, until the last one is given up: in training, where they are needed until the backward is almost done.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from ort_backend.lowering.lowered import Outside
from ort_backend.lowering.python_op import MS, PythonCall, unique_name
from ort_backend.lowering.splitting.saved import behind_yield
from ort_backend.target import TRITON

_HALF = {ir.DataType.BFLOAT16: torch.bfloat16, ir.DataType.FLOAT16: torch.float16}
# Fewer are not worth a call.
_FEWEST = 4
# Numbers in half precision: what follows a tensor of a multiple of these begins where kernels for 16 bytes at a time can read it.
_ALIGNED = 64
_TITLE = "aten::_foreach_copy_"


def cast_together(graph: ir.Graph) -> tuple[list[PythonCall], list[Outside]]:
    """Rewrites a training graph in place.

    Returns:
        The callables of the new nodes, and what to say of them in the report.
    """
    calls: list[PythonCall] = []
    if not behind_yield(graph)[0]:
        return calls, []
    inputs = set(graph.inputs)
    for half, dtype in _HALF.items():
        casts = [node for node in graph if node.op_type == "Cast" and node.outputs[0].dtype == half and node.inputs[0] in inputs and _fits(node)]
        if len(casts) >= _FEWEST:
            call = PythonCall(unique_name(_TITLE), _TITLE, functools.partial(cast_all, dtype), op_type=TRITON)
            _replace(graph, casts, call.name)
            calls.append(call)
    return calls, [Outside(call.title, "one kernel of PyTorch's casts all parameters", "", True) for call in calls]


def cast_all(dtype: torch.dtype, *given: Tensor) -> Sequence[Tensor]:
    """The tensors in another dtype, one behind the other in memory."""
    tensors = list(given)
    block = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    made: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(block, tensors)
    torch._foreach_copy_(list(made), tensors)
    return made


def _fits(node: ir.Node) -> bool:
    value, made = node.inputs[0], node.outputs[0]
    if value is None or value.dtype != ir.DataType.FLOAT or value.shape is None or made.is_graph_output():
        return False
    count = 1
    for size in value.shape:
        if not isinstance(size, int):
            return False
        count *= size
    return count > 0 and count % _ALIGNED == 0


def _replace(graph: ir.Graph, casts: Sequence[ir.Node], name: str) -> None:
    made: dict[ir.Value, ir.Value] = {}
    for cast in casts:
        source, old = cast.inputs[0], cast.outputs[0]
        assert source is not None
        if source not in made:
            made[source] = ir.Value(name=old.name, type=old.type, shape=source.shape)
            old.name = f"{old.name}_before"
        old.replace_all_uses_with(made[source])
    node = ir.Node(MS, TRITON, list(made), [ir.AttrString("func_name", name)], version=1, outputs=list(made.values()))
    graph.insert_before(casts[0], node)
    graph.remove(casts, safe=True)
