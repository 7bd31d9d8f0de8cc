"""Convolutions of single pixels over images of few of them, and their gradients, are one product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import ON_CPU
from ops.harness import check, lower, trace
from torch import Tensor, nn

from ort_backend.runtime import capabilities

convolve = nn.functional.conv2d


def _nodes(x: Tensor, weight: Tensor, **settings: Any) -> list[str]:
    return [node.op_type for node in lower(trace(lambda x, w: convolve(x, w, **settings), [x, weight])).model.graph]


@pytest.mark.parametrize("size", [(2, 2), (4, 4), (1, 16)], ids=str)
def test_few_pixels_become_rows(size: tuple[int, int]) -> None:
    nodes = _nodes(torch.randn(16, 128, *size), torch.randn(256, 128, 1, 1))
    assert "Conv" not in nodes and "Gemm" in nodes


@pytest.mark.parametrize(
    "images, size, channels, kernel, settings",
    [
        (16, (5, 4), 128, 1, {}),  # more pixels
        (16, (1, 1), 128, 1, {}),  # a product as it is
        (1, (4, 4), 512, 1, {}),  # one image
        (16, (2, 2), 16, 1, {}),  # little to do
        (16, (4, 4), 128, 3, {}),
        (16, (4, 4), 128, 1, {"stride": 2}),
        (16, (2, 2), 128, 1, {"padding": 1}),
    ],
)
def test_others_stay(images: int, size: tuple[int, int], channels: int, kernel: int, settings: dict[str, Any]) -> None:
    assert "Conv" in _nodes(torch.randn(images, channels, *size), torch.randn(256, channels, kernel, kernel), **settings)


def test_groups_stay() -> None:
    assert "Conv" in _nodes(torch.randn(16, 512, 2, 2), torch.randn(512, 128, 1, 1), groups=4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(12,), (3, 4), (2, 2, 3)], ids=str)
def test_numbers_equal_eager(size: tuple[int, ...], bias: bool) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(size) - 1](96, 160, 1, bias=bias)
    x = torch.randn(8, 96, *size)
    parameters = [parameter.detach() for parameter in layer.parameters()]
    lowered = check(lambda x, *given: torch.conv1d(x, *given) if x.dim() == 3 else _convolved(x, *given), x, *parameters)
    assert "Conv" not in [node.op_type for node in lowered.model.graph]


def _convolved(x: Tensor, *given: Tensor) -> Tensor:
    return torch.conv2d(x, *given) if x.dim() == 4 else torch.conv3d(x, *given)


def _optimized(folder: Path) -> list[str]:
    return [node.op_type for path in folder.rglob("*.optimized.onnx") for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("frozen", [(), ("0.weight",), ("1.weight", "1.bias"), ("0.weight", "0.bias", "1.weight", "1.bias")], ids=str)
def test_training(frozen: tuple[str, ...], tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(64, 160, 1), nn.Conv2d(160, 96, 1), nn.BatchNorm2d(96), nn.Conv2d(96, 96, 1, bias=False), nn.Conv2d(96, 32, 2))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    options = {"kernels": "onnxruntime", "dump_dir": str(tmp_path)}
    same_as_eager(net, call(torch.randn(24, 64, 3, 3)), graphs=1, rtol=1e-3, atol=1e-4, options=options)
    if capabilities.has_training() and ON_CPU:  # else the gradient of a weight is a convolution
        assert [_optimized(tmp_path).count(name) for name in ("Conv", "ConvGrad")] == [1, 1]  # the last layer's


def test_a_batch_size_that_changes(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(64, 256, 1), nn.ReLU(), nn.Conv2d(256, 64, 1))
    calls = [call(torch.randn(size, 64, 4, 4)) for size in (32, 40, 48)]
    options = {"kernels": "onnxruntime", "dump_dir": str(tmp_path)}
    same_as_eager(net, *calls, graphs=2, dynamic=None, rtol=1e-3, atol=1e-4, options=options)
    nodes = _optimized(tmp_path)
    assert not ON_CPU or "Gemm" in nodes and not {"Conv", "ConvGrad"} & {*nodes}
