"""A small GPT whose LayerNorm, GELU and cross-entropy are hand-written Functions trains as it does in eager PyTorch."""

from __future__ import annotations

import copy
import math

import torch
from default_device import ON_CPU, seeded
from torch import nn
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

import ort_backend

VOCABULARY, WIDTH, HEADS, LENGTH, STEPS = 32, 32, 4, 16, 50


class LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        scale = (x.var(-1, keepdim=True, unbiased=False) + eps).rsqrt()
        normal = (x - mean) * scale
        ctx.save_for_backward(normal, scale, weight)
        return normal * weight + bias

    @staticmethod
    def backward(ctx, g):
        normal, scale, weight = ctx.saved_tensors
        inner = g * weight
        x = (inner - inner.mean(-1, keepdim=True) - normal * (inner * normal).mean(-1, keepdim=True)) * scale
        return x, (g * normal).flatten(0, -2).sum(0), g.flatten(0, -2).sum(0), None


class Gelu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


class CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, targets):
        shifted = logits - logits.max(-1, keepdim=True).values
        log = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(log, targets)
        return -log.gather(-1, targets.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx, g):
        log, targets = ctx.saved_tensors
        gradient = log.exp()
        gradient.scatter_add_(-1, targets.unsqueeze(-1), -torch.ones_like(targets, dtype=gradient.dtype).unsqueeze(-1))
        return gradient * (g / targets.numel()), None


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return LayerNorm.apply(x, self.weight, self.bias, 1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Norm(), Norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.unflatten(part, -1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(Gelu.apply(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm, self.head = nn.Sequential(Block(), Block()), Norm(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return CrossEntropy.apply(self.head(self.norm(self.blocks(x))), targets)


def test_fifty_steps_with_eagers_losses() -> None:
    model = Gpt()
    eager = copy.deepcopy(model)
    before = len(ort_backend.report().graphs)
    compiled = torch.compile(model, backend="ort_training", fullgraph=True)
    losses: list[list[float]] = [[], []]
    for module, into in ((compiled, losses[0]), (eager, losses[1])):
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        generator = seeded(0)
        for _ in range(STEPS):
            start = torch.randint(VOCABULARY, (8, 1), generator=generator)
            sequence = (start + torch.arange(LENGTH + 1) * 3) % VOCABULARY
            loss = module(sequence[:, :-1], sequence[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            into.append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)
    assert losses[0][-1] < losses[0][0] / 2
    (graph,) = ort_backend.report().graphs[before:]
    assert graph.functions == 5 + 2 + 1
    assert not [one for one in graph.outside if ON_CPU or not one.is_choice]  # on CUDA, PyTorch's attention
    assert (graph.counts.forward, graph.counts.backward) == (STEPS, STEPS)
