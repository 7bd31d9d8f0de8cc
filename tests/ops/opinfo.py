"""Runs samples of PyTorch's operator database through `torch.compile(backend="ort_training")` and through eager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from ort_backend import graph_report


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one sample gave: results and gradients of both, and what did not run on ONNX Runtime's own kernels."""

    actual: list[Any]
    expected: list[Any]
    onnx_nodes: int
    outside: tuple[str, ...]


def samples(info: OpInfo, dtype: torch.dtype, at_most: int | None) -> Iterator[SampleInput]:
    """Samples of an operator, spread evenly over all that there are."""
    every = list(info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)))
    if at_most is None or len(every) <= at_most:
        yield from every
    else:
        step = (len(every) - 1) / max(at_most - 1, 1)
        yield from (every[round(i * step)] for i in range(at_most))


def run(info: OpInfo, sample: SampleInput) -> Outcome:
    """One sample, forward and backward."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]

    def function(*given: torch.Tensor) -> list[Any]:
        filled = list(leaves)
        for i, tensor in zip(places, given):
            filled[i] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        results = pytree.tree_leaves(info.op(first, *args, **kwargs))
        # A copy: AOTAutograd would compute a view of an argument outside of the graph.
        return [result.clone() if isinstance(result, torch.Tensor) else result for result in results]

    torch._dynamo.reset()
    graph_report.clear()
    expected = _results_and_gradients(function, tensors)
    actual = _results_and_gradients(torch.compile(function, backend="ort_training", fullgraph=True, dynamic=False), tensors)
    graphs = graph_report.report().graphs
    outside = tuple(f"{one.operator} ({one.reason})" for graph in graphs for one in graph.outside)
    return Outcome(actual, expected, sum(graph.onnx_nodes - graph.python_ops for graph in graphs), outside)


def _results_and_gradients(function: Callable[..., list[Any]], tensors: Sequence[torch.Tensor]) -> list[Any]:
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    torch.manual_seed(0)
    results = function(*inputs)
    differentiable = [result for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
    gradients: Sequence[Any] = []
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if differentiable and wanted:
        torch.manual_seed(1)
        tangents = [torch.randn(result.shape, dtype=result.dtype) for result in differentiable]
        gradients = torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True)
    return [result.detach() if isinstance(result, torch.Tensor) else result for result in (*results, *gradients)]
