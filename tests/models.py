"""Small real models with random weights, one batch function each: what the training tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_models.sequences import Encoder

Batch = Callable[[], dict[str, Any]]
VOCABULARY, CLASSES = 99, 5


def ids(batch: int = 2, length: int = 16) -> torch.Tensor:
    """Token ids, without the special ones."""
    return torch.randint(3, VOCABULARY, (batch, length))


def pictures(batch: int = 2, size: int = 32) -> dict[str, torch.Tensor]:
    """Images and labels, as transformers' image classifiers take them."""
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 2, (batch,))}


class Classifier(nn.Module):
    """A network and its cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.network(x), y)


def mlp() -> tuple[nn.Module, Batch]:
    network = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    return Classifier(network), lambda: {"x": torch.randn(8, 12), "y": torch.randint(0, CLASSES, (8,))}


def cnn() -> tuple[nn.Module, Batch]:
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(16), nn.GELU(), nn.Dropout2d(0.1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)),
    )
    return Classifier(network), lambda: {"x": torch.randn(4, 3, 16, 16), "y": torch.randint(0, CLASSES, (4,))}


def resnet18() -> tuple[nn.Module, Batch]:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[2, 2, 2, 2], layer_type="basic", num_labels=2)
    return transformers.ResNetForImageClassification(config), lambda: pictures(size=64)


class Tagger(nn.Module):
    """An LSTM over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(VOCABULARY, 16), nn.LSTM(16, 16, 2, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def lstm() -> tuple[nn.Module, Batch]:
    return Tagger(), lambda: {"x": ids(3, 8), "y": torch.randint(0, CLASSES, (3, 8))}


def transformer_encoder() -> tuple[nn.Module, Batch]:
    return Encoder(), lambda: {"x": torch.randn(2, 8, 32), "padding": torch.arange(8).expand(2, 8) > 6}


_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def bert() -> tuple[nn.Module, Batch]:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES)), lambda: {"input_ids": ids(), "labels": ids()}


def gpt2() -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config), lambda: {"input_ids": ids(), "labels": ids()}


def llama() -> tuple[nn.Module, Batch]:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, num_key_value_heads=2)), lambda: {"input_ids": ids(), "labels": ids()}


def t5() -> tuple[nn.Module, Batch]:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), lambda: {"input_ids": ids(), "labels": ids(2, 12)}


def vit() -> tuple[nn.Module, Batch]:
    sizes = {name: value for name, value in _SIZES.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, hidden_dropout_prob=0.1)
    return transformers.ViTForImageClassification(config), pictures


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "lstm": lstm,
    "transformer_encoder": transformer_encoder,
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "vit": vit,
}


def loss_of(output: Any) -> torch.Tensor:
    """The loss: the output itself, or what transformers calls `loss`."""
    return output if isinstance(output, torch.Tensor) else output.loss
