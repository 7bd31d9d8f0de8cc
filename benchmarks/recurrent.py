"""An LSTM layer by oneDNN's kernels inside PythonOps and as ONNX Scans, beside eager PyTorch: which is faster at which sizes.

    python -m benchmarks.recurrent                                      # the sizes that `kernel_choice.lstm_by_onednn` rests on
    python -m benchmarks.recurrent --hidden 256 --lengths 16 --batches 1 8

One layer with as many inputs as hidden units, forward and backward with the gradient of its inputs, one thread. All three take turns in one
process; the figures are medians of processor time over the rounds, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.turns import cell, processor_times
from ort_backend.lowering.kernels import kernel_choice

SECONDS, ROUNDS = 0.5, (5, 80)
KINDS = ("eager", "oneDNN", "Scan")


def make_step(kind: str, hidden: int, length: int, batch: int) -> Callable[[], None]:
    """One training step of a layer without an optimiser; what is compiled has run once."""
    torch.manual_seed(0)
    model, x = nn.LSTM(hidden, hidden, batch_first=True), torch.randn(batch, length, hidden, requires_grad=True)
    options = {"kernels": "onnxruntime"} if kind == "Scan" else {}
    compiled = model if kind == "eager" else torch.compile(model, backend="ort_training", options=options, fullgraph=True)

    def step() -> None:
        compiled(x)[0].sum().backward()
        model.zero_grad()
        x.grad = None

    with mock.patch.object(kernel_choice, "lstm_by_onednn", lambda *sizes, trains: True):
        step()
    return step


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.allow_rnn = True
    table = Table(title="milliseconds a step, and the ratio to eager's")
    for heading in ("hidden", "length", "batch", *KINDS):
        table.add_column(heading, justify="right")
    for sizes in itertools.product(arguments.hidden, arguments.lengths, arguments.batches):
        torch._dynamo.reset()
        times = processor_times([make_step(kind, *sizes) for kind in KINDS], SECONDS, *ROUNDS)
        table.add_row(*map(str, sizes), *(cell(one, times[0]) for one in times))
    Console().print(table)


if __name__ == "__main__":
    main()
