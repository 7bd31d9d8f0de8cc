"""Forward-mode differentiation of a compiled function: with tangents, as in eager."""

from __future__ import annotations

import pytest
import torch
from behaviours.check import compiled, same_tree
from default_device import seeded
from torch import Tensor
from torch.autograd import forward_ad
from torch_version import LEAVES_DUAL_TENSORS, TORCH

import ort_backend

PRIMAL, TANGENT = torch.randn(3, 4, generator=seeded(0)), torch.randn(3, 4, generator=seeded(1))


def function(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin() * 2, x.square().sum(0)


@pytest.mark.parametrize("ran_before", [False, True])
def test_tangents_of_results(ran_before: bool) -> None:
    torch._dynamo.reset()
    run = compiled(function, fullgraph=ran_before)
    if ran_before:
        run(PRIMAL)
    with forward_ad.dual_level():
        made, expected = ([forward_ad.unpack_dual(one) for one in side(forward_ad.make_dual(PRIMAL, TANGENT))] for side in (run, function))
        same_tree([one.primal for one in made], [one.primal for one in expected])
        same_tree([one.tangent for one in made], [one.tangent for one in expected])
    same_tree(run(PRIMAL), function(PRIMAL))
    if ran_before or TORCH < LEAVES_DUAL_TENSORS:
        counts = ort_backend.report().graphs[-1].counts
        assert (counts.eager, counts.forward) == (1, 1 + ran_before), "it runs in the session outside of a level"
