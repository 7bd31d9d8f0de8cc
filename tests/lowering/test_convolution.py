"""Convolutions against eager, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import randn

from ort_backend.errors import LoweringError
from ort_backend.runtime import capabilities

aten = torch.ops.aten
contrib = pytest.mark.parametrize("contrib", [True, False], ids=["fused", "plain"])
WITH_CONV_GRAD = pytest.mark.skipif(not capabilities.has_training(), reason="ConvGrad is onnxruntime-training's")
PLAIN: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "output_padding": 0, "groups": 1}


def _both(dims: int, mask: list[bool], **settings: Any) -> Callable[..., list[torch.Tensor | None]]:
    given = {**PLAIN, **settings}
    args = [value if name in ("transposed", "groups") else [value] * dims for name, value in given.items()]

    def both(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor | None]:
        out = aten.convolution(x, w, b if mask[2] else None, *args)
        return [out, *aten.convolution_backward(out.cos(), x, w, [8], *args, mask)]

    return both


@contrib
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [{}, {"stride": 2, "padding": 1, "groups": 2}, {"dilation": 2, "padding": 2, "groups": 4}, {"stride": 3, "dilation": 2, "padding": 1}],
    ids=str,
)
def test_convolution(check: Callable, contrib: bool, dims: int, settings: dict[str, Any]) -> None:
    w, b = randn(8, 4 // settings.get("groups", 1), *[3] * dims), randn(8)
    also = (randn(3, 4, *[8] * dims), w, b) if dims == 2 else None
    check(_both(dims, [True] * 3, **settings), randn(2, 4, *[7] * dims), w, b, also=also, contrib=contrib, atol=1e-3)


@contrib
@pytest.mark.parametrize("size", [(7,), (600,), (5, 6), (24, 24), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("mask", [[True] * 3, [False, True, False], [True, False, False]], ids=str)
@pytest.mark.parametrize("settings", [{}, {"stride": 2}, {"padding": 1}, {"groups": 2}], ids=str)
def test_convolution_of_single_pixels(check: Callable, contrib: bool, size: tuple[int, ...], mask: list[bool], settings: dict[str, Any]) -> None:
    dims = len(size)
    w = randn(8, 4 // settings.get("groups", 1), *[1] * dims)
    also = (randn(3, 4, *(n + 1 for n in size)), w, randn(8)) if dims == 2 else None
    check(_both(dims, mask, **settings), randn(2, 4, *size), w, randn(8), also=also, contrib=contrib, atol=1e-3)


@contrib
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"stride": 2, "dilation": 2, "padding": 1, "groups": 4}],
    ids=str,
)
def test_transposed_convolution(check: Callable, contrib: bool, dims: int, settings: dict[str, Any]) -> None:
    w, b = randn(4, 8 // settings.get("groups", 1), *[3] * dims), randn(8)
    also = (randn(3, 4, *[6] * dims), w, b)
    check(_both(dims, [True] * 3, transposed=True, **settings), randn(2, 4, *[5] * dims), w, b, also=also, contrib=contrib, atol=1e-3)


@contrib
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mask", [[False, True, True], [True, False, False], [False, True, False]], ids=str)
def test_only_the_gradients_that_are_wanted(check: Callable, contrib: bool, transposed: bool, mask: list[bool]) -> None:
    check(_both(2, mask, transposed=transposed), randn(2, 4, 6, 6), randn(4, 8, 3, 3) if transposed else randn(8, 4, 3, 3), randn(8), contrib=contrib)


@pytest.mark.parametrize("contrib", [pytest.param(True, marks=WITH_CONV_GRAD, id="fused"), pytest.param(False, id="plain")])
@pytest.mark.parametrize("transposed", [False, True])
def test_signals_are_planes_where_that_is_faster(lower: Callable, contrib: bool, transposed: bool) -> None:
    w = randn(4, 8, 3) if transposed else randn(8, 4, 3)
    lowered = lower(_both(1, [True] * 3, transposed=transposed, stride=2), (randn(2, 4, 9), w, randn(8)), contrib=contrib)
    taken = [node.inputs[0].shape.rank() for node in lowered.model.graph if node.op_type in ("ConvTranspose", "ConvGrad")]
    assert taken == [4] * (1 + (transposed and contrib))


def test_output_padding_of_a_stride_is_left_to_pytorch(lower: Callable) -> None:
    """ONNX Runtime's ConvTranspose takes it, and gives another result."""
    settings = {"stride": 1, "dilation": 2, "output_padding": 1, "transposed": True}
    with pytest.raises(LoweringError, match="output_padding"):
        lower(_both(2, [True] * 3, **settings), (randn(2, 4, 5, 5), randn(4, 8, 3, 3), randn(8)))
