"""The workloads: models of real shapes that take at most seconds a step on one core, each with its batches.

A model takes a batch as keyword arguments and returns its loss, or an output of transformers that has a `loss`. There is no dropout
anywhere: inductor draws other random numbers than eager PyTorch, and every loss is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Callable[[], Batch]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its batches.

    Attributes:
        name: What `--models` calls it.
        sizes: The sizes, for the report.
        make: The model, and a function that draws a batch.
        quick: Whether `--quick` runs it.
        allow_rnn: Whether Dynamo has to be told to capture an RNN.
        learning_rate: Of plain SGD; small where training would blow up rounding.
    """

    name: str
    sizes: str
    make: Callable[[], Made]
    quick: bool = False
    allow_rnn: bool = False
    learning_rate: float = 0.01

    def build(self, device: str = "cpu", batches: int = 4) -> tuple[nn.Module, list[Batch]]:
        """The model in training mode and some batches, the same ones in every process."""
        torch.manual_seed(0)
        model, draw = self.make()
        drawn = [draw() for _ in range(batches)]
        torch._dynamo.config.allow_rnn = self.allow_rnn
        return model.train().to(device), [{key: value.to(device) for key, value in batch.items()} for batch in drawn]


def loss_of(output: Any) -> Tensor:
    """The loss: the output itself, or what transformers calls `loss`."""
    return output if isinstance(output, Tensor) else output.loss


# Models written here.


class WithLoss(nn.Module):
    """A network and a loss of its output."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.network(x), y)


class Block(nn.Module):
    """A transformer block in nanoGPT's manner: attention and a two-layer perceptron, each normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """A decoder-only language model; the loss is the mean cross entropy."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


def gpt(layers: int, width: int, batch: int, length: int, vocabulary: int = 2000) -> Made:
    """A GPT with heads of width 64, or 32 where there would be fewer than four."""
    heads = max(width // 64, 4)
    return GPT(vocabulary, length, width, layers, heads), lambda: _tokens(vocabulary, batch, length, "tokens", "targets")


def mlp(width: int = 1024, layers: int = 4, batch: int = 256) -> Made:
    """A perceptron with GELU."""
    hidden = [module for _ in range(layers - 1) for module in (nn.Linear(width, width), nn.GELU())]
    network = nn.Sequential(nn.Linear(784, width), nn.GELU(), *hidden, nn.Linear(width, 10))
    return WithLoss(network, F.cross_entropy), lambda: {"x": torch.randn(batch, 784), "y": torch.randint(0, 10, (batch,))}


class Tagger(nn.Module):
    """An LSTM between an embedding and a linear layer."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def lstm(batch: int = 16, length: int = 32, width: int = 256) -> Made:
    """One layer; its time steps are unrolled by Dynamo's decomposition."""
    return Tagger(2000, width, 50), lambda: {**_tokens(2000, batch, length, "tokens"), **_tokens(50, batch, length, "targets")}


class RecommendationModel(nn.Module):
    """As DLRM: a perceptron over dense features, bags of embeddings, dot products of all pairs, a perceptron."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.embeddings = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, offset=-1))

    def forward(self, dense: Tensor, sparse: Tensor, clicks: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(embedding(sparse[i]) for i, embedding in enumerate(self.embeddings))], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]  # type: ignore[index]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, crossed], dim=1)).squeeze(1), clicks)


def dlrm(batch: int = 512, tables: int = 8, rows: int = 10_000, width: int = 32, bag: int = 4) -> Made:
    """Eight tables of ten thousand rows, four indices a bag."""

    def draw() -> Batch:
        return {"dense": torch.randn(batch, 13), "sparse": torch.randint(0, rows, (tables, batch, bag)), "clicks": torch.rand(batch).round()}

    return RecommendationModel(tables, rows, width), draw


class Residual(nn.Module):
    """GroupNorm, SiLU and convolution, twice, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = lambda channels: (nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, outputs, 3, padding=1))  # noqa: E731
        self.layers = nn.Sequential(*half(inputs), *half(outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.shortcut(x)


class UNet(nn.Module):
    """As diffusion models use it: halves, doubles, and joins what was set aside on the way down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width), Residual(width, 2 * width), Residual(2 * width, 4 * width)])
        self.shrink = nn.ModuleList([nn.Conv2d(c, c, 3, stride=2, padding=1) for c in (width, 2 * width)])
        self.up = nn.ModuleList([Residual(6 * width, 2 * width), Residual(3 * width, width)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down[0](self.first(x))
        aside = []
        for shrink, block in zip(self.shrink, self.down[1:]):
            aside.append(x)
            x = block(shrink(x))
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), aside.pop()], dim=1))
        return self.last(x)


def unet(batch: int = 2, size: int = 64, width: int = 32) -> Made:
    """Denoises small pictures."""
    return WithLoss(UNet(width), F.mse_loss), lambda: {"x": torch.randn(batch, 3, size, size), "y": torch.randn(batch, 3, size, size)}


# Models of transformers, which is imported where one of them is asked for.


def _tokens(vocabulary: int, batch: int, length: int, *names: str) -> Batch:
    return {name: torch.randint(3, vocabulary, (batch, length)) for name in names}


def _pictures(batch: int, size: int, classes: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def bert(layers: int = 6, width: int = 384, batch: int = 4, length: int = 128, head: int = 32, vocabulary: int = 4000) -> Made:
    """The sizes of MiniLM."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // head, "intermediate_size": 4 * width}
    config = BertConfig(vocab_size=vocabulary, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    return BertForMaskedLM(config), lambda: _tokens(vocabulary, batch, length, "input_ids", "labels")


def gpt2(batch: int = 2, length: int = 256) -> Made:
    """GPT-2 small: the embedding's weight is the last layer's, too."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return GPT2LMHeadModel(config), lambda: _tokens(config.vocab_size, batch, length, "input_ids", "labels")


def llama(layers: int = 4, width: int = 256, batch: int = 4, length: int = 128, heads: int = 4, vocabulary: int = 4000) -> Made:
    """RMSNorm, rotary embeddings, SwiGLU; two heads of queries share one of keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "intermediate_size": 4 * width}
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, use_cache=False, **sizes)
    return LlamaForCausalLM(config), lambda: _tokens(vocabulary, batch, length, "input_ids", "labels")


def t5(layers: int = 3, width: int = 256, batch: int = 4, length: int = 96) -> Made:
    """Encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": width, "d_kv": 64, "d_ff": 4 * width, "num_layers": layers, "num_heads": width // 64}
    config = T5Config(vocab_size=4000, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False, **sizes)
    return T5ForConditionalGeneration(config), lambda: {**_tokens(4000, batch, length, "input_ids"), **_tokens(4000, batch, length // 2, "labels")}


# Without it, transformers sets it in the first step: the second one compiles again, under every backend.
_LABELS = "single_label_classification"


def vit(layers: int = 12, width: int = 192, batch: int = 2, size: int = 224) -> Made:
    """ViT-Tiny: 197 tokens a picture."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64, "intermediate_size": 4 * width}
    config = ViTConfig(image_size=size, patch_size=16, problem_type=_LABELS, num_labels=100, **sizes)
    return ViTForImageClassification(config), lambda: _pictures(batch, size, 100)


def resnet50(batch: int = 4, size: int = 112) -> Made:
    """ResNet-50 itself, on pictures of half the side. Its residual branches start small: else its gradients explode, and rounding with them."""
    from transformers import ResNetConfig, ResNetForImageClassification
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

    model = ResNetForImageClassification(ResNetConfig(problem_type=_LABELS, num_labels=100))
    for block in model.modules():
        if isinstance(block, ResNetBottleNeckLayer):
            nn.init.constant_(block.layer[-1].normalization.weight, 0.2)
    return model, lambda: _pictures(batch, size, 100)


def convnext(batch: int = 2, size: int = 112) -> Made:
    """ConvNeXt-Tiny, on pictures of half the side."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(problem_type=_LABELS, num_labels=100)), lambda: _pictures(batch, size, 100)


_ALL = (
    Workload("mlp", "4 layers of 1024, GELU, batch 256", mlp, quick=True),
    Workload("gpt-tiny", "2 layers, d = 128, 8 x 64 tokens", lambda: gpt(2, 128, 8, 64), quick=True),
    Workload("gpt", "4 layers, d = 256, 8 x 128 tokens", lambda: gpt(4, 256, 8, 128)),
    Workload("gpt-medium", "6 layers, d = 384, 4 x 256 tokens", lambda: gpt(6, 384, 4, 256)),
    Workload("gpt-large", "12 layers, d = 768, 1 x 128 tokens", lambda: gpt(12, 768, 1, 128, vocabulary=8000)),
    Workload("bert", "6 layers, d = 384, 4 x 128 tokens", bert),
    Workload("llama", "4 layers, d = 256, GQA, 4 x 128 tokens", llama),
    Workload("t5", "3 + 3 layers, d = 256, 4 x (96 + 48) tokens", t5),
    Workload("vit", "12 layers, d = 192, 2 images of 224 x 224", vit),
    Workload("resnet50", "4 images of 112 x 112", resnet50, learning_rate=1e-4),
    Workload("convnext", "Tiny, 2 images of 112 x 112", convnext),
    Workload("lstm", "1 layer, d = 256, 16 x 32 tokens", lstm, allow_rnn=True),
    Workload("dlrm", "8 tables of 10,000 x 32, batch 512", dlrm, quick=True, learning_rate=1e-3),
    Workload("unet", "32 to 128 channels, 2 images of 64 x 64", unet),
    Workload("test", "a few weights, for the tests of this suite", lambda: mlp(16, 1, 4)),
)
# Real sizes with batches for one core of a CPU: some seconds a step.
_REAL = (
    Workload("bert-base-cpu", "12 layers, d = 768, 4 x 128 tokens", lambda: bert(12, 768, head=64, vocabulary=30522)),
    Workload("gpt2-small-cpu", "12 layers, d = 768, 2 x 256 tokens", gpt2),
    Workload("vit-b-cpu", "12 layers, d = 768, 4 images of 224 x 224", lambda: vit(12, 768, 4)),
    Workload("llama-110m-cpu", "12 layers, d = 768, GQA, 2 x 256 tokens", lambda: llama(12, 768, 2, 256, heads=12, vocabulary=8000)),
)
# Real sizes, for a GPU.
_LARGE = (
    Workload("gpt2-small", "12 layers, d = 768, 8 x 1024 tokens", lambda: gpt(12, 768, 8, 1024, vocabulary=50304)),
    Workload("gpt2-medium", "24 layers, d = 1024, 4 x 1024 tokens", lambda: gpt(24, 1024, 4, 1024, vocabulary=50304)),
    Workload("bert-base", "12 layers, d = 768, 32 x 256 tokens", lambda: bert(12, 768, 32, 256, head=64, vocabulary=30522)),
    Workload("llama-300m", "16 layers, d = 1024, GQA, 4 x 1024 tokens", lambda: llama(16, 1024, 4, 1024, heads=16, vocabulary=32000)),
    Workload("vit-b", "12 layers, d = 768, 64 images of 224 x 224", lambda: vit(12, 768, 64)),
    Workload("resnet50-224", "64 images of 224 x 224", lambda: resnet50(64, 224), learning_rate=1e-4),
)
WORKLOADS = {workload.name: workload for workload in (*_ALL, *_REAL, *_LARGE)}
REAL = tuple(workload.name for workload in _REAL)
LARGE = tuple(workload.name for workload in _LARGE)
DEFAULT = tuple(workload.name for workload in _ALL if workload.name != "test")
QUICK = tuple(workload.name for workload in _ALL if workload.quick)
