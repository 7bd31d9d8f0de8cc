"""Products whose left side is a transpose, as gradients of weights are: the transpose is made once, in front or of the result."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import onnx
import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import ON_CPU
from ops.harness import check, lower, run, trace
from torch import Tensor, nn

from ort_backend.options import CompileOptions
from ort_backend.runtime import capabilities

IN_FRONT, SWAPPED, AS_IT_IS = ["Transpose", "Flatten", "MatMul"], ["Transpose", "Flatten", "MatMul", "Transpose"], ["Gemm"]


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left.t() @ right


def _nodes(depth: int, rows: int, columns: int, *, dtype: torch.dtype = torch.float32, threads: int = 1) -> list[str]:
    """The operators of the lowered product (depth x rows)^T (depth x columns)."""
    inputs = torch.randn(depth, rows, dtype=dtype), torch.randn(depth, columns, dtype=dtype)
    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), threads=threads)
    return [node.op_type for node in lower(trace(_product, inputs), target).model.graph]


@pytest.mark.parametrize(
    "depth, rows, columns, nodes",
    [
        (512, 384, 768, IN_FRONT),
        (394, 192, 768, IN_FRONT),
        (512, 192, 200, IN_FRONT),
        (512, 512, 256, AS_IT_IS),  # rows of 2 KB: their transpose takes longer
        (1024, 384, 768, AS_IT_IS),  # a transpose with rows 4 KB apart: the product takes longer
        (512, 384, 128, AS_IT_IS),  # one block of columns
        (64, 384, 384, AS_IT_IS),  # small
        (512, 4000, 128, SWAPPED),
        (1024, 4000, 128, SWAPPED),
        (128, 4000, 384, IN_FRONT),  # few numbers to sum over
    ],
)
def test_which_are_rewritten(depth: int, rows: int, columns: int, nodes: list[str]) -> None:
    assert _nodes(depth, rows, columns) == nodes


def test_float64_stays() -> None:
    assert _nodes(512, 384, 768, dtype=torch.float64) == AS_IT_IS


def test_with_more_threads_products_must_be_wider() -> None:
    assert _nodes(394, 200, 768, threads=2) == IN_FRONT
    assert _nodes(394, 200, 380, threads=2) == AS_IT_IS
    assert _nodes(512, 4000, 128, threads=2) == AS_IT_IS


@pytest.mark.parametrize("given, threads", [({}, None), ({"intra_op_num_threads": 3}, 3), ({"intra_op_num_threads": 0}, os.cpu_count())])
def test_threads_are_those_of_the_session(given: dict[str, int], threads: int | None) -> None:
    assert CompileOptions(session_options=given).threads == threads


@pytest.mark.parametrize("depth, rows, columns", [(512, 384, 768), (512, 4000, 384), (300, 4001, 130)])
def test_numbers_equal_eager(depth: int, rows: int, columns: int) -> None:
    check(_product, *(torch.randint(-8, 9, (depth, size)).float() for size in (rows, columns)))  # whose sums are exact in any order


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    left, right = torch.randn(300, 384), torch.randn(300, 384)
    left[3, 5], right[7, 9] = float("nan"), float("inf")
    (result,) = run(lower(trace(_product, [left, right])), [left, right])
    assert torch.equal(torch.as_tensor(result).isfinite(), (left.t() @ right).isfinite())


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_gradients_of_weights(dynamic: bool | None, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(320, 640), nn.ReLU(), nn.Linear(640, 320), nn.ReLU(), nn.Linear(320, 4096))
    options = {"kernels": "onnxruntime", "dump_dir": str(tmp_path)}
    calls = [call(torch.randn(size, 320)) for size in (300, 260)]
    same_as_eager(net, *calls, graphs=1 if dynamic else 2, rtol=1e-3, atol=1e-4, dynamic=dynamic, options=options)
    optimized = [node.op_type for path in tmp_path.rglob("*.optimized.onnx") for node in onnx.load(path).graph.node]
    assert optimized.count("Flatten") == 3 * (1 if dynamic else 2) * ON_CPU  # ONNX Runtime leaves transpose and product apart
