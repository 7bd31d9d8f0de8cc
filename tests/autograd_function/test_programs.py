"""Programs put together at random: users' Functions among views, draws and cheap operators, small and large, with checkpoints and without.

What a `ctx` holds, the backward may also want to compute again, and ONNX Runtime may have it in the memory of another tensor.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from default_device import seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ort_backend


class KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


class KeepsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class KeepsBoth(torch.autograd.Function):
    """As attributes, which PyTorch does not know of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.x, ctx.y = x, y
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return product * ctx.y + total, product * ctx.x + total


def _part(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([KeepsInput.apply(x[..., :half]), x[..., half:]], -1)


STEPS: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "linear": lambda net, x, start: net.linear(x),
    "norm": lambda net, x, start: net.norm(x),
    "relu": lambda net, x, start: x.relu() + 1,
    "residual": lambda net, x, start: x + start,
    "softmax": lambda net, x, start: x.softmax(-1),
    "dropout": lambda net, x, start: F.dropout(x, 0.1),
    "input": lambda net, x, start: KeepsInput.apply(x),
    "output": lambda net, x, start: KeepsOutput.apply(x),
    "both": lambda net, x, start: sum(KeepsBoth.apply(x, start)) / 2,
    "flat": lambda net, x, start: torch.unflatten(KeepsInput.apply(x.flatten(0, 1)), 0, x.shape[:2]),
    "flat sum": lambda net, x, start: KeepsBoth.apply((x + 0.5).reshape(-1), start.reshape(-1))[0].view(x.shape),
    "transposed": lambda net, x, start: KeepsOutput.apply(x.transpose(0, 1)).transpose(0, 1).contiguous(),
    "expanded": lambda net, x, start: x + KeepsInput.apply(x[:1].expand(x.shape)),
    "part": lambda net, x, start: _part(x),
    "row": lambda net, x, start: torch.cat([x[:1], KeepsOutput.apply(x[1:])]),
}


WITHOUT = {"linear", "norm", "relu", "residual", "softmax", "dropout"}  # a Function


class Net(nn.Module):
    """Blocks, each a list of steps."""

    def __init__(self, blocks: list[list[str]], width: int, checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.blocks, self.checkpointed = blocks, checkpointed

    def block(self, steps: list[str], x: Tensor) -> Tensor:
        start = x
        for step in steps:
            x = STEPS[step](self, x, start)
        return x.sin()

    def forward(self, x: Tensor) -> Tensor:
        for steps in self.blocks:
            x = checkpoint(self.block, steps, x, use_reentrant=False) if self.checkpointed else self.block(steps, x)
        return x


def gradients(run: Any, net: Net, x: Tensor) -> list[Tensor | None]:
    """The result, the gradients of the input and of the parameters."""
    torch.manual_seed(0)
    net.zero_grad()
    x = x.clone().requires_grad_()
    result = run(x)
    result.sum().backward()
    return [result.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("seed", range(4))
def test_a_random_program(seed: int, checkpointed: bool, size: str) -> None:
    draw = random.Random(f"{seed} {checkpointed} {size}")
    blocks = [draw.choices(list(STEPS), k=draw.randint(4, 8)) for _ in range(draw.randint(1, 3))]
    shape = (3, 4, 8) if size == "small" else (4, 128, 128)  # activations from 65,536 elements on are computed again
    net = Net(blocks, shape[-1], checkpointed).double()
    own = copy.deepcopy(net)
    x = torch.randn(shape, dtype=torch.float64, generator=seeded(seed))
    compiled = torch.compile(own, backend="ort_training", fullgraph=True, options={"kernels": draw.choice(["measured", "onnxruntime"])})
    before = len(ort_backend.report().graphs)
    for _ in range(2):
        torch.testing.assert_close(gradients(compiled, own, x), gradients(net, net, x), rtol=1e-6, atol=1e-8, msg=lambda text: f"{blocks}: {text}")
    (graph,) = ort_backend.report().graphs[before:]
    assert graph.functions == sum(step not in WITHOUT for steps in blocks for step in steps)
