"""Depthwise convolutions by PyTorch's kernels, called as they are fast, and where these are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort, single_session
from default_device import ON_CPU, seeded
from ops.harness import trace
from torch import nn

from ort_backend.lowering.kernels import depthwise

aten = torch.ops.aten

# (images, channels, size, filter, stride, padding, dilation)
SHAPES = [
    (2, 3, (9, 9), (7, 7), (1, 1), (3, 3), (1, 1)),
    (3, 2, (2, 2), (7, 7), (1, 1), (3, 3), (1, 1)),
    (1, 4, (8, 11), (5, 3), (2, 1), (2, 0), (1, 2)),
    (2, 3, (10, 7), (3, 3), (3, 2), (1, 1), (2, 2)),
    (2, 5, (2, 2), (3, 3), (1, 1), (1, 1), (1, 1)),
    (4, 2, (6, 6), (4, 2), (2, 2), (0, 1), (1, 1)),
    (2, 3, (9, 9), (5, 5), (1,), (2,), (1,)),
    (2, 16, (40,), (31,), (1,), (15,), (1,)),
    (3, 4, (17,), (4,), (2,), (1,), (3,)),
    (2, 3, (4, 4), (3, 3), (1, 1), (12, 12), (12, 12)),
    (2, 3, (16, 12), (3, 3), (1, 1), (6, 6), (6, 6)),
    (2, 3, (24, 24), (3, 3), (2, 2), (12, 12), (12, 12)),
]


def _inputs(images: int, channels: int, size: Any, taken: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Any, ...]:
    generator = seeded(0)
    image = torch.randn(images, channels, *size, generator=generator)
    weight, bias = torch.randn(channels, 1, *taken, generator=generator), torch.randn(channels, generator=generator)
    settings = (stride, padding, dilation, False, [0] * len(size), channels)
    grad = torch.randn(torch.convolution(image, weight, bias, *settings).shape, generator=generator)
    return grad, image, weight, bias, settings


@pytest.mark.cpu_only(reason="PyTorch's kernels of the CPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", [(True, True, True), (False, True, False), (True, False, True), (False, True, True)], ids=str)
def test_gradients_are_pytorchs(shape: Any, mask: tuple[bool, ...]) -> None:
    grad, image, weight, _, settings = _inputs(*shape)
    found = depthwise.convolution_backward(grad, image, weight, [shape[1]], *settings, mask)
    expected = aten.convolution_backward(grad, image, weight, [shape[1]], *settings, mask)
    for one, other, wanted in zip(found, expected, mask, strict=True):
        assert (one is not None) == wanted
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.cpu_only(reason="PyTorch's kernels of the CPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_in_bfloat16_are_pytorchs(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "processor_multiplies_bfloat16", lambda: True)
    *tensors, _, settings = _inputs(*shape)
    halves = [one.bfloat16() for one in tensors]
    exact = aten.convolution_backward(*(one.double() for one in halves), [shape[1]], *settings, [True] * 3)
    pairs = zip(depthwise.convolution_backward(*halves, [shape[1]], *settings, [True] * 3), exact, strict=True)
    for found, wanted in pairs:
        assert found.dtype is torch.bfloat16 and (found - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.cpu_only(reason="PyTorch's kernels of the CPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_pytorchs(shape: Any) -> None:
    _, image, weight, bias, settings = _inputs(*shape)
    for offset in (bias, None):
        torch.testing.assert_close(depthwise.convolution(image, weight, offset, *settings), torch.convolution(image, weight, offset, *settings))


@pytest.mark.parametrize("groups, dtype", [(1, torch.float32), (2, torch.float32), (4, torch.float64), (4, torch.bfloat16)])
def test_others_are_left_alone(groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "filter_gradient", None)
    monkeypatch.setattr(depthwise, "processor_multiplies_bfloat16", lambda: False)
    image, weight = torch.randn(2, 4, 8, 8, dtype=dtype), torch.randn(4, 4 // groups, 5, 5, dtype=dtype)
    args = (torch.randn_like(image), image, weight, [4], [1, 1], [2, 2], [1, 1], False, [0, 0], groups, [True, True, True])
    for one, other in zip(depthwise.convolution_backward(*args), aten.convolution_backward(*args), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "images, channels, size, taken, stride, forward, backward",
    [
        (8, 256, 4, 3, 1, True, True),
        (1, 256, 4, 3, 1, False, False),
        (1, 32, 14, 3, 1, False, False),
        (1, 32, 14, 7, 1, False, False),
        (8, 96, 14, 3, 2, True, True),
        (2, 384, 7, 7, 1, True, True),
        (32, 768, 2, 3, 1, True, True),
        (1, 96, 28, 5, 1, True, True),
    ],
)
def test_many_planes_are_pytorchs(images: int, channels: int, size: int, taken: int, stride: int, forward: bool, backward: bool) -> None:
    """Those that took ONNX Runtime longer, and those that did not, when they were measured."""
    image, weight = torch.empty(images, channels, size, size), torch.empty(channels, 1, taken, taken)
    settings = ([stride] * 2, [taken // 2] * 2, [1, 1], False, [0, 0], channels)
    result = torch.convolution(image, weight, None, *settings)
    functions: list[tuple[Callable[..., Any], list[torch.Tensor], bool]] = [
        (lambda x, w: aten.convolution(x, w, None, *settings), [image, weight], forward),
        (lambda g, x, w: aten.convolution_backward(g, x, w, None, *settings, [True, True, False])[:2], [result, image, weight], backward),
    ]
    for function, inputs, expected in functions:
        nodes = [node for node in trace(function, inputs).graph.nodes if "convolution" in str(node.target)]
        assert [depthwise.is_faster_in_pytorch(node) for node in nodes] == [expected]


@single_session
def test_a_block_of_convnext() -> None:
    block = nn.Sequential(nn.Conv2d(96, 96, 7, padding=3, groups=96), nn.GELU(), nn.Conv2d(96, 96, 1))
    x = torch.randn(4, 96, 8, 8)
    block(x).square().sum().backward()
    expected = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    with on_ort(graphs=1) as ran:
        compiled(block)(x).square().sum().backward()
    for parameter, other in zip(block.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-3)
    chosen = {one.operator for one in ran.graphs[0].outside if "side by side" in one.reason}
    assert chosen == ({"aten::convolution", "aten::convolution_backward"} if ON_CPU else set())


@pytest.mark.cpu_only(reason="PyTorch's kernels of the CPU")
def test_filters_spread_out_beyond_small_planes_get_no_wide_border(monkeypatch: pytest.MonkeyPatch) -> None:
    # DeepLab's: 55 ms instead of 0.6 for 4 x 512 planes, almost all of it for zeros.
    grad, image, weight, _, settings = _inputs(2, 3, (4, 4), (3, 3), (1, 1), (36, 36), (36, 36))
    expected = aten.convolution_backward(grad, image, weight, [3], *settings, (True, True, False))
    wide: list[torch.Size] = []
    pad = nn.functional.pad
    monkeypatch.setattr(nn.functional, "pad", lambda image, widths: wide.append(image.shape) or pad(image, widths))
    torch.testing.assert_close(depthwise.convolution(image, weight, None, *settings), torch.convolution(image, weight, None, *settings))
    found = depthwise.convolution_backward(grad, image, weight, [3], *settings, (True, True, False))
    torch.testing.assert_close(found[:2], expected[:2])
    assert not wide
    _, image, weight, _, settings = _inputs(2, 3, (100,), (31,), (1,), (15,), (1,))
    depthwise.convolution(image, weight, None, *settings)
    assert wide == [image.shape]
