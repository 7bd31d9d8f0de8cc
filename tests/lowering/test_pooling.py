"""Pooling against eager, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import randn

import ort_backend

aten = torch.ops.aten


def _max_both(dims: int, *window: Any) -> Callable[..., list[torch.Tensor]]:
    kernel, stride, padding, dilation, ceil_mode = (*window, *[None] * 5)[:5]
    rest = (stride or kernel, padding or [0] * dims, dilation or [1] * dims, bool(ceil_mode))
    forward = aten.max_pool2d_with_indices if dims == 2 else aten.max_pool3d_with_indices
    backward = aten.max_pool2d_with_indices_backward if dims == 2 else aten.max_pool3d_with_indices_backward

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        out, indices = forward(x, *window)
        return [out, indices, backward(out.cos(), x, kernel, *rest, indices)]

    return both


@pytest.mark.parametrize("window", [([2, 2],), ([3, 3], [2, 2], [1, 1]), ([3, 2], [2, 1], [1, 0]), ([3, 3], [1, 1], [1, 1], [2, 2])], ids=str)
def test_max_pool(check: Callable, window: tuple[Any, ...]) -> None:
    check(_max_both(2, *window), randn(2, 3, 9, 9), also=(randn(4, 3, 9, 9),))
    check(_max_both(2, *window), randn(2, 3, 9, 9), also=(randn(2, 3, 7, 8),))


@pytest.mark.parametrize(
    "window", [([3, 3], [2, 2], [1, 1], [1, 1], True), ([2, 2], [2, 2], [0, 0], [1, 1], True), ([2, 2], [3, 3], [0, 0], [3, 3], True)], ids=str
)
def test_max_pool_that_rounds_up(check: Callable, window: tuple[Any, ...]) -> None:
    for size in (8, 9, 10, 11):
        check(_max_both(2, *window), randn(2, 3, size, 9))


def test_max_pool_of_one_picture_and_of_volumes(check: Callable) -> None:
    check(_max_both(2, [2, 2]), randn(3, 6, 6))
    check(_max_both(3, [2, 2, 2]), randn(2, 3, 4, 5, 6), also=(randn(1, 3, 4, 5, 6),))


def test_max_pool_backward_with_given_indices(check: Callable) -> None:
    x = randn(2, 3, 9, 9)
    out, indices = aten.max_pool2d_with_indices(x, [3, 3], [2, 2])
    rest = ([3, 3], [2, 2], [0, 0], [1, 1], False)
    check(lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, *rest, i), out.cos(), x, indices, also=(out[:1], x[:1], indices[:1]))


@pytest.mark.parametrize(
    "window",
    [
        ([2, 2],),
        ([3, 3], [2, 2], [1, 1]),
        ([3, 3], [2, 2], [1, 1], False, False),
        ([3, 2], [2, 1], [1, 0], False, True),
        ([3, 3], [2, 2], [1, 1], False, False, 5),
        ([3, 3], [3, 3], [0, 0], True, True, 7),
    ],
    ids=str,
)
def test_average_pool(check: Callable, window: tuple[Any, ...]) -> None:
    kernel, stride, padding, ceil_mode, with_pad, divisor = (*window, *[None] * 6)[:6]
    rest = (kernel, stride or kernel, padding or [0, 0], bool(ceil_mode), with_pad is not False, divisor)

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        out = aten.avg_pool2d(x, *window)
        return [out, aten.avg_pool2d_backward(out.cos(), x, *rest)]

    check(both, randn(2, 3, 9, 9), also=(randn(4, 3, 9, 9),))


@pytest.mark.parametrize(
    "window",
    [
        ([2, 2], [2, 2], [0, 0], True, True, None),
        ([3, 3], [2, 2], [1, 1], True, False, None),
        ([3, 2], [2, 2], [1, 1], True, False, 7),
        ([3, 3], [3, 3], [0, 0], True, True, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [8, 9, 10])
def test_average_pool_that_rounds_up(check: Callable, window: tuple[Any, ...], size: int) -> None:
    def both(x: torch.Tensor) -> list[torch.Tensor]:
        out = aten.avg_pool2d(x, *window)
        return [out, aten.avg_pool2d_backward(out.cos(), x, *window)]

    check(both, randn(2, 3, size, size))


@pytest.mark.parametrize(
    "window",
    [
        ([2, 2], [2, 2], [0, 0], True, True, None),
        ([3, 3], [2, 2], [1, 1], True, False, None),
        ([3, 3], [2, 2], [1, 1], True, True, None),
        ([3, 2], [2, 1], [1, 1], True, True, 7),
        ([16, 16], [16, 16], [0, 0], True, True, None),
    ],
    ids=str,
)
def test_average_pool_that_rounds_up_unknown_sizes(check: Callable, window: tuple[Any, ...]) -> None:
    def both(x: torch.Tensor) -> list[torch.Tensor]:
        out = aten.avg_pool2d(x, *window)
        return [out, aten.avg_pool2d_backward(out.cos(), x, *window)]

    for size in (8, 10, 11):
        check(both, randn(2, 3, 9, 12), also=(randn(2, 3, size, size + 4),))
    check(both, randn(3, 9, 12), also=(randn(3, 8, 13),))


@pytest.mark.parametrize("rest", [(False, True, None), (False, False, None), (False, True, 5)], ids=["padding", "no padding", "divisor"])
@pytest.mark.parametrize(
    ("kernel", "padding"), [([3, 3], [1, 1]), ([4, 1], [1, 0]), ([2, 3], [0, 0]), ([3, 2, 1], [0, 1, 0]), ([2, 2, 2], [1, 1, 1])], ids=str
)
def test_average_pool_without_a_stride(check: Callable, kernel: list[int], padding: list[int], rest: tuple[Any, ...]) -> None:
    dims = len(kernel)
    pool, backward = (getattr(aten, f"avg_pool{dims}d{name}") for name in ("", "_backward"))
    window = (kernel, [1] * dims, padding, *rest)

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        out = pool(x, *window)
        return [out, backward(out.cos(), x, *window)]

    lowered = check(both, randn(2, 3, *range(6, 6 + dims)))
    assert "ConvTranspose" not in {node.op_type for node in lowered.model.graph}
    check(both, randn(2, 3, *[5] * dims), also=(randn(2, 3, *range(7, 7 + dims)),))


def test_average_pool_that_counts_padding_and_rounds_up(check: Callable) -> None:
    check(lambda x: aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1], True), randn(2, 3, 10, 10))


def test_average_pool_of_volumes(check: Callable) -> None:
    window = ([2, 2, 2], [2, 2, 2], [1, 1, 1], False, False)
    check(lambda g, x: (aten.avg_pool3d(x, *window), aten.avg_pool3d_backward(g, x, *window, None)), randn(2, 3, 3, 3, 3), randn(2, 3, 5, 5, 5))


@pytest.mark.parametrize("output", [[1, 1], [3, 3], [4, 2]], ids=str)
def test_adaptive_average_pool(check: Callable, output: list[int]) -> None:
    def both(x: torch.Tensor) -> list[torch.Tensor]:
        out = aten._adaptive_avg_pool2d(x, output)
        return [out, aten._adaptive_avg_pool2d_backward(out.cos(), x)]

    check(both, randn(2, 3, 9, 9), also=(randn(4, 3, 9, 9),))
    if output == [1, 1]:
        check(both, randn(2, 3, 9, 9), also=(randn(4, 3, 7, 8),))
    check(both, randn(3, 9, 9))


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("include", [True, False])
def test_a_window_that_is_larger_than_the_plane(check: Callable, padding: int, include: bool) -> None:
    """As in EfficientNet of transformers: what lies beyond the plane is not computed."""
    window = ([1280, 1280], [1280, 1280], [padding, padding], True, include)

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        out = aten.avg_pool2d(x, *window)
        return [out, aten.avg_pool2d_backward(out.cos(), x, *window, None)]

    lowered = check(both, randn(2, 3, 5, 7))
    kernels = [value.shape for value in lowered.model.graph.initializers.values() if len(value.shape or ()) == 4]
    assert all(shape[-1] <= 7 + 2 * padding for shape in kernels)
    check(_max_both(2, [64, 64], [64, 64], [0, 0], [1, 1], True), randn(2, 3, 5, 7))


def test_a_large_window_over_unknown_sizes_is_pytorchs() -> None:
    x, y = (torch.randn(2, 3, size, size, requires_grad=True) for size in (6, 8))
    pool = torch.nn.AvgPool2d(64, ceil_mode=True)
    compiled = torch.compile(pool, backend="ort_training", dynamic=True)
    for image in (x, y):
        expected = torch.autograd.grad(pool(image).square().sum(), image)
        torch.testing.assert_close(torch.autograd.grad(compiled(image).square().sum(), image), expected)
    assert {one.operator for one in ort_backend.report().graphs[-1].outside} == {"aten::avg_pool2d", "aten::avg_pool2d_backward"}
