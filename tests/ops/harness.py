"""Runs one function of tensors through the lowerings and a plain session on the CPU provider, without the rest of the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import onnxruntime as ort
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.lowered import LoweredGraph
from ort_backend.runtime import capabilities
from ort_backend.runtime.session import Program
from ort_backend.target import OrtTarget

_TARGET = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), python_op=False)


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor], *, dynamic: bool = False, decompositions: Any = None) -> fx.GraphModule:
    """The ATen graph of `function`, with symbolic sizes if `dynamic`."""
    return make_fx(lambda *args: function(*args), decomposition_table=decompositions or {}, tracing_mode="symbolic" if dynamic else "fake")(*inputs)


def lower(module: fx.GraphModule, target: OrtTarget = _TARGET) -> LoweredGraph:
    """The ONNX graph of an ATen graph. Raises LoweringError for an operator that has no lowering."""
    graph = GraphLowering(target, "test")
    nodes = list(module.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            graph.add_input(node, node.name)
    with torch.device("cpu"):  # as in a compile, during which Dynamo has the user's default device off
        graph.run(node for node in nodes if node.op in ("call_function", "get_attr"))
        results = torch.utils._pytree.tree_leaves(next(node for node in nodes if node.op == "output").args)
        for result in results:
            value = graph.value(result)
            if value.is_graph_input() or value.is_graph_output() or value.is_initializer():
                value = graph.fresh(value, result.meta["val"])
            graph.add_output(value)
        return graph.finish()


def run(lowered: LoweredGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a session makes of the inputs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    program = Program.of(lowered.model)
    session = ort.InferenceSession(program.model, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(program.disabled))
    feeds = {info.name: tensor.detach().contiguous().cpu().numpy() for info, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(array).to(torch.get_default_device()) for array in session.run(None, feeds)]


def check(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False, other: Sequence[torch.Tensor] | None = None) -> LoweredGraph:
    """Asserts that `function` on ONNX Runtime equals eager, also on `other` inputs of other sizes; gives back the graph."""
    lowered = lower(trace(function, inputs, dynamic=dynamic))
    for given in (inputs, other):
        if given is not None:
            expected = torch.utils._pytree.tree_leaves(function(*given))
            actual = run(lowered, given)
            for mine, theirs in zip(actual, expected, strict=True):
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, (mine.dtype, mine.shape, theirs.dtype, theirs.shape)
                torch.testing.assert_close(mine, theirs, equal_nan=True)
    return lowered
