"""Gradients where a window ends, and where a function is flat."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import call, same_as_eager
from torch.nn import functional as F


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.avg_pool1d(x.flatten(0, 1), 3, 3),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, 3),
    ],
)
def test_windows_that_leave_something_over(pool: Callable[[torch.Tensor], torch.Tensor]) -> None:
    same_as_eager(lambda x: pool(x).exp(), call(torch.randn(2, 3, 7, 8, requires_grad=True)), graphs=1, python_ops=None)


FLAT = [F.relu, F.relu6, F.hardsigmoid, lambda x: F.hardtanh(x, 0.0, 2.0), lambda x: F.threshold(x, 0.5, 0.0)]
STEEP = [torch.sqrt, torch.log, torch.reciprocal, torch.rsqrt, lambda y: y.pow(0.5), lambda y: F.avg_pool1d(y[None], 2)[0].sqrt()]


@pytest.mark.parametrize("kernels", ["measured", "onnxruntime"])
@pytest.mark.parametrize("flat", FLAT)
def test_no_gradient_of_what_is_flat(flat: Callable[[torch.Tensor], torch.Tensor], kernels: str) -> None:
    """Zero where the function is flat, also if what arrives there is infinite: a root's at 0."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [steep(flat(x)) for steep in STEEP]

    x = torch.tensor([-5.0, -1.0, 0.0, -0.0, 1.0, 1.5, 2.0, 9.0], requires_grad=True)
    step = torch.compile(function, backend="ort_training", options={"kernels": kernels})
    for mine, theirs in zip(step(x), function(x), strict=True):
        (actual,), (expected,) = (torch.autograd.grad(one.sum(), x, retain_graph=True) for one in (mine, theirs))
        torch.testing.assert_close(actual, expected, equal_nan=True)
