"""Trains a character-level GPT twice from one seed, in eager PyTorch and on ONNX Runtime, and compares the two.

    python examples/train_gpt.py                                             # CPU, one thread, a few minutes
    python examples/train_gpt.py --steps 100 --layers 2                      # quicker
    python examples/train_gpt.py --device cuda --layers 8 --width 512 --context 256 --batch 32

The text is the English that ships with Python: the reference that `help()` shows (`pydoc_data.topics`). Nothing is downloaded.
Both trainings see the same initial weights, the same batches and the same dropout masks, so their loss curves lie on each
other; the script exits with 1 where they do not. All of it runs on one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import pydoc_data.topics
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import torch
import torch._dynamo  # here, and not within the first step that is timed
from matplotlib import pyplot
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional as F

import ort_backend

console = Console()


# The model: GPT-2 in nanoGPT's manner, at character level.


class SelfAttention(nn.Module):
    """Causal multi-head attention, [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return F.dropout(self.projection(mixed), self.dropout, self.training)


class Block(nn.Module):
    """One transformer block: attention and a two-layer perceptron, each normalised before and added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """A decoder-only language model whose output layer shares the token embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross-entropy against `targets` [batch, length]; without them, the logits of the next token, [batch, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.dropout(self.tokens(tokens) + self.positions(positions))))
        if targets is None:
            return F.linear(x[:, -1], self.tokens.weight)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


# The data.


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as numbers: `tokens[i]` is the place of its i-th character in `alphabet`."""

    alphabet: str
    tokens: Tensor

    @classmethod
    def load(cls) -> Corpus:
        """The paragraphs of Python's reference that are English rather than code, grammar or tables."""
        text = "\n\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore").decode()
        paragraphs = [part for part in re.split(r"\n\s*\n", text) if sum(c.islower() or c == " " for c in part) > 0.88 * len(part)]
        prose = "\n\n".join(part for part in paragraphs if not part.startswith("   "))
        alphabet = "".join(sorted(set(prose)))
        return cls(alphabet, torch.tensor([alphabet.index(character) for character in prose]))

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.alphabet[token] for token in tokens.tolist())

    def batches(self, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (inputs, targets), both [batch, context]: the same ones for one seed."""
        generator = torch.Generator().manual_seed(args.seed)
        while True:
            starts = torch.randint(len(self.tokens) - args.context, (args.batch,), generator=generator)
            rows = torch.stack([self.tokens[start : start + args.context + 1] for start in starts.tolist()]).to(args.device)
            yield rows[:, :-1], rows[:, 1:]


# Training.


class Training:
    """One model in training with one backend. Equal arguments give equal weights, batches and dropout masks."""

    def __init__(self, backend: str, corpus: Corpus, args: argparse.Namespace) -> None:
        self.backend = backend
        self.args = args
        torch.manual_seed(args.seed)
        self.model = GPT(len(corpus.alphabet), args.context, args.width, args.layers, args.heads, args.dropout).to(args.device)
        self.compiled = self.model if backend == "eager" else torch.compile(self.model, backend=backend)
        self.batches = corpus.batches(args)
        self.losses: list[float] = []
        self.first_step = math.nan
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        # With the usual eps of 1e-8 a gradient that is next to nothing still moves its weight by the full learning rate, in the
        # direction of its rounding error: two eager trainings that differ in the last bit of their weights then part by 1e-2.
        self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.99), eps=1e-5)

    def step(self) -> float:
        """One step of AdamW; the seconds that it took."""
        inputs, targets = next(self.batches)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        start = time.perf_counter()
        loss = self.compiled(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        seconds = time.perf_counter() - start
        if len(self.losses) == 1:
            self.first_step = seconds
        return seconds

    def learning_rate(self) -> float:
        """Up within the first tenth of the steps, then down along a cosine."""
        progress = min(len(self.losses) / self.args.steps, 1.0)
        return self.args.learning_rate * min((len(self.losses) + 1) / (0.1 * self.args.steps), 0.55 + 0.45 * math.cos(math.pi * progress))

    @torch.no_grad()
    def continue_text(self, prompt: Tensor, length: int) -> Tensor:
        """`length` characters sampled after `prompt` [batch, context], through the compiled model."""
        self.model.eval()
        window, text = prompt, []
        for _ in range(length):
            text.append(torch.multinomial(F.softmax(self.compiled(window) / 0.7, dim=-1), 1))
            window = torch.cat([window[:, 1:], text[-1]], dim=1)
        self.model.train()
        return torch.cat(text, dim=1)


def train(training: Training) -> None:
    """All steps of one training, with a progress bar."""
    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(elapsed_when_finished=True), console=console) as progress:
        task = progress.add_task(training.backend, total=training.args.steps, loss=math.nan)
        for _ in range(training.args.steps):
            training.step()
            progress.update(task, advance=1, loss=training.losses[-1])


def start(backend: str, corpus: Corpus, args: argparse.Namespace) -> Training | None:
    """A training that is only timed, after its first step; None, with the reason on the screen, if this machine cannot compile it."""
    training = Training(backend, corpus, args)
    with console.status(f"{backend} compiles its first step"):
        try:
            training.step()
        except (RuntimeError, OSError) as error:  # Dynamo's errors, and those of a missing or failing C++ compiler
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            console.print(f"[yellow]{backend} is left out, it does not compile here:[/] {reason}", highlight=False)
            if backend == "inductor":
                console.print("inductor needs a C++ compiler (on Debian and Ubuntu: apt install g++ python3-dev).")
            return None
    return training


def median_steps(trainings: list[Training], rounds: int, steps: int = 4) -> dict[str, float]:
    """Backend -> median seconds of a step. The backends take turns, so that a slow moment of the machine meets all of them."""
    seconds: dict[str, list[float]] = {training.backend: [] for training in trainings}
    with console.status("timing"):
        for training in trainings:
            training.step()
        for _ in range(rounds):
            for training in trainings:
                seconds[training.backend] += [training.step() for _ in range(steps)]
    return {backend: statistics.median(times) for backend, times in seconds.items()}


# What is shown.


def show_samples(training: Training, corpus: Corpus) -> None:
    args = training.args
    torch.manual_seed(args.seed)
    starts = torch.linspace(0, len(corpus.tokens) - args.context, args.samples + 2).long()[1:-1].tolist()
    prompts = torch.stack([corpus.tokens[start : start + args.context] for start in starts]).to(args.device)
    with console.status("writing"):
        continuations = training.continue_text(prompts, args.sample_length)
    for prompt, continuation in zip(prompts, continuations, strict=True):
        console.rule(f"prompt in grey, the rest written by the model that {training.backend} trained")
        console.print(Text(corpus.decode(prompt), style="bright_black"), Text(corpus.decode(continuation), style="green"), sep="", soft_wrap=True)
    console.rule()


def show_table(trainings: list[Training], medians: dict[str, float], args: argparse.Namespace) -> None:
    threads = "one thread" if args.device == "cpu" else args.device
    table = Table(title=f"{args.steps} steps, {args.batch} x {args.context} characters, {threads}")
    for heading in ("backend", "first step", "median step", "speed, eager = 1", f"loss at step {args.steps}"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for training in trainings:
        median = medians[training.backend]
        loss = f"{training.losses[args.steps - 1]:.4f}" if len(training.losses) >= args.steps else "not trained"
        table.add_row(training.backend, f"{training.first_step:.2f} s", f"{median * 1000:.1f} ms", f"{medians['eager'] / median:.2f}", loss)
    console.print(table)


def draw_losses(eager: Training, compiled: Training, file: Path) -> None:
    """The two loss curves above their difference, as a PNG."""
    steps = range(1, eager.args.steps + 1)
    curves = [training.losses[: eager.args.steps] for training in (eager, compiled)]
    figure, (losses, differences) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1), layout="constrained")
    losses.plot(steps, curves[0], color="#f2b134", linewidth=5, label="eager")
    losses.plot(steps, curves[1], color="#1f4e79", linewidth=1.2, label=compiled.backend)
    losses.set_ylabel("loss (nats per character)")
    losses.set_title("Character-level GPT, one seed: training loss")
    losses.legend()
    differences.plot(steps, [b - a for a, b in zip(*curves, strict=True)], color="#1f4e79", linewidth=1)
    differences.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    differences.set_ylabel(f"{compiled.backend}\nminus eager")
    differences.set_xlabel("step")
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--width", type=int, default=128, help="a multiple of heads")
    model.add_argument("--context", type=int, default=64, help="characters that the model sees at once")
    model.add_argument("--dropout", type=float, default=0.02)
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=500)
    training.add_argument("--batch", type=int, default=16)
    training.add_argument("--learning-rate", type=float, default=3e-3)
    training.add_argument("--seed", type=int, default=1)
    training.add_argument("--device", default="cpu")
    compare = parser.add_argument_group("comparison")
    compare.add_argument("--backend", default="ort_training", help="the backend that is trained beside eager")
    compare.add_argument("--also-time", nargs="*", default=["inductor"], metavar="BACKEND", help="further backends, timed for some steps only")
    compare.add_argument("--rounds", type=int, default=5, help="rounds of four timed steps of each backend")
    compare.add_argument("--tolerance", type=float, default=0.01, help="largest difference of the two losses at any step that still passes")
    compare.add_argument("--samples", type=int, default=2)
    compare.add_argument("--sample-length", type=int, default=250, help="characters")
    compare.add_argument("--out", type=Path, default=Path("out"), help="folder of the PNG")
    args = parser.parse_args()
    if args.heads < 1 or args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: PyTorch sees no CUDA device")
    if unknown := {args.backend, *args.also_time} - set(torch._dynamo.list_backends(exclude_tags=None)):
        parser.error(f"PyTorch knows no backend {min(unknown)!r}")
    return args


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)
    matplotlib.use("Agg")
    corpus = Corpus.load()
    eager, compiled = Training("eager", corpus, args), Training(args.backend, corpus, args)
    parameters = sum(parameter.numel() for parameter in eager.model.parameters())
    console.print(f"{parameters:,} parameters, {len(corpus.tokens):,} characters of text, {len(corpus.alphabet)} different ones")
    for training in (eager, compiled):
        torch.manual_seed(args.seed)  # the dropout masks
        train(training)
    if args.samples > 0:
        show_samples(compiled, corpus)

    others = [start(backend, corpus, args) for backend in args.also_time]
    trainings = [eager, *(training for training in others if training is not None), compiled]
    show_table(trainings, median_steps(trainings, args.rounds), args)
    file = args.out / "train_gpt.png"
    draw_losses(eager, compiled, file)
    console.print(f"The loss curves are in {file}")
    apart = max(abs(a - b) for a, b in zip(eager.losses[: args.steps], compiled.losses[: args.steps], strict=True))
    same = apart <= args.tolerance
    verdict = "[green]the same curve[/]" if same else "[red]NOT the same curve[/]"
    console.print(f"eager and {args.backend}: losses at most {apart:.1e} apart at any step, {args.tolerance} allowed: {verdict}")
    console.print(ort_backend.report())
    return 0 if same else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # first steps are timed without what an earlier run left
        sys.exit(main())
