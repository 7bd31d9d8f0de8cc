"""Special functions: over their ranges, at their poles and ends, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from ops.harness import lower, run, trace
from ops.trained import check_training, needs_grad

EVERYWHERE = torch.cat([torch.linspace(-20.3, -0.01, 1001), torch.linspace(1e-3, 30, 1001), torch.tensor([1e-20, 100, 1e4, 1e10, 1e30, -1e6 - 0.5])])
ENDS = torch.tensor([0.0, -0.0, 1.0, -1.0, -2.0, -7.0, math.inf, -math.inf, math.nan])


def _on_ort(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return run(lower(trace(function, [x])), [x])[0]


@pytest.mark.parametrize("function", [torch.lgamma, torch.digamma, lambda x: torch.polygamma(1, x)], ids=["lgamma", "digamma", "trigamma"])
def test_gamma(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    exact = function(EVERYWHERE.double())
    torch.testing.assert_close(_on_ort(function, EVERYWHERE.double()), exact, rtol=1e-9, atol=1e-12)  # so far goes PyTorch's trigamma
    known = function(EVERYWHERE)  # what float32 makes of a number beside a pole is eager's to say
    near = torch.isclose(known.double(), exact, rtol=1e-5, atol=1e-5)
    assert near.float().mean() > 0.9
    torch.testing.assert_close(_on_ort(function, EVERYWHERE)[near], known[near], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("function", [torch.lgamma, torch.digamma])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poles_of_gamma(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    x = ENDS.to(dtype)
    torch.testing.assert_close(_on_ort(function, x), function(x), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("function", [torch.special.i0, torch.special.i0e, torch.special.i1, torch.special.i1e])
def test_bessel_functions(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.cat([torch.linspace(-40, 40, 2001), torch.tensor([80.0, -85.0, 1e-20, 0.0, -0.0, math.nan])])
    torch.testing.assert_close(_on_ort(function, x), function(x.double()).float(), rtol=1e-6, atol=0, equal_nan=True)


def test_bessel_functions_of_infinity() -> None:
    x = torch.tensor([math.inf, -math.inf] * 8)
    for function in (torch.special.i0e, torch.special.i1e):
        torch.testing.assert_close(_on_ort(function, x), torch.zeros(16))
    for function in (torch.special.i0, torch.special.i1):
        torch.testing.assert_close(_on_ort(function, x), function(x), equal_nan=True)


def test_erf() -> None:
    x = torch.cat([ENDS, torch.linspace(-4, 4, 101)])
    torch.testing.assert_close(_on_ort(torch.erf, x), torch.erf(x), equal_nan=True)


def test_inverse_of_erf() -> None:
    x = torch.cat([torch.linspace(-1, 1, 2001), torch.tensor([0.9999999, -0.9999999, 1e-10, 2.0, math.nan])])
    torch.testing.assert_close(_on_ort(torch.erfinv, x), torch.erfinv(x.double()).float(), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients(dynamic: bool) -> None:
    def each(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = x.abs() + 0.1
        return size.lgamma(), size.digamma(), torch.mvlgamma(size + 2, 3), torch.erfinv(x.tanh() * 0.9), torch.special.i0(x), torch.special.i1e(x)

    check_training(each, needs_grad(4, 5), dynamic=dynamic, others=[(needs_grad(6, 7),)] if dynamic else [], rtol=1e-3)


def test_likelihood_of_student_and_beta() -> None:
    def loss(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        student = torch.distributions.StudentT(a.exp() + 2, b, validate_args=False).log_prob(x)
        return student + torch.distributions.Beta(a.exp(), b.exp(), validate_args=False).log_prob(x.sigmoid())

    check_training(loss, needs_grad(8), needs_grad(8), torch.randn(8))
