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
from torch import nn

BACKENDS = ("eager", "aot_eager", "inductor", "ort_training")


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


def measure(steps: dict[str, Callable[[], None]], rounds: int, per_round: int) -> dict[str, float]:
    """Median microseconds of a step, backends interleaved."""
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
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 16], help="linear layers of the model")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--per-round", type=int, default=20)
    parser.add_argument("--backends", nargs="+", default=[name for name in BACKENDS if name != "inductor"], choices=BACKENDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, median of {arguments.rounds} rounds of {arguments.per_round} steps, microseconds per step")
    for layers in arguments.layers:
        torch._dynamo.reset()  # all models are of one class, and Dynamo gives up after a few graphs of one function
        steps = {name: make_step(name, arguments.width, layers) for name in arguments.backends}
        medians = measure(steps, arguments.rounds, arguments.per_round)
        text = "  ".join(f"{name} {value:7.1f}" for name, value in medians.items())
        extra = medians.get("ort_training", 0.0) - medians.get("aot_eager", 0.0)
        print(f"{layers:3d} layers: {text}   ort_training - aot_eager: {extra:+.1f}")


if __name__ == "__main__":
    main()
