"""Running sums, in blocks and step by step, running products, running extremes and their places."""

from __future__ import annotations

import math

import pytest
import torch
from ops.harness import check
from ops.trained import check_training, needs_grad

import ort_backend


@pytest.mark.parametrize("size", [(1,), (33,), (1000,), (3, 40), (40, 3), (2, 100, 3), (65, 2048), (0,), (50, 0), ()])
def test_sizes(size: tuple[int, ...]) -> None:
    x = torch.randn(size, dtype=torch.float64)
    for dim in range(max(x.dim(), 1)):
        check(lambda x: x.cumsum(dim), x)  # noqa: B023
        check(lambda x: x.cumsum(-1 - dim), x)  # noqa: B023


def test_dynamic_sizes() -> None:
    for other in ((7, 3, 300), (7, 300, 3), (2, 129, 4)):
        check(lambda x: (x.cumsum(0), x.cumsum(1), x.cumsum(2)), torch.randn(5, 20, 140), dynamic=True, other=(torch.randn(other),))


def test_integers_and_bools() -> None:
    check(lambda x: (x.cumsum(0), (x > 3).cumsum(1), x.int().cumsum(0, dtype=torch.int32)), torch.randint(0, 10, (70, 90)))


def test_infinities_count_from_where_they_stand() -> None:
    x = torch.ones(100)
    x[10], x[70] = math.inf, -math.inf
    check(lambda x: x.cumsum(0), x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradient(dynamic: bool) -> None:
    check_training(lambda x: (x.cumsum(1), x.cumsum(0)), needs_grad(50, 60), dynamic=dynamic)


@pytest.mark.parametrize("size", [(1,), (2,), (7,), (3, 40), (40, 3), (2, 17, 3), (0,), (5, 0), ()])
def test_products(size: tuple[int, ...]) -> None:
    x = torch.randn(size, dtype=torch.float64)
    for dim in range(max(x.dim(), 1)):
        check(lambda x: x.cumprod(dim), x)  # noqa: B023


def test_products_of_integers_zeros_and_infinities() -> None:
    check(lambda x: (x.cumprod(0), (x > 3).cumprod(1), x.int().cumprod(0, dtype=torch.int32)), torch.randint(-3, 10, (12, 9)))
    check(lambda x: x.cumprod(0), torch.tensor([1, math.inf, 2, 0, 3, math.nan, 1]))


@pytest.mark.parametrize("kernels", ["measured", "onnxruntime"])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradient_of_products(kernels: str, dim: int) -> None:
    x = torch.randn(3, 5, 6)
    x[0, 0, 2], x[1, 3, 1], x[1, 3, 4], x[2, 3, 1], x[2, 0, 5], x[2, 4, 5], x[1, 1, 5] = 0, 0, 0, math.nan, 0, math.inf, math.nan
    for one in (torch.randn(5, 6), x[0], *x[1:], x[:, :1], torch.randn(()), torch.randn(0, 3)):
        gradients = []
        for call in (torch.cumprod, torch.compile(torch.cumprod, backend="ort_training", options={"kernels": kernels}, dynamic=False)):
            leaf = one.clone().requires_grad_()
            out = call(leaf, dim if one.dim() else 0)
            gradients += torch.autograd.grad(out, leaf, torch.linspace(-1, 2, out.numel()).reshape(out.shape))
        torch.testing.assert_close(gradients[1], gradients[0], equal_nan=True)
        outside = [part.operator for part in ort_backend.report().graphs[-1].outside]
        assert outside == (["ort_training::cumprod_backward"] if kernels == "measured" else [])


def test_gradient_of_gradient_of_products() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * torch.func.grad(lambda x: x.cumprod(0).square().sum())(x)

    check_training(step, needs_grad(6), outside=["ort_training::cumprod_backward"])


def _extremes(x: torch.Tensor) -> list[torch.Tensor]:
    return [part for dim in range(-1, x.dim() - 1) for found in (x.cummax(dim), x.cummin(dim)) for part in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("dynamic", [False, True])
def test_extremes_of_few_values(dtype: torch.dtype, dynamic: bool) -> None:
    sizes: list[tuple[int, ...]] = [(1,), (2,), (16,), (17,), (50,), (3, 40), (2, 100, 3), ()]
    inputs = [torch.randint(0, 4, size).to(dtype) for size in (sizes if dynamic else [*sizes, (0,), (3, 0), (0, 20)])]
    check(lambda *inputs: [part for x in inputs for part in _extremes(x)], *inputs, dynamic=dynamic)


@pytest.mark.parametrize("size", [(12,), (40,), (7, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_among_infinities_and_nan(size: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(size, dtype=dtype)
    for value in (math.inf, -math.inf, math.nan, 0.0, -0.0):
        x[torch.rand(size) < 0.1] = value
    check(_extremes, x)
    x.flatten()[0] = math.nan
    check(_extremes, x)


def test_extremes_of_dynamic_sizes() -> None:
    for other in ((7, 3, 300), (7, 300, 3), (2, 129, 4)):
        check(_extremes, torch.randn(5, 20, 140), dynamic=True, other=(torch.randn(other),))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradient_of_extremes(dynamic: bool, dtype: torch.dtype) -> None:
    def values(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.cummax(1).values, x.cummin(0).values

    others = [(needs_grad(9, 70, dtype=dtype),)] if dynamic else []
    tolerance = 1e-2 if dtype == torch.float16 else 1e-5
    check_training(values, needs_grad(5, 60, dtype=dtype), dynamic=dynamic, others=others, options={"kernels": "onnxruntime"}, rtol=tolerance)
