"""A whole training step under `torch.compile`: Dynamo breaks the graph at the backward, which then runs while Dynamo looks on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort, same_tree
from behaviours.operators import Cubed
from torch import nn


def _trained(make: Callable[[Callable[..., Any]], Callable[..., Any]], with_function: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        made = model(Cubed.apply(x) if with_function else x)
        loss = made.square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    one = make(step)
    losses = [one(torch.randn(4, 6).requires_grad_(with_function)) for _ in range(4)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("with_function", [False, True])
@pytest.mark.parametrize("verify", [0, 1])
def test_a_whole_step(with_function: bool, verify: int) -> None:
    with on_ort(idle=True) as ran:
        made = _trained(lambda step: compiled(step, fullgraph=False, options={"verify": verify}), with_function)
    assert sum(graph.counts.backward for graph in ran.graphs) == 4 + verify
    same_tree(made, _trained(lambda step: step, with_function))
