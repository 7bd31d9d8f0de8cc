"""Matrix products against eager, with and without operators outside ONNX."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import single_session
from default_device import ON_CPU
from torch import randn

aten = torch.ops.aten
contrib = pytest.mark.parametrize("contrib", [True, False], ids=["fused", "plain"])


@contrib
@pytest.mark.parametrize("beta, alpha", [(1, 1), (0, 1), (2, 0.5)])
def test_products_with_an_addend(check: Callable, contrib: bool, beta: float, alpha: float) -> None:
    scales = {"beta": beta, "alpha": alpha}
    check(
        lambda c, a, b: aten.addmm(c, a, b, **scales), randn(6), randn(4, 5), randn(5, 6), also=(randn(6), randn(3, 5), randn(5, 6)), contrib=contrib
    )
    batches = (randn(1, 4, 6), randn(2, 4, 5), randn(2, 5, 6))
    check(lambda c, a, b: aten.baddbmm(c, a, b, **scales), *batches, also=(randn(1, 4, 6), randn(3, 4, 5), randn(3, 5, 6)), contrib=contrib)
    check(lambda c, a, b: aten.addbmm(c, a, b, **scales), randn(4, 6), randn(2, 4, 5), randn(2, 5, 6), contrib=contrib)
    check(lambda c, a, b: aten.addmv(c, a, b, **scales), randn(4), randn(4, 5), randn(5), contrib=contrib)


def test_beta_of_zero_does_not_read_the_addend(check: Callable) -> None:
    check(lambda c, a, b: aten.addmm(c, a, b, beta=0), torch.full((6,), torch.nan), randn(4, 5), randn(5, 6))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, pytest.param(torch.int64, marks=pytest.mark.cpu_only(reason="products of integers"))]
)
def test_dtypes(check: Callable, dtype: torch.dtype) -> None:
    a, b, c = ((10 * randn(size)).to(dtype) for size in ((4, 5), (5, 6), (6,)))
    check(lambda a, b, c: (aten.mm(a, b), aten.addmm(c, a, b), aten.mv(a, b[:, 0])), a, b, c)
    check(lambda a, b: aten.dot(a, b), a[0], b[:, 0])


def test_sums_over_nothing(check: Callable) -> None:
    check(lambda c, a, b: (aten.mm(a, b), aten.addmm(c, a, b), aten.mm(a, b.t().t())), randn(6), randn(4, 0), randn(0, 6))
    check(lambda a, b: aten.mm(a, b), randn(0, 4), randn(4, 6))
    check(lambda a, b: aten.bmm(a, b), randn(2, 4, 0), randn(2, 0, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transposes_are_part_of_the_product(check: Callable, dtype: torch.dtype) -> None:
    def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(torch.nn.functional.linear, x, w, b)
        return out, *pull(out * out)

    x, w, b = randn(4, 5, dtype=dtype), randn(6, 5, dtype=dtype), randn(6, dtype=dtype)
    op_types = check(linear, x, w, b, also=(randn(3, 5, dtype=dtype), w, b)).op_types
    assert "Gemm" in op_types and "Transpose" not in op_types


@single_session
@contrib
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transposed_batches(check: Callable, contrib: bool, dtype: torch.dtype) -> None:
    a, b = randn(2, 3, 5, dtype=dtype), randn(2, 4, 5, dtype=dtype)
    lowered = check(lambda a, b: (aten.bmm(a, b.mT), aten.bmm(a.mT, a)), a, b, also=(a[:, :2], b), contrib=contrib)
    assert ("Transpose" in lowered.op_types) == ((dtype == torch.float64 and ON_CPU) or not contrib)  # FusedMatMul is of float64 on CUDA alone
