"""Own models that are ordinary Python: indexing, in-place writes, branches, checkpoints, adapters, lower precision, quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo_models.convolutional import pictures, residual
from benchmarks.zoo_models.language import GROUPED, SHORT, TEXT, make
from benchmarks.zoo_models.structured import vectors
from benchmarks.zoo_models.workload import CLASSES, PICTURES, Built, Loss, add, ids, workload

PROGRAM, PRECISION, QUANTISED = "programs", "lower precision", "quantised"


class Indexing(nn.Module):
    """Slices, masks, gathers and scatters of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.projection = nn.Parameter(torch.randn(10, 12)), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        hidden = self.projection(x)
        rows = self.table[index] + self.table.index_select(0, index) + torch.take_along_dim(self.table[index], index[:, None] % 12, 1)
        mixed = hidden.clone()
        mixed[:, 1::2] = hidden[:, ::2] * 2
        mixed[..., -1] += rows[:, 0]
        mixed = mixed.index_put((index,), rows, accumulate=True) if x.shape[0] >= 10 else mixed
        mixed = mixed.masked_fill(x > 1.5, 0.0) + torch.where(x > 0, hidden.flip(1), hidden.roll(1, 0))
        folded = mixed.unfold(1, 4, 2).sum(-1)
        picked = mixed.gather(1, (index[:, None] + torch.arange(3)) % 12) + mixed.diagonal()[:1]
        return folded.square().mean() + picked.mean() + mixed.narrow(1, 2, 3).tril().sum() + torch.stack(mixed.chunk(3, 1)).amax()


@workload(PROGRAM)
def indexing() -> Built:
    """Everything between brackets."""
    return Indexing(), lambda batch, length: {"x": torch.randn(batch * length, 12), "index": torch.randint(0, 10, (batch * length,))}


class InPlace(nn.Module):
    """Writes into views, a counter, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(12, 12)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.projection(x)
        self.steps += 1
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        parts = torch.empty_like(hidden)
        parts[:, :6] = hidden[:, 6:].relu_()
        parts[:, 6:].copy_(hidden[:, :6]).mul_(2).add_(self.mean[6:])
        parts.view(-1)[::5].sub_(1.0)
        return parts.square_().mean()


@workload(PROGRAM)
def in_place() -> Built:
    """Mutation of views and of buffers."""
    return InPlace(), lambda batch, length: {"x": torch.randn(batch * length, 12)}


class Branches(nn.Module):
    """`torch.cond` on data, and a Python branch on a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        hidden = torch.cond(x.sum() > 0, lambda y: self.first(y).sin(), lambda y: self.second(y).cos(), (x,))
        return (self.second(hidden) if deep else hidden).square().mean()


@workload(PROGRAM)
def conditional() -> Built:
    """A branch on data inside the graph."""
    return Branches(), lambda batch, length: {"x": torch.randn(batch * length, 12), "deep": True}


class DataDependent(nn.Module):
    """A boolean index, and `nonzero`: sizes that depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.projection(x[x[:, 0] > 0])
        rows = (x[:, 1] > 0).nonzero().squeeze(1)
        return chosen.square().sum() / x.shape[0] + self.projection(x)[rows].sum() / x.shape[0]


CAPTURE = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
add("boolean_index", PROGRAM, lambda: (DataDependent(), lambda batch, length: {"x": torch.randn(batch * length, 12)}), dynamo=CAPTURE)
add("boolean_index_broken", PROGRAM, lambda: (DataDependent(), lambda batch, length: {"x": torch.randn(batch * length, 12)}))


class GraphBreak(nn.Module):
    """A branch on a tensor's value: Dynamo compiles what stands before and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        if hidden.sum() > 1e6:
            hidden = hidden / 2
        return self.second(hidden).logsumexp(-1).mean()


add("graph_break", PROGRAM, lambda: (GraphBreak(), lambda batch, length: {"x": torch.randn(batch * length, 12)}))


class Checkpointed(nn.Module):
    """Activation checkpoints around layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            input = input + checkpoint(layer, input, use_reentrant=False)
        return input


add("checkpointed", PROGRAM, lambda: (Loss(Checkpointed()), lambda batch, length: {"input": torch.randn(batch * length, 12)}))


class Adapter(nn.Module):
    """LoRA: a frozen layer and a trained product of two thin matrices."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inside, outside).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(inside, 2) / inside), nn.Parameter(torch.randn(2, outside) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + F.dropout(x, 0.1, self.training) @ self.down @ self.up


add("lora", PROGRAM, lambda: (Loss(nn.Sequential(Adapter(12, 32), nn.SiLU(), Adapter(32, CLASSES))), vectors))


class Rounded(torch.autograd.Function):
    """Rounds to a grid; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, levels: int) -> torch.Tensor:
        return (x * levels).round() / levels

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class FakeQuantised(nn.Module):
    """Quantisation-aware training: weights and activations on a grid, gradients straight through, in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.second = way, nn.Linear(12, 16), nn.Linear(16, CLASSES)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(self._quantised(input), self._quantised(self.first.weight), self.first.bias).relu()
        return F.linear(self._quantised(hidden), self._quantised(self.second.weight), self.second.bias)

    def _quantised(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "function":
            return Rounded.apply(x, 16)
        scale = x.detach().abs().amax() / 127
        if self.way == "operator":
            return torch.fake_quantize_per_tensor_affine(x, scale, torch.zeros((), dtype=torch.int32), -128, 127)
        return x + ((x / scale).round().clamp(-128, 127) * scale - x).detach()


for _way in ("straight_through", "operator", "function"):
    add(f"quantised_{_way}", QUANTISED, lambda way=_way: (Loss(FakeQuantised(way)), vectors))


# Eager PyTorch rounds at other places than a graph that computes in float32 between casts: some thousandths of the largest element.
HALF = {"tolerance": 2e-2}


def _text(model: str, config: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Callable[[], Built]:
    return lambda: (
        make(model, config, settings).to(dtype),
        lambda batch, length: {"input_ids": ids(batch, length), "labels": ids(batch, length)},
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, CLASSES))


for _dtype, _word in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
    add(f"mlp_{_word}", PRECISION, lambda: (Loss(_mlp()), vectors), autocast=_dtype, **HALF)
    add(f"residual_{_word}", PRECISION, lambda: (Loss(residual()), pictures()), autocast=_dtype, sizes=PICTURES, **HALF)
add("bert_bf16", PRECISION, _text("BertForMaskedLM", "BertConfig", TEXT), autocast=torch.bfloat16, **HALF)
add("gpt2_fp16", PRECISION, _text("GPT2LMHeadModel", "GPT2Config", SHORT), autocast=torch.float16, **HALF)
add("llama_pure_bf16", PRECISION, _text("LlamaForCausalLM", "LlamaConfig", GROUPED, torch.bfloat16), **HALF)
add(
    "mlp_float64",
    PRECISION,
    lambda: (Loss(_mlp().double()), lambda batch, length: {**vectors(batch, length), "input": torch.randn(batch * length, 12).double()}),
)
