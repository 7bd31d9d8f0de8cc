"""Gradients of convolutions with filters of one pixel in bfloat16, as products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviours.check import compiled
from default_device import seeded
from torch import nn

from ort_backend.lowering.kernels import depthwise, pointwise_convolutions
from ort_backend.lowering.kernels.dense_products import processor_multiplies_bfloat16

aten = torch.ops.aten
pytestmark = pytest.mark.cpu_only(reason="PyTorch's kernels of the CPU")

# (images, channels, size), channels of the result, stride
SHAPES = [
    ((2, 32, 5, 6), 48, (1, 1)),
    ((3, 40, 7, 6), 32, (2, 2)),
    ((1, 32, 5, 9), 32, (1, 3)),
    ((2, 32, 7, 7), 32, (2,)),
    ((2, 48, 11), 32, (2,)),
    ((2, 32, 3, 4, 5), 32, (1, 2, 1)),
]


@pytest.fixture(autouse=True)
def on_such_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise_convolutions, "_products_are_faster", lambda: True)


def _gradients(size: Any, channels: int, stride: Any, mask: Any, *, channels_last: bool = False) -> tuple[Any, ...]:
    generator = seeded(0)
    image = torch.randn(size, generator=generator)
    weight = torch.randn(channels, size[1], *[1] * (len(size) - 2), generator=generator)
    settings = (stride, [0] * len(stride), [1] * len(stride), False, [0] * len(stride), 1)
    grad = torch.randn(torch.convolution(image, weight, None, *settings).shape, generator=generator)
    exact = aten.convolution_backward(*(one.bfloat16().float() for one in (grad, image, weight)), [channels], *settings, mask)
    given = [one.bfloat16() for one in (grad, image, weight)]
    if channels_last:
        given = [one.contiguous(memory_format=torch.channels_last) for one in given]
    return pointwise_convolutions.convolution_backward(*given, [channels], *settings, mask), exact


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", [(True, True, True), (False, True, False), (True, True, False), (False, True, True)], ids=str)
def test_gradients_are_pytorchs(shape: Any, mask: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "convolution_backward", None)
    found, exact = _gradients(*shape, mask)
    for one, other, wanted in zip(found, exact, mask, strict=True):
        assert (one is not None) == wanted
        if wanted:
            assert one.is_contiguous()
            torch.testing.assert_close(one, other.bfloat16(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("stride", [(1, 1), (2, 2)], ids=str)
def test_pictures_in_channels_last(stride: Any) -> None:
    found, exact = _gradients((2, 32, 6, 5), 32, stride, (True, True, True), channels_last=True)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.bfloat16(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("channels", "taken", "groups", "padding"), [(16, 1, 1, 0), (64, 3, 1, 1), (64, 1, 2, 0), (64, 1, 1, 1)])
def test_other_convolutions_are_left_to_pytorch(channels: int, taken: int, groups: int, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = depthwise.convolution_backward
    monkeypatch.setattr(depthwise, "convolution_backward", lambda *given: calls.append(1) or original(*given))
    image, weight = torch.randn(2, channels, 5, 5).bfloat16(), torch.randn(64, channels // groups, taken, taken).bfloat16()
    settings = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], groups)
    grad = torch.convolution(image, weight, None, *settings)
    pointwise_convolutions.convolution_backward(grad, image, weight, [64], *settings, (True, True, True))
    assert calls == [1]


def test_a_bottleneck_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(pointwise_convolutions, "_products_are_faster", lambda: calls.append(1) or True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 128, 1), nn.ReLU(), nn.Conv2d(128, 128, 1, 2, bias=False), nn.ReLU(), nn.Conv2d(128, 64, 3))
    x, found = torch.randn(4, 64, 28, 28), []
    for call in (model, compiled(model)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            call(x).float().square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=3e-2, atol=3e-3)
    assert bool(calls) == processor_multiplies_bfloat16()  # else in float32, on ONNX Runtime
