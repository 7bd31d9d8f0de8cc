"""Cost of one call on a tiny model, forward and backward: what the backend's own Python adds to `aot_eager`'s.

    python -m benchmarks.overhead

One thread. Each backend has a process of its own, as Dynamo would look through the guards of all of them at every call, and they take turns in every
round; the figure is the median over the rounds. The tiny model's arithmetic takes a few microseconds, so that what is left is the cost of calling:
Dynamo's guards and autograd, which all backends share, AOTAutograd's wrappers, and the backend's own.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.compare import Ratio
from benchmarks.contestant import Elsewhere
from benchmarks.training import BACKENDS

WARM_UP = 200


class TinyModel:
    """A few linear layers under a backend."""

    def __init__(self, backend: str, width: int, layers: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self._compiled = self._model if backend == "eager" else torch.compile(self._model, backend=backend)
        self._x = torch.randn(4, width)

    def turn(self, steps: int) -> float:
        """Microseconds of one of some training steps without an optimiser."""
        started = time.perf_counter()
        for _ in range(steps):
            self._compiled(self._x).sum().backward()
            self._model.zero_grad()
        return (time.perf_counter() - started) / steps * 1e6


def measure(backends: Sequence[str], width: int, layers: int, rounds: int, per_round: int) -> dict[str, list[float]]:
    """Microseconds of a step in each round."""
    processes = {backend: Elsewhere(functools.partial(TinyModel, backend, width, layers)) for backend in backends}
    try:
        for process in processes.values():
            process.ask("turn", WARM_UP)
        times: dict[str, list[float]] = {backend: [] for backend in backends}
        for _ in range(rounds):
            for backend, process in processes.items():
                times[backend].append(process.ask("turn", per_round))
        return times
    finally:
        for process in processes.values():
            process.close()


def ratio(times: dict[str, list[float]], other: str) -> str:
    """ort_training's time by another backend's; with `~` if the difference is within the noise."""
    if not {"ort_training", other} <= times.keys():
        return ""
    found = Ratio.of(times["ort_training"], times[other])
    return f"{'~' if found.within_noise else ''}{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 16], help="linear layers of the model")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--per-round", type=int, default=20)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    arguments = parser.parse_args()
    table = Table(
        title=f"microseconds a step: median of {arguments.rounds} rounds of {arguments.per_round} steps, one thread, torch {torch.__version__}"
    )
    for heading in ("layers", *arguments.backends, "ort_training of aot_eager", "of inductor"):
        table.add_column(heading, justify="right")
    for layers in arguments.layers:
        times = measure(arguments.backends, arguments.width, layers, arguments.rounds, arguments.per_round)
        medians = (f"{statistics.median(values):.0f}" for values in times.values())
        table.add_row(str(layers), *medians, ratio(times, "aot_eager"), ratio(times, "inductor"))
    Console().print(table)


if __name__ == "__main__":
    main()
