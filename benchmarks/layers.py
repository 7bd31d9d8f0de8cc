"""Does compile time grow linearly with the number of layers? Cold compiles of GPTs of one width, each in a fresh process with empty caches.

    python -m benchmarks.layers                                    # 6, 12, 24, 48 layers
    python -m benchmarks.layers --backends ort_training --layers 6 12

`exponent` is the slope between the first and the last point on logarithmic scales, without what a model of no layers would take (the imports
and the first trace): 1 is linear.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import measure, process
from benchmarks.models import Workload, gpt
from benchmarks.training import BACKENDS


def compile_gpt(backend: str, layers: int) -> dict[str, Any]:
    """In a fresh process: see `measure.first_steps`."""
    return measure.first_steps(Workload("gpt", "", lambda: gpt(layers, 64, 4, 64)), backend, "cpu", torch.float32)


def outcome(backend: str, layers: int, threads: int) -> dict[str, Any]:
    """`compile_gpt`'s result, or `{"error": ...}`."""
    try:
        return process.call(compile_gpt, threads=threads, timeout=1800.0, backend=backend, layers=layers)
    except process.ProcessError as error:
        return {"error": str(error)}


def line(layers: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares: (seconds of no layers, seconds a layer)."""
    mean_x, mean_y = sum(layers) / len(layers), sum(seconds) / len(seconds)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(layers, seconds)) / sum((x - mean_x) ** 2 for x in layers)
    return mean_y - slope * mean_x, slope


def exponent(layers: Sequence[int], seconds: Sequence[float]) -> float:
    """Of growth: the slope between the outer points on logarithmic scales, above what the first two points give for no layers."""
    fixed, _ = line(layers[:2], seconds[:2])
    first, last = seconds[0] - fixed, seconds[-1] - fixed
    return math.log(last / first) / math.log(layers[-1] / layers[0]) if min(first, last) > 0 else math.nan


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--backends", nargs="+", default=[name for name in BACKENDS if name != "eager"], choices=BACKENDS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    jobs = [(backend, layers) for backend in arguments.backends for layers in arguments.layers]
    found = {job: outcome(*job, arguments.threads) for job in track(jobs, description="compiling")}

    table = Table(title="cold compile of a GPT, seconds (lowering + session, where it is ours)")
    for heading in ("backend", *(f"{layers} layers" for layers in arguments.layers), "a layer", "exponent"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for backend in arguments.backends:
        results = [found[backend, layers] for layers in arguments.layers]
        seconds = [one.get("compile_seconds", math.nan) for one in results]
        _, slope = line(arguments.layers, seconds) if len(seconds) > 1 else (0.0, math.nan)
        growth = exponent(arguments.layers, seconds) if len(seconds) > 2 else math.nan
        table.add_row(backend, *(_cell(one) for one in results), f"{slope:.2f}", f"{growth:.2f}")
    console = Console()
    console.print(table)
    for (backend, layers), one in found.items():
        if "error" in one:
            console.print(f"{backend}, {layers} layers: {one['error']}", style="red")


def _cell(result: dict[str, Any]) -> str:
    if "error" in result:
        return "ERROR"
    own = result["details"].get("lowering_seconds"), result["details"].get("session_seconds")
    return f"{result['compile_seconds']:.1f}" + ("" if own[0] is None else f" ({own[0]:.2f} + {own[1]:.2f})")


if __name__ == "__main__":
    main()
