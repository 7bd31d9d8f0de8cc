"""Normalization of numbers that are nearly equal is as exact as eager PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import compiled, on_ort
from torch.nn import functional as F


def _by_hand(x: torch.Tensor) -> torch.Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return apart / torch.sqrt(apart.pow(2).mean(-1, keepdim=True) + 1e-5) * torch.full((64,), 1.5, dtype=x.dtype)


NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "of a sum": lambda x: F.layer_norm(x * 0.5 + x * 0.5, (4, 64)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": F.instance_norm,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "by hand": _by_hand,
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kernels", ["measured", "onnxruntime"])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_mean_of_many_deviations(norm: Callable[[torch.Tensor], torch.Tensor], kernels: str, train: bool) -> None:
    """One group of numbers is constant, the other varies by a ten-thousandth of its mean; an error of rounding there is one of a thousandth here."""
    x = torch.full((2, 4, 64), 200.3)
    x[1] += torch.randn(4, 64) * 0.02
    weight = torch.randn(2, 4, 64)
    found = []
    with on_ort(graphs=1):
        for function, dtype in ((norm, torch.float64), (norm, torch.float32), (compiled(norm, options={"kernels": kernels}), torch.float32)):
            leaf = x.to(dtype).requires_grad_(train)
            result = function(leaf)
            gradient = torch.autograd.grad((result * weight.to(dtype)).sum(), leaf)[0] if train else torch.zeros(())
            found.append((result.detach().double(), gradient.double()))
    for exact, eager, mine in zip(*found, strict=True):
        allowed = 10 * (eager - exact).abs().max() + 1e-5 * exact.abs().max() + 1e-6
        assert (mine - exact).abs().max() <= allowed
