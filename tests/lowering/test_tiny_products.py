"""Batches of products of tiny matrices: which are PyTorch's, inside a session and between two, and with what results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from behaviours.check import single_session
from default_device import seeded
from ops.harness import trace

import ort_backend
from ort_backend.lowering.kernels import kernel_choice, session_choice
from ort_backend.runtime import capabilities

pytestmark = pytest.mark.cpu_only(reason="PyTorch's loop for the CPU")


@pytest.mark.parametrize(
    ("batch", "rows", "depth", "columns", "inside", "between"),
    [
        (4096, 3, 3, 1, True, True), (400, 3, 3, 1, True, False), (128, 3, 3, 1, False, False), (4096, 3, 3, 3, True, True),
        (4096, 4, 4, 4, True, True), (4096, 1, 64, 1, True, True), (4096, 8, 1, 8, False, False), (4096, 6, 6, 6, False, False),
        (4096, 4, 64, 4, False, False),
    ],
)  # fmt: skip
def test_choice(batch: int, rows: int, depth: int, columns: int, inside: bool, between: bool) -> None:
    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), kernels="measured")
    for dtype, counts in ((torch.float32, True), (torch.float64, True), (torch.bfloat16, False)):
        tensors = [torch.ones(batch, rows, depth, dtype=dtype), torch.ones(batch, depth, columns, dtype=dtype)]
        (node,) = trace(torch.bmm, tensors).graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
        if counts and target.whole_graphs:
            assert (kernel_choice.faster_in_pytorch(node, target) is not None) == inside
        assert session_choice.far_faster_in_pytorch(node, target) == (between and counts)
        asked = dataclasses.replace(target, kernels="onnxruntime")
        assert kernel_choice.faster_in_pytorch(node, asked) is None and not session_choice.far_faster_in_pytorch(node, asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_equal_eager(dynamic: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_turned, backend="ort_training", fullgraph=True, dynamic=dynamic)
    generator = seeded(0)
    for count in (2000, 1500) if dynamic else (2000,):
        turns, points = torch.randn(count, 3, 3, generator=generator, dtype=dtype), torch.randn(count, 3, generator=generator, dtype=dtype)
        torch.testing.assert_close(_gradients(compiled, turns, points), _gradients(_turned, turns, points))
    by_pytorch = [(one.operator, one.is_choice, one.count) for one in ort_backend.report().graphs[-1].outside if one.operator == "aten::bmm"]
    assert by_pytorch == [("aten::bmm", True, 3)]


@single_session
def test_few_stay_on_onnx_runtime() -> None:
    torch._dynamo.reset()
    turns, points = torch.randn(64, 3, 3), torch.randn(64, 3)
    torch.testing.assert_close(_gradients(torch.compile(_turned, backend="ort_training"), turns, points), _gradients(_turned, turns, points))
    assert not ort_backend.report().graphs[-1].outside


def _turned(turns: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    return (turns @ points.unsqueeze(-1)).squeeze(-1).sin()


def _gradients(function: Any, *tensors: torch.Tensor) -> list[torch.Tensor | None]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]
