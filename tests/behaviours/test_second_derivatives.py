"""`torch.autograd.grad(..., create_graph=True)` inside a compiled function, which Dynamo makes a part of the graph where it is told to."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort, same_module, same_tree
from behaviours.operators import Cubed
from default_device import ON_CPU, seeded
from torch import nn

pytestmark = pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this Dynamo breaks the graph at torch.autograd.grad")


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class Channel(nn.Module):
    """One channel more: `nn.Unflatten` calls a method at which Dynamo breaks the graph where PyTorch has a default device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)),
    "normalized": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Dropout(0.2), nn.Linear(8, 1)),
    "convolution": lambda: nn.Sequential(Channel(), nn.Conv1d(1, 3, 3, padding=1), nn.Softplus(), nn.AvgPool1d(2), nn.Flatten()),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
}


def _penalty(network: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """As of a critic: its gradient has to have length 1."""
    result = network(x).sum()
    (gradient,) = torch.autograd.grad(result, x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean() + result


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_gradient_in_the_loss(kind: str) -> None:
    torch.manual_seed(0)
    mine = NETWORKS[kind]()
    theirs = copy.deepcopy(mine)
    found: list[Any] = []
    # In eager PyTorch cuDNN's recurrent layers have no second derivative.
    cudnn = contextlib.nullcontext() if ON_CPU or kind not in ("lstm", "gru", "rnn") else torch.backends.cudnn.flags(enabled=False)
    with cudnn, torch._dynamo.config.patch(trace_autograd_ops=True, allow_rnn=True), on_ort(graphs=1, forwards=2, backwards=2):
        for side in (compiled(lambda x: _penalty(mine, x)), lambda x: _penalty(theirs, x)):
            torch.manual_seed(1)
            losses = [side(torch.randn(6, 4, generator=seeded(step)).requires_grad_()) for step in range(2)]
            sum(losses).backward()
            found.append([loss.detach() for loss in losses])
    same_tree(*found)
    same_module(mine, theirs)


def test_the_gradient_of_an_opaque_function_has_none() -> None:
    """Autograd would take it for a constant."""
    w = torch.ones(3, requires_grad=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(Exception, match="cannot differentiate the gradient of an opaque"):
        compiled(lambda x: _penalty(lambda y: Cubed.apply(y * w), x))(torch.ones(2, 3, requires_grad=True)).backward()
