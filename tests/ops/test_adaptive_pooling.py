"""Pooling to a given size, and pooling of planes whose size is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.trained import check_training, needs_grad

DTYPES = [(torch.float64, 1e-9), (torch.float16, 2e-2), (torch.bfloat16, 5e-2)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("output", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_averages(spatial: int, output: int, dynamic: bool) -> None:
    pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[spatial - 1]
    others = [(needs_grad(3, 4, *[7, 8, 9][:spatial]),)] if dynamic else []
    check_training(lambda x: pool(x, output), needs_grad(2, 5, *[6, 7, 10][:spatial]), dynamic=dynamic, others=others)


@pytest.mark.parametrize("output", [(1, None), (3, None), (2, 3)])
def test_sizes_left_as_they_are(output: tuple[int, int | None]) -> None:
    check_training(lambda x: F.adaptive_avg_pool2d(x, output), needs_grad(2, 3, 6, 7))
    check_training(lambda x: F.adaptive_avg_pool2d(x, output), needs_grad(3, 6, 7))
    check_training(lambda x: F.adaptive_max_pool2d(x, output, return_indices=True), needs_grad(2, 3, 6, 7))
    check_training(lambda x: F.adaptive_max_pool2d(x, output, return_indices=True), needs_grad(3, 6, 7))


@pytest.mark.parametrize("output", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_maxima(spatial: int, output: int) -> None:
    pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[spatial - 1]
    check_training(lambda x: pool(x, output, return_indices=True), needs_grad(2, 5, *[6, 7, 10][:spatial]))


def test_maxima_of_equal_elements_go_to_the_first() -> None:
    check_training(lambda x: F.adaptive_max_pool2d(x, 3, return_indices=True), torch.ones(2, 3, 7, 5).requires_grad_())
    check_training(lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), torch.ones(2, 3, 4, 6).requires_grad_())


def test_maxima_of_infinities_and_nan() -> None:
    x = torch.randn(2, 3, 7, 5)
    x[0, 0], x[1, 1, 3, 3], x[0, 1, 2, 2] = float("-inf"), float("nan"), float("inf")
    check_training(lambda x: F.adaptive_max_pool2d(x, 3, return_indices=True), x)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_dtypes(pool: Callable[..., Any], dtype: torch.dtype, tolerance: float) -> None:
    for size in ((6, 9), (7, 5)):
        check_training(lambda x: pool(x, 3), needs_grad(2, 3, *size, dtype=dtype), rtol=tolerance, atol=tolerance)


_WINDOWS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 2},
    "stride": {"kernel_size": 3, "stride": 2},
    "padding": {"kernel_size": 3, "stride": 2, "padding": 1},
    "padding that does not count": {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    "divisor": {"kernel_size": (2, 3), "padding": (1, 0), "divisor_override": 5},
    "gaps": {"kernel_size": 2, "stride": 3},
}


@pytest.mark.parametrize("name", _WINDOWS)
def test_averages_over_planes_of_unknown_size(name: str) -> None:
    others = [(needs_grad(3, 4, 12, 7),)]
    check_training(lambda x: F.avg_pool2d(x, **_WINDOWS[name]), needs_grad(2, 5, 9, 10), dynamic=True, others=others)


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 3, 0)])
def test_maxima_rounded_up_over_planes_of_unknown_size(window: tuple[int, int, int]) -> None:
    others = [(needs_grad(3, 4, 12, 7),), (needs_grad(3, 4, 11, 13),)]
    pool = lambda x: F.max_pool2d(x, *window, ceil_mode=True, return_indices=True)  # noqa: E731
    check_training(pool, needs_grad(2, 5, 9, 10), dynamic=True, others=others)


def test_windows_that_may_start_in_the_padding_run_in_pytorch() -> None:
    pool = lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True)  # noqa: E731
    check_training(pool, needs_grad(2, 5, 9, 10), dynamic=True, outside=["aten::max_pool2d_with_indices"])


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (6, 3, 2), (7, 3, 3), (7, 3, 0), (2, 3, 1)])
def test_averages_rounded_up(kernel: int, stride: int, padding: int, count_include_pad: bool) -> None:
    pool = lambda x: F.avg_pool2d(x, kernel, stride, padding, True, count_include_pad)  # noqa: E731
    check_training(pool, needs_grad(2, 3, 9, 10))
    others = [(needs_grad(3, 3, 11, 8),)] if kernel >= stride else []
    outside = ["aten::avg_pool2d", "aten::avg_pool2d_backward"] if stride > kernel else []  # whose last window may start in the padding
    check_training(pool, needs_grad(4, 3, 9, 10), dynamic=True, others=others, outside=outside)
