"""Runs one function of tensors, forward and backward, through `torch.compile(backend="ort_training")` and through eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree
from torch_version import MORE_IS_SYMBOLIC, TORCH

from ort_backend import graph_report
from ort_backend.lowering.splitting.regions import SLOWER, TOO_SMALL
from ort_backend.runtime import capabilities

BETWEEN_SESSIONS = (TOO_SMALL, SLOWER)  # why, with the plain onnxruntime, an operator runs in PyTorch although it could run in a session


def needs_grad(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal random numbers that want a gradient."""
    return torch.randn(*size, dtype=dtype).requires_grad_()


def check_training(
    function: Callable[..., Any],
    *inputs: Any,
    dynamic: bool = False,
    others: Sequence[Sequence[Any]] = (),
    outside: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Asserts that results and gradients equal eager's, also for `others` of other sizes (one graph), and what ran as `PythonOp`.

    Args:
        function: Takes tensors, gives a tree of tensors.
        inputs: Its arguments.
        dynamic: Whether every size is symbolic.
        others: More arguments, that the graph of the first ones must serve (before torch 2.13: as few graphs as `aot_eager` needs).
        outside: Names of the operators that run in PyTorch, none by default.
        options: Of the backend.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
    """

    def copied(*args: Any) -> Any:  # AOTAutograd would compute a view of an argument outside of the graph
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, function(*args))

    torch._dynamo.reset()
    graph_report.clear()
    compiled = torch.compile(copied, backend="ort_training", fullgraph=True, dynamic=dynamic, options=options)
    for given in (inputs, *others):
        for mine, theirs in zip(_run(compiled, given), _run(copied, given), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
    graphs = graph_report.report().graphs
    assert sum(graph.onnx_nodes for graph in graphs) > 0
    ran_outside = {one.operator for graph in graphs for one in graph.outside if one.reason not in BETWEEN_SESSIONS}
    if capabilities.has_training():
        assert sorted(ran_outside) == sorted(outside)
    else:  # where PyTorch's kernel being the faster one is no reason to end a session
        assert ran_outside <= set(outside)
    if dynamic and len(graphs) != 1:
        allowed = 1 if TORCH >= MORE_IS_SYMBOLIC else _graphs_of_aot_eager(copied, (inputs, *others))
        assert len(graphs) <= allowed, "compiled again for other sizes"


def _graphs_of_aot_eager(function: Callable[..., Any], given: Sequence[Sequence[Any]]) -> int:
    """How many graphs Dynamo hands a backend that only traces, forward and backward, where every size may be symbolic."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for one in given:
        _run(compiled, one)
    return counter.frame_count


def _run(function: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
    """Results, then gradients."""
    inputs = [one.detach().clone().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one for one in given]
    results = pytree.tree_leaves(function(*inputs))
    differentiable = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
    wanted = [one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad]
    gradients: Sequence[Any] = []
    if differentiable and wanted:
        torch.manual_seed(1)
        gradients = torch.autograd.grad(differentiable, wanted, [_tangent(one) for one in differentiable], allow_unused=True)
    return [one.detach() if isinstance(one, torch.Tensor) else one for one in (*results, *gradients)]


def _tangent(result: torch.Tensor) -> torch.Tensor:
    return torch.randn(result.shape, dtype=torch.complex64 if result.is_complex() else torch.float32).to(result.dtype)
