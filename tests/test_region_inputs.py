"""What a session between calls of PyTorch takes: rows of pixels as they lie, where a convolution made a picture in `channels_last`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from behaviours.check import compiled
from ops.harness import trace
from torch import nn
from torch.nn import functional as F

from ort_backend import regions
from ort_backend.target import OrtTarget

FILTERS, BIAS, MATRIX = torch.randn(64, 1, 3, 3), torch.randn(64), torch.randn(64, 64)


def _mix(rows: torch.Tensor, filters: torch.Tensor, bias: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Rows of pixels, each with a filter over its picture between two products: as in SegFormer and PVT."""
    picture = (rows @ matrix).transpose(1, 2).reshape(rows.shape[0], 64, 32, 32)
    return _behind(picture, filters, bias, matrix)


def _behind(picture: torch.Tensor, filters: torch.Tensor, bias: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return F.conv2d(picture, filters, bias, padding=1, groups=64).flatten(2).transpose(1, 2) @ matrix


def _operators(function: Any, first: torch.Tensor) -> list[Counter[str]]:
    target = OrtTarget(contrib_ops=frozenset(), onednn=True)
    found = regions.lower(trace(lambda *given: [function(*given)], [first, FILTERS, BIAS, MATRIX]), target, strict=False, name="graph")
    return [Counter(node.op_type for node in region.model.graph) for region in found.regions]


def test_rows_are_not_laid_out_anew() -> None:
    before, behind = _operators(_mix, torch.randn(4, 1024, 64))
    assert not before["Transpose"] and not behind["Transpose"]


def test_a_picture_in_order_is_taken_as_it_is() -> None:
    (behind,) = _operators(_behind, torch.randn(4, 64, 32, 32))
    assert behind["Transpose"] == 1


@pytest.mark.parametrize("dynamic", [False, None])
def test_numbers_equal_eager(dynamic: bool | None) -> None:
    block = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Linear(64, 64))

    def step(rows: torch.Tensor) -> torch.Tensor:
        rows = block[0](rows)
        rows = block[1](rows.transpose(1, 2).view(-1, 64, 32, 32)).flatten(2).transpose(1, 2)
        return block[2](rows.sin())

    call = compiled(step, dynamic=dynamic)
    for images in (4, 6):
        rows = torch.randn(images, 1024, 64)
        results = []
        for one in (step, call):
            block.zero_grad()
            leaf = rows.clone().requires_grad_()
            result = one(leaf)
            result.square().sum().backward()
            results.append([result.detach(), leaf.grad, *(parameter.grad for parameter in block.parameters())])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-3)


def _gradients(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> Any:
    return torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, [True, True, False])[:2]


@pytest.mark.parametrize(
    ("size", "stride", "groups", "dtype", "on_ort"),
    [
        (1, 1, 1, torch.float32, True),
        (1, 2, 1, torch.float32, False),
        (1, 1, 2, torch.float32, False),
        (3, 1, 1, torch.float32, False),
        (1, 1, 1, torch.bfloat16, False),
    ],
)
def test_gradients_of_single_pixels_are_products(size: int, stride: int, groups: int, dtype: torch.dtype, on_ort: bool) -> None:
    x, weight = torch.randn(8, 64, 28, 28, dtype=dtype), torch.randn(128, 64 // groups, size, size, dtype=dtype)
    settings = ([stride] * 2, [size // 2] * 2, [1, 1], False, [0, 0], groups)
    grad = torch.convolution(x, weight, None, *settings)
    module = trace(lambda *given: list(_gradients(*given, *settings)), [grad, x, weight])
    found = regions.lower(module, OrtTarget(contrib_ops=frozenset(), onednn=True), strict=False, name="graph")
    assert [one.operator for one in found.content.outside] == ([] if on_ort else ["aten::convolution_backward"])
