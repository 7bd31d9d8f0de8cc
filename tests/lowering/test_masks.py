"""Booleans as numbers on the CPU: dequantized bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from behaviours.check import Both, call, on_ort, same_as_eager, single_session
from default_device import ON_CPU, seeded
from torch import nn

aten = torch.ops.aten
Check = Callable[..., Any]
MANY, FEW = (64, 3, 128), (4, 3, 8)


def _mask(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(sizes, generator=seeded(0)) > 0


@pytest.mark.parametrize(("sizes", "dequantized"), [(MANY, True), (FEW, False)])
def test_a_large_mask_is_dequantized(check: Check, sizes: tuple[int, ...], dequantized: bool) -> None:
    found = check(lambda mask: mask.float(), _mask(sizes))
    assert ("DequantizeLinear" in found.op_types) == (dequantized and ON_CPU)


def test_by_the_factor_that_comes_next(check: Check) -> None:
    found = check(lambda mask: mask.float() * 0.3, _mask(MANY), also=(_mask((64, 5, 128)),), rtol=0, atol=0)
    assert ("DequantizeLinear" in found.op_types, "Mul" in found.op_types) == (ON_CPU, not ON_CPU)


def test_by_one_where_something_else_reads_it_too(check: Check) -> None:
    def twice(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = mask.float()
        return numbers * 0.3, numbers + 1

    assert check(twice, _mask(MANY), rtol=0, atol=0).op_types.count("Mul") == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_dtypes_are_cast(check: Check, dtype: torch.dtype) -> None:
    assert "DequantizeLinear" not in check(lambda mask: mask.to(dtype), _mask(MANY)).op_types


@pytest.mark.parametrize("dim", [0, 1, 2, (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_true_ones_are_counted_in_float32(check: Check, dim: Any, keepdim: bool) -> None:
    found = check(lambda mask: mask.sum(dim, keepdim), _mask(MANY), rtol=0, atol=0)
    assert ("DequantizeLinear" in found.op_types) == ON_CPU


def test_a_count_of_every_one_is_exact(check: Check) -> None:
    check(lambda mask: mask.sum(0), torch.ones(1 << 24, 1, dtype=torch.bool), rtol=0, atol=0)


def test_too_many_are_counted_in_int64(lower: Check) -> None:
    assert "DequantizeLinear" not in lower(lambda mask: mask.sum(0), (torch.ones((1 << 24) + 1, 1, dtype=torch.bool),)).op_types


def test_a_count_of_changing_length(check: Check) -> None:
    check(lambda mask: (mask.sum(0), mask.sum(1)), _mask((64, 128)), also=(_mask((96, 128)),), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [MANY, FEW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1 / 0.9, 1.0, 0.0])
def test_gradients_of_dropout(check: Check, sizes: tuple[int, ...], dtype: torch.dtype, scale: float) -> None:
    grad = torch.randn(sizes, dtype=dtype, generator=seeded(1))
    grad.view(-1)[:3] = torch.tensor([float("inf"), float("nan"), -0.0])
    check(lambda grad, mask: aten.native_dropout_backward(grad, mask, scale), grad, _mask(sizes), rtol=1e-6, atol=0)


@pytest.mark.cpu_only(reason="masks as dequantized bytes")
@single_session
def test_forward_and_backward_read_the_mask_and_keep_no_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Both(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 8)), options={"dump_dir": str(tmp_path)})

    def do(call: Any, module: nn.Module) -> torch.Tensor:
        module.zero_grad()
        result = call(torch.ones(64, 64))
        result.square().mean().backward()
        return result.detach()

    with on_ort(graphs=1):
        for _ in range(2):
            model.step(do)
    nodes = onnx.load(next(tmp_path.glob("*.optimized.onnx"))).graph.node
    casts = {node.output[0]: node.attribute[0].i for node in nodes if node.op_type == "Cast"}
    dequantized = {node.output[0]: casts[node.input[0]] for node in nodes if node.op_type == "DequantizeLinear"}
    readers = {name: [node for node in nodes if name in node.input] for name in dequantized}
    assert {onnx.TensorProto.UINT8, onnx.TensorProto.INT8} == set(dequantized.values())
    assert all(len(nodes) == 1 for nodes in readers.values())
    assert not [node for node in nodes if node.op_type == "DropoutGrad"]


@pytest.mark.parametrize("reduce", ["amin", "amax"])
def test_a_transpose_of_one_in_the_backward(reduce: str) -> None:
    index = torch.randint(0, 40, (8192,), generator=seeded(1))

    def extremes(source: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, 40).scatter_reduce(1, index.expand(2, 8192), source, reduce, include_self=False)

    same_as_eager(extremes, call(torch.randn(2, 8192, generator=seeded(0), requires_grad=True)))
