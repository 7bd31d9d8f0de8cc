"""Cost of one call on a tiny model, forward and backward: what the backend's own Python adds to `aot_eager`'s.

    python -m benchmarks.overhead

One thread. Backends take turns in every round; the figure is the median over the rounds. The tiny model's arithmetic takes a few
microseconds, so that what is left is the cost of calling: AOTAutograd's wrappers, which all backends share, and the backend's own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.compare import Ratio
from benchmarks.training import BACKENDS


def make_step(backend: str, width: int, layers: int) -> Callable[[], None]:
    """One training step without an optimiser."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    compiled = model if backend == "eager" else torch.compile(model, backend=backend)
    x = torch.randn(4, width)

    def step() -> None:
        compiled(x).sum().backward()
        model.zero_grad()

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int, per_round: int) -> dict[str, list[float]]:
    """Microseconds of a step in each round, backends interleaved."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(20):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(per_round):
                step()
            times[name].append((time.perf_counter() - started) / per_round * 1e6)
    return times


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
    torch.set_num_threads(1)
    table = Table(
        title=f"microseconds a step: median of {arguments.rounds} rounds of {arguments.per_round} steps, one thread, torch {torch.__version__}"
    )
    for heading in ("layers", *arguments.backends, "ort_training of aot_eager", "of inductor"):
        table.add_column(heading, justify="right")
    for layers in arguments.layers:
        torch._dynamo.reset()  # all models are of one class, and Dynamo gives up after a few graphs of one function
        times = measure({name: make_step(name, arguments.width, layers) for name in arguments.backends}, arguments.rounds, arguments.per_round)
        medians = (f"{statistics.median(values):.0f}" for values in times.values())
        table.add_row(str(layers), *medians, ratio(times, "aot_eager"), ratio(times, "inductor"))
    Console().print(table)


if __name__ == "__main__":
    main()
