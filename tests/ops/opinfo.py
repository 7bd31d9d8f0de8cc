"""Runs samples of PyTorch's operator database through `torch.compile(backend="ort_training")` and through eager.

All samples of a case are one graph: compiled once, run forward and backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from default_device import seeded
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

from ort_backend import graph_report
from ort_backend.operator_database import Sample
from ort_backend.sample_program import Program

Results = list[list[Any]]
"""For each sample: its results, and behind them the gradients of its inputs (None where there is none)."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the samples gave on ONNX Runtime, and what did not run on its own kernels."""

    results: Results
    onnx_nodes: int
    outside: tuple[tuple[str, str], ...]


def in_eager(operator: Callable[..., Any], chosen: Sequence[Sample], dtype: torch.dtype | None = None) -> Results:
    """What the samples give in eager PyTorch; `dtype`: with the floating-point tensors cast to it, complex ones to its complex dtype."""
    return _results_and_gradients(Program(operator, [sample.given for sample in chosen]), dtype=dtype)


def compiled(info: OpInfo, chosen: Sequence[Sample], *, dynamic: bool, backend: str = "ort_training") -> Outcome:
    """What the samples give compiled, as one graph; `dynamic`: with every size but 0 and 1 symbolic."""
    program = Program(info.op, [sample.given for sample in chosen])
    torch._dynamo.reset()
    graph_report.clear()
    # What has a lowering runs on ONNX Runtime, also where PyTorch's kernel would be chosen as the faster one.
    options = {"kernels": "onnxruntime"} if backend == "ort_training" else None

    def transform(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=backend, fullgraph=True, options=options)

    results = _results_and_gradients(program, transform, dynamic=dynamic)
    graphs = graph_report.report().graphs
    outside = sorted({(one.operator, one.reason) for graph in graphs for one in graph.outside})
    return Outcome(results, sum(graph.onnx_nodes - graph.python_ops for graph in graphs), tuple(outside))


def _results_and_gradients(
    program: Program, transform: Callable[[Any], Any] = lambda function: function, *, dynamic: bool = False, dtype: torch.dtype | None = None
) -> Results:
    inputs = [[_input(tensor, dtype) for tensor in tensors] for tensors in program.tensors]
    flat = [tensor for tensors in inputs for tensor in tensors]
    if dynamic:
        for one in flat:
            torch._dynamo.maybe_mark_dynamic(one, [d for d, size in enumerate(one.shape) if size > 1])
    torch.manual_seed(0)
    results = [pytree.tree_leaves(result) for result in transform(program.function)(*flat)]
    gradients = _gradients(results, inputs)
    return [[*(_plain(result) for result in mine), *theirs] for mine, theirs in zip(results, gradients)]


def _input(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    made = tensor.detach().clone()
    if dtype is not None and (made.is_floating_point() or made.is_complex()):
        made = made.to(dtype.to_complex() if made.is_complex() else dtype)
    return made.requires_grad_(tensor.requires_grad)


def _gradients(results: Results, inputs: list[list[torch.Tensor]]) -> Results:
    """The gradients of each sample's inputs, for random tangents that are the same in every run."""
    flat = [result for result in pytree.tree_leaves(results) if isinstance(result, torch.Tensor) and result.requires_grad]
    wanted = [tensor for tensors in inputs for tensor in tensors if tensor.requires_grad]
    found: Iterator[Any] = iter(())
    if flat and wanted:
        found = iter(torch.autograd.grad(flat, wanted, [_tangent(i, result) for i, result in enumerate(flat)], allow_unused=True))
    return [[next(found, None) if tensor.requires_grad else None for tensor in tensors] for tensors in inputs]


def _tangent(seed: int, result: torch.Tensor) -> torch.Tensor:
    generator = seeded(seed)
    kind = torch.complex128 if result.is_complex() else torch.float64
    return torch.randn(result.shape, dtype=kind, generator=generator).to(result)


def _plain(result: Any) -> Any:
    return result.detach() if isinstance(result, torch.Tensor) else result
