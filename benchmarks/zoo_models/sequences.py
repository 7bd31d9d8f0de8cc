"""Own sequence models: recurrent networks, attention in its variants, state spaces, CTC."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_models.workload import CLASSES, VOCABULARY, Batch, Built, Loss, add, ids, labels, workload

RECURRENT, ATTENTION, SEQUENCE = "recurrent", "attention", "sequence"


class Tagger(nn.Module):
    """Embedding, a recurrent network, a class for each token."""

    def __init__(self, network: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.network, self.head = nn.Embedding(VOCABULARY, 16), network, nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.network(self.embedding(x))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def _tagged(length: int) -> Batch:
    """Sequences of a fixed length: Dynamo unrolls the steps."""
    return lambda batch, _: {"x": ids(batch, length), "y": labels(batch, length)}


TRACED = {"allow_rnn": True}  # Dynamo leaves nn.LSTM and its like to eager PyTorch unless told otherwise
add("lstm", RECURRENT, lambda: (Tagger(nn.LSTM(16, 16, 2, batch_first=True)), _tagged(8)), dynamo=TRACED)
add("lstm_bidirectional", RECURRENT, lambda: (Tagger(nn.LSTM(16, 8, batch_first=True, bidirectional=True)), _tagged(6)), dynamo=TRACED)
add("gru", RECURRENT, lambda: (Tagger(nn.GRU(16, 16, batch_first=True)), _tagged(8)), dynamo=TRACED)
add("rnn", RECURRENT, lambda: (Tagger(nn.RNN(16, 16, batch_first=True)), _tagged(8)), dynamo=TRACED)


class CellLoop(nn.Module):
    """An LSTM cell over the columns, states collected in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        states = (x.new_zeros(x.shape[0], 16), x.new_zeros(x.shape[0], 16))
        outputs = []
        for column in x.unbind(1):
            states = self.cell(column, states)
            outputs.append(states[0])
        return torch.stack(outputs, 1), None


add("lstm_cell", RECURRENT, lambda: (Tagger(CellLoop()), _tagged(6)))


class AttentionDecoder(nn.Module):
    """GRU encoder, a GRU cell that attends to it, teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(VOCABULARY, 16), nn.GRU(16, 16, batch_first=True)
        self.cell, self.head = nn.GRUCell(32, 16), nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        memory, last = self.encoder(self.embedding(x))
        state, logits = last[0], []
        for word in self.embedding(y).unbind(1):
            weights = torch.einsum("bd,bsd->bs", state, memory).softmax(-1)
            state = self.cell(torch.cat([word, torch.einsum("bs,bsd->bd", weights, memory)], -1), state)
            logits.append(self.head(state))
        return F.cross_entropy(torch.stack(logits[:-1], 1).flatten(0, 1), y[:, 1:].flatten())


@workload(RECURRENT, dynamo=TRACED)
def attention_decoder() -> Built:
    """Translation as before transformers."""
    return AttentionDecoder(), lambda batch, _: {"x": ids(batch, 6), "y": ids(batch, 5)}


class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding).square().mean()


@workload(ATTENTION)
def transformer_encoder() -> Built:
    """PyTorch's encoder, dropout on, the last tokens padding."""
    return Encoder(), lambda batch, length: {"x": torch.randn(batch, length, 32), "padding": torch.arange(length).expand(batch, length) > length - 3}


class Translator(nn.Module):
    """nn.Transformer with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Transformer(32, 4, 1, 1, 64, batch_first=True, norm_first=True, activation="gelu")

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.network(source, target, tgt_mask=mask, tgt_is_causal=True).square().mean()


@workload(ATTENTION)
def transformer() -> Built:
    """PyTorch's encoder and decoder."""
    return Translator(), lambda batch, length: {"source": torch.randn(batch, length, 32), "target": torch.randn(batch, length - 3, 32)}


class MultiHead(nn.Module):
    """nn.MultiheadAttention that also returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True, add_bias_kv=True, kdim=8, vdim=8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        output, weights = self.attention(x, memory, memory)
        return output.square().mean() + (weights * weights.clamp(min=1e-6).log()).sum(-1).mean()


@workload(ATTENTION)
def multihead_weights() -> Built:
    """Cross attention whose weights are in the loss."""
    return MultiHead(), lambda batch, length: {"x": torch.randn(batch, length, 16), "memory": torch.randn(batch, length + 2, 8)}


class Attention(nn.Module):
    """Scaled dot product attention; `kind` chooses the mask, the heads, the dropout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.heads = kind, 2 if kind == "grouped" else 4
        self.query, self.pair, self.out = nn.Linear(32, 32), nn.Linear(32, 16 * self.heads), nn.Linear(32, 32)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 5).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        key, value = self.pair(x).unflatten(-1, (self.heads, 16)).transpose(1, 2).chunk(2, -1)
        options: dict[str, Any] = {
            "causal": {"is_causal": True},
            "dropout": {"is_causal": True, "dropout_p": 0.2},
            "grouped": {"is_causal": True, "enable_gqa": True},
            "masked": {"attn_mask": torch.arange(x.shape[1])[None, :] <= torch.arange(x.shape[1])[:, None] + 2},
            "biased": {"attn_mask": self._distances(x), "scale": 0.5},
        }[self.kind]
        return self.out(F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2).flatten(2))

    def _distances(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])
        return -(positions[None, :] - positions[:, None]).abs() * self.slopes[:, None, None]


for _kind in ("causal", "dropout", "grouped", "masked", "biased"):
    add(
        f"attention_{_kind}",
        ATTENTION,
        lambda kind=_kind: (Loss(Attention(kind)), lambda batch, length: {"input": torch.randn(batch, length, 32)}),
    )


class LinearAttention(nn.Module):
    """Causal attention without softmax: running sums of key-value products."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projection(x).chunk(3, -1)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        memory = torch.einsum("bsd,bse->bsde", key, value).cumsum(1)
        return torch.einsum("bsd,bsde->bse", query, memory) / torch.einsum("bsd,bsd->bs", query, key.cumsum(1)).unsqueeze(-1)


add("attention_linear", ATTENTION, lambda: (Loss(LinearAttention()), lambda batch, length: {"input": torch.randn(batch, length, 32)}))


class NanoGPT(nn.Module):
    """A GPT as one writes it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(5))
        self.mixers = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.feeds = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU("tanh"), nn.Linear(64, 32), nn.Dropout(0.1)) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for i, (mixer, feed) in enumerate(zip(self.mixers, self.feeds, strict=True)):
            query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in mixer(self.norms[2 * i](hidden)).split(32, -1))
            weights = (query @ key.mT / math.sqrt(8)).masked_fill(~mask, -math.inf).softmax(-1)
            hidden = hidden + (F.dropout(weights, 0.1, self.training) @ value).transpose(1, 2).flatten(2)
            hidden = hidden + feed(self.norms[2 * i + 1](hidden))
        return F.cross_entropy((self.norms[4](hidden) @ self.tokens.weight.T).flatten(0, 1), y.flatten())


@workload(ATTENTION)
def nano_gpt() -> Built:
    """Tied embeddings, learnt positions."""
    return NanoGPT(), lambda batch, length: {"x": ids(batch, length), "y": ids(batch, length)}


class SpeechRecogniser(nn.Module):
    """A convolution over frames and CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 10, 1))

    def forward(self, frames: torch.Tensor, text: torch.Tensor, frame_lengths: torch.Tensor, text_lengths: torch.Tensor) -> torch.Tensor:
        log_probabilities = self.network(frames).permute(2, 0, 1).log_softmax(-1)
        return F.ctc_loss(log_probabilities, text, frame_lengths, text_lengths)


@workload(SEQUENCE)
def ctc() -> Built:
    """CTC loss breaks the graph in Dynamo: what stands before it is compiled."""
    return SpeechRecogniser(), lambda batch, length: {
        "frames": torch.randn(batch, 8, length),
        "text": torch.randint(1, 10, (batch, 4)),
        "frame_lengths": torch.full((batch,), length),
        "text_lengths": torch.full((batch,), 4),
    }


class StateSpace(nn.Module):
    """A diagonal linear recurrence as a convolution through the Fourier transform (S4D, real part)."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.inside, self.out = nn.Parameter(torch.rand(8, 4)), nn.Parameter(torch.randn(8, 4)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        kernel = (self.inside[..., None] * torch.exp(-self.decay[..., None] * torch.arange(length))).sum(1)
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return self.out(F.gelu(torch.fft.irfft(spectrum, n=2 * length)[..., :length].transpose(1, 2)))


add("state_space", SEQUENCE, lambda: (Loss(StateSpace()), lambda batch, length: {"input": torch.randn(batch, length, 8)}))
