"""Embedding bags and their gradients: which are PyTorch's, inside a session and between two, and with what results."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from behaviours.check import single_session
from default_device import seeded
from ops.harness import trace
from torch import nn

import ort_backend
from ort_backend.lowering.kernels import kernel_choice, session_choice
from ort_backend.runtime import capabilities

pytestmark = pytest.mark.cpu_only(reason="measured on the CPU")

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("rows", "width", "mode", "sparse", "inside", "between"),
    [
        (51200, 64, "sum", True, True, True), (5120, 16, "mean", True, True, True), (2048, 64, "sum", True, True, True),
        (1024, 64, "sum", True, False, False), (5120, 16, "sum", False, False, False), (51200, 64, "sum", False, True, True),
        (2048, 64, "max", False, True, True), (512, 64, "max", False, False, False),
    ],
)  # fmt: skip
def test_choice_of_bags(rows: int, width: int, mode: str, sparse: bool, inside: bool, between: bool) -> None:
    number = ["sum", "mean", "max"].index(mode)

    def read(table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        return [one * 1 for one in aten._embedding_bag(table, indices, offsets, False, number, sparse)]

    for dtype in (torch.float32, torch.bfloat16):
        given = [torch.ones(100, width, dtype=dtype), torch.zeros(rows, dtype=torch.int64), torch.arange(0, rows, 8)]
        _check(trace(read, given), aten._embedding_bag.default, dtype, inside, between)


@pytest.mark.parametrize(
    ("table", "rows", "mode", "inside", "between"),
    [
        ((100_000, 64), 5120, 0, True, True), ((10_000, 128), 64, 1, True, True), ((10_000, 128), 51200, 0, False, False),
        ((1000, 64), 64, 0, False, False), ((100_000, 64), 5120, 2, False, False),
    ],
)  # fmt: skip
def test_choice_of_gradients(table: tuple[int, int], rows: int, mode: int, inside: bool, between: bool) -> None:
    def gradient(seed: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return aten._embedding_bag_backward(seed, indices, offsets, indices, counts, places, table[0], False, mode, False, None)

    for dtype in (torch.float32, torch.float64):
        offsets = torch.arange(0, rows, 8)
        seed = torch.ones(len(offsets), table[1], dtype=dtype)
        given = [seed, torch.zeros(rows, dtype=torch.int64), offsets, torch.full_like(offsets, 8), torch.zeros_like(seed, dtype=torch.int64)]
        _check(trace(gradient, given), aten._embedding_bag_backward.default, dtype, inside, between)


def _check(module: torch.fx.GraphModule, target: torch._ops.OpOverload, dtype: torch.dtype, inside: bool, between: bool) -> None:
    of_ort = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), kernels="measured")
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    counts = dtype is torch.float32
    if of_ort.whole_graphs:
        assert (kernel_choice.faster_in_pytorch(node, of_ort) is not None) == (inside and counts)
    assert session_choice.far_faster_in_pytorch(node, of_ort) == (between and counts)
    asked = dataclasses.replace(of_ort, kernels="onnxruntime")
    assert kernel_choice.faster_in_pytorch(node, asked) is None and not session_choice.far_faster_in_pytorch(node, asked)


@single_session
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    ("rows", "bags", "sparse", "padding", "chosen"),
    [
        (50, 512, True, None, {"aten::_embedding_bag", "aten::_embedding_bag_backward"}),
        (50, 512, False, 3, {"aten::_embedding_bag"}),
        (40_000, 8, False, 3, {"aten::_embedding_bag_backward"}),
        (50, 8, False, None, set()),
    ],
    ids=["sparse", "many rows", "a large table", "few rows"],
)
def test_results_equal_eager(rows: int, bags: int, sparse: bool, padding: int | None, chosen: set[str], mode: str) -> None:
    torch._dynamo.reset()
    generator = seeded(0)
    start = torch.randn(rows, 64, generator=generator)
    indices = torch.randint(0, rows, (bags * 10,), generator=generator)
    offsets = torch.randint(0, bags * 10, (bags,), generator=generator).sort().values
    offsets[0] = 0

    def step(compiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        layer = nn.EmbeddingBag(rows, 64, mode=mode, sparse=sparse, padding_idx=padding, _weight=start.clone())
        call = torch.compile(layer, backend="ort_training", fullgraph=True) if compiled else layer
        out = call(indices, offsets)
        (out * out).sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.is_sparse == sparse
        return out.detach(), layer.weight.grad.to_dense()

    torch.testing.assert_close(step(True), step(False), rtol=1e-5, atol=1e-4)
    outside = ort_backend.report().graphs[-1].outside
    assert {one.operator for one in outside} == chosen
    assert all(one.is_choice for one in outside if not sparse)
