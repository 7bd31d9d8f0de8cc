"""A training graph as it is lowered for a CUDA device, interpreted on the CPU: PyTorch's calls as they are, other nodes by the CPU provider.

For a process with the stand-in libraries (`over_stand_in`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any
from unittest import mock

import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import fx

from ort_backend.lowering import graph as lowering
from ort_backend.lowering.kernels import device_kernels
from ort_backend.lowering.python_op import PythonCall, callable_of
from ort_backend.runtime import capabilities
from tools.cuda_placement.capture import as_on_cuda


class Program:
    """The graph of one training step.

    Attributes:
        graph: Its ONNX graph.
        calls: The callables of its nodes.
    """

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], in_pytorch: Set[str], normalizes: bool) -> None:
        """Lowers a call of a function.

        Args:
            function: A module or function of tensors on the CPU.
            kwargs: Its arguments.
            in_pytorch: ONNX operators for which there is to be no kernel, as there is none in bfloat16.
            normalizes: Whether batch normalizations are PyTorch's, as they are in bfloat16.
        """
        self._given: Sequence[torch.Tensor] = ()
        rewrite, has_kernel = lowering.rewrite_calls, capabilities.has_kernel

        def traced(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
            self._given = [one.detach().clone() for one in inputs]
            return gm.forward

        def rewritten(graph: ir.Graph, calls: Sequence[PythonCall], target: Any) -> Any:
            made = rewrite(graph, calls, target)
            self.graph, self.calls = graph, made[0]
            return made

        def has(node: ir.Node, **where: Any) -> bool:
            return node.op_type not in in_pytorch and has_kernel(node, **where)

        torch.compile(function, backend=traced)(**kwargs)
        torch._dynamo.reset()
        normalization = mock.patch.object(device_kernels, "normalizes_bfloat16", lambda node: normalizes and "batch_norm" in str(node.target))
        with mock.patch.object(lowering, "rewrite_calls", rewritten), mock.patch.object(capabilities, "has_kernel", has), normalization, as_on_cuda():
            torch.compile(function, backend="ort_training", options={"provider": "CUDAExecutionProvider"})(**kwargs)

    def run(self, tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The graph's results, for the tangents that come in at the `YieldOp`."""
        callables = {call.name: call.function for call in self.calls}
        values: dict[ir.Value, torch.Tensor] = {value: self._given[int(str(value.name).removeprefix("primals_")) - 1] for value in self.graph.inputs}
        values |= {value: torch.from_numpy(value.const_value.numpy().copy()) for value in self.graph.initializers.values() if value.const_value}
        self.graph.sort()
        for node in self.graph:
            given = [None if value is None else values[value] for value in node.inputs]
            function = callables.get(callable_of(node) or "")
            if function is not None:
                results: Iterable[torch.Tensor] = function(*(one.contiguous() for one in given if one is not None))
            else:
                results = tangents if node.op_type == "YieldOp" else _by_ort(node, given)
            values |= dict(zip(node.outputs, results, strict=True))
        return [values[value] for value in self.graph.outputs]


def _by_ort(node: ir.Node, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    inputs = [
        None if value is None else ir.Value(name=f"x{i}", type=ir.TensorType(value.dtype or ir.DataType.FLOAT)) for i, value in enumerate(node.inputs)
    ]
    outputs = [ir.Value(name=f"y{i}", type=value.type) for i, value in enumerate(node.outputs)]
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs)
    graph = ir.Graph([one for one in inputs if one is not None], outputs, nodes=[copy], opset_imports={"": 18, "com.microsoft": 1})
    session = ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {f"x{i}": one.contiguous().numpy() for i, one in enumerate(given) if one is not None}
    return [torch.from_numpy(one) if one.shape else torch.tensor(one) for one in session.run(None, feeds)]
