"""Calls that give what an operator gives, sooner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort, same_tree, single_session
from default_device import ON_CPU, seeded
from torch import nn
from torch.nn import functional as F

from ort_backend.lowering.kernels import faster_calls

aten = torch.ops.aten


def _picture(kind: str) -> torch.Tensor:
    generator = seeded(0)
    x = torch.randn(3, 17, 11, 8, generator=generator)
    if kind == "ties":
        return x.round()
    if kind == "not finite":
        x[torch.rand(x.shape, generator=generator) < 0.2] = float("nan")
        x[torch.rand(x.shape, generator=generator) < 0.2] = float("inf")
        x[:, :3] = float("-inf")
    return x.contiguous(memory_format=torch.channels_last) if kind == "channels last" else x[0] if kind == "one picture" else x


@pytest.mark.cpu_only(reason="calls that its kernels of the CPU need")
@pytest.mark.parametrize("kind", ["plain", "ties", "not finite", "channels last", "one picture"])
@pytest.mark.parametrize(
    "settings", [([2, 2],), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 2], [1, 0], [2, 1]), ([3, 3], [2, 2], [0, 0], [1, 1], True)], ids=str
)
def test_max_pooling_gives_pytorchs_results_and_positions(kind: str, settings: Any) -> None:
    x = _picture(kind)
    found = faster_calls.IMPLEMENTATIONS[aten.max_pool2d_with_indices.default](x, *settings)
    expected = aten.max_pool2d_with_indices(x.contiguous(), *settings)
    torch.testing.assert_close(found, tuple(expected), rtol=0, atol=0, equal_nan=True)
    assert all(one.is_contiguous() for one in found)


@single_session
@pytest.mark.parametrize(("channels", "trains", "chosen"), [(16, True, True), (16, False, False), (4, True, False)])
def test_max_pooling_is_pytorchs_where_a_backward_wants_its_positions(channels: int, trains: bool, chosen: bool) -> None:
    x = torch.randn(4, channels, 128, 64).relu().requires_grad_(trains)
    model = nn.Conv2d(channels, 8, 1)

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(F.max_pool2d(x, 3, 2, 1))

    with on_ort(graphs=1) as ran, torch.set_grad_enabled(trains):
        found = compiled(function)(x)
        same_tree(found, function(x))
        if trains:
            found.square().sum().backward()
            gradient, x.grad = x.grad, None
            function(x).square().sum().backward()
            torch.testing.assert_close(gradient, x.grad, rtol=1e-4, atol=1e-4)
    operators = {one.operator for one in ran.graphs[0].outside}
    assert ("aten::max_pool2d_with_indices" in operators) == (chosen and ON_CPU)
