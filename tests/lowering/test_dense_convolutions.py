"""Dense convolutions of 3 x 3 pixels: which of the two kernels was the faster one, inside a session and between two, and eager's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort
from default_device import ON_CPU
from ops.harness import trace
from torch import fx, nn

from ort_backend.lowering.kernels import dense_convolutions, session_choice
from ort_backend.runtime import capabilities

aten = torch.ops.aten


def _nodes(images: int, channels: int, results: int, size: int, taken: int = 3, stride: int = 1, dilation: int = 1, **kinds: Any) -> list[fx.Node]:
    """A convolution and its backward."""
    image, weight = torch.empty(images, channels, size, size, **kinds), torch.empty(results, channels, taken, taken, **kinds)
    settings = ([stride] * 2, [taken // 2 * dilation] * 2, [dilation] * 2, False, [0, 0], 1)
    result = torch.convolution(image, weight, None, *settings)
    there = trace(lambda x, w: aten.convolution(x, w, None, *settings), [image, weight])
    back = trace(lambda g, x, w: aten.convolution_backward(g, x, w, None, *settings, [True, True, False])[:2], [result, image, weight])
    return [node for one in (there, back) for node in one.graph.nodes if "convolution" in str(node.target)]


@pytest.mark.parametrize(
    ("images", "channels", "results", "size", "stride", "expected"),
    [
        (8, 512, 512, 2, 1, [True, True]),  # 3.1 and 2.3 of PyTorch's time when they were measured
        (16, 64, 64, 14, 1, [True, True]),  # 1.4 and 1.3
        (32, 512, 512, 4, 1, [True, True]),  # 1.4 and 1.7
        (1, 256, 256, 4, 1, [False, False]),  # 0.6 and 0.8
        (1, 32, 32, 28, 1, [False, False]),  # 0.9 and 1.0
        (16, 128, 256, 14, 2, [True, True]),  # 1.3 and 1.2
        (4, 32, 64, 56, 2, [True, False]),  # 1.2 and 0.8
        (2, 256, 512, 8, 2, [False, False]),  # 0.8 and 0.6
    ],
)
def test_the_faster_kernel(images: int, channels: int, results: int, size: int, stride: int, expected: list[bool]) -> None:
    assert [dense_convolutions.is_faster_in_pytorch(node) for node in _nodes(images, channels, results, size, stride=stride)] == expected


@pytest.mark.parametrize(
    "settings",
    [{"channels": 17}, {"results": 24}, {"taken": 5}, {"stride": 3}, {"dilation": 2}, {"dtype": torch.bfloat16}],
    ids=str,
)
def test_nothing_is_said_of_what_was_not_measured(settings: dict[str, Any]) -> None:
    given = {"images": 8, "channels": 64, "results": 64, "size": 14, **settings}
    assert [dense_convolutions.is_faster_in_pytorch(node) for node in _nodes(**given)] == [None, None]


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ((8, 512, 512, 2), True),
        ((8, 64, 64, 7), True),
        ((8, 32, 32, 7), False),  # what it gains is less than another session costs
        ((8, 3, 64, 64, 7, 2), True),
        ((8, 64, 256, 14, 1), False),
        ((8, 17, 17, 4, 5), False),
    ],
)
def test_between_sessions_more_must_be_gained(settings: tuple[int, ...], chosen: bool) -> None:
    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), kernels="measured", onednn=True)
    assert session_choice.far_faster_in_pytorch(_nodes(*settings)[0], target) == chosen
    asked = dataclasses.replace(target, kernels="onnxruntime")
    assert not session_choice.far_faster_in_pytorch(_nodes(*settings)[0], asked)


def test_a_block_of_a_residual_network() -> None:
    """With either package."""
    block = nn.Sequential(nn.Conv2d(512, 512, 3, padding=1, bias=False), nn.BatchNorm2d(512), nn.ReLU(), nn.Conv2d(512, 512, 3, padding=1), nn.ReLU())
    x = torch.randn(8, 512, 2, 2)
    expected = block(x)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    with on_ort(graphs=1) as ran:
        result = compiled(block)(x)
        result.square().sum().backward()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    for parameter, gradient in zip(block.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-2)
    by_pytorch = {"aten::convolution", "aten::convolution_backward"} if ON_CPU else set()
    assert {one.operator for one in ran.graphs[0].outside} >= by_pytorch
