"""Constant factors of batched products: part of the product where nothing else reads the scaled or unscaled tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import randn
from torch.fx.experimental.proxy_tensor import make_fx

from ort_backend.lowering.ops.matmul import SCALED_BMM
from ort_backend.lowering.passes.scales import fuse_scales

Function = Callable[..., torch.Tensor]


def _fused(function: Function, *inputs: torch.Tensor) -> list[float]:
    """The factors inside products after the pass; the rewritten graph is compared with the function."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    count = fuse_scales(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), function(*inputs))
    factors = [node.args[2] for node in traced.graph.nodes if node.target is SCALED_BMM]
    assert count >= len(factors)
    return factors


@pytest.mark.parametrize(
    "function, factors",
    [
        (lambda a, b: torch.bmm(a, b) * 0.5, [0.5]),
        (lambda a, b: torch.bmm(a, b) / 4, [0.25]),
        (lambda a, b: torch.bmm(a, b).view(1, 2, 3, 5) / 4, [0.25]),
        (lambda a, b: torch.bmm(a, b) / 4 * 3, [0.75]),
        (lambda a, b: torch.bmm(a * 2, b), [2.0]),
        (lambda a, b: torch.bmm(a, b * 2) / 4, [0.5]),
        (lambda a, b: torch.bmm((a / 2).transpose(1, 2), (a / 4).view(2, 3, 4)), [0.125]),
    ],
    ids=["times", "by", "behind a view", "twice", "on the left", "on both ends", "behind a transpose"],
)
def test_a_factor_joins_the_product(function: Function, factors: list[float]) -> None:
    assert _fused(function, randn(2, 3, 4), randn(2, 4, 5)) == factors


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (product := torch.bmm(a, b)) * 2 + product,
        lambda a, b: torch.bmm(half := a * 2, b).sum() + half.sum(),
        lambda a, b: torch.bmm(double := a * 2, double.transpose(1, 2)).sum() + double.sum(),
        lambda a, b: torch.bmm(a, b) * 0,
        lambda a, b: torch.bmm(a, b) / 0.0,
        lambda a, b: torch.bmm(a, b) * b.sum(),
        lambda a, b: torch.bmm(a.double(), b.double()) * 2,
        lambda a, b: torch.bmm(a, b) * True,
    ],
    ids=["the product is read", "the scaled side is read", "both sides", "zero", "infinity", "a tensor", "float64", "a bool"],
)
def test_what_is_read_elsewhere_or_is_no_plain_number_stays(function: Function) -> None:
    assert _fused(function, randn(2, 3, 4), randn(2, 4, 5)) == []


def test_a_square_gets_the_factor_twice() -> None:
    """The scaled tensor on both sides of one product."""
    assert _fused(lambda a, b: torch.bmm(x := a * 3, x.transpose(1, 2)), randn(2, 3, 4), randn(2, 4, 5)) == [9.0]
