"""Does compile time grow linearly with the number of layers? Cold compiles of GPTs of one width, each in a fresh process with empty caches.

    python -m benchmarks.layers                                    # 6, 12, 24, 48 layers
    python -m benchmarks.layers --backends ort_training --layers 6 12

Linear means that each further layer costs the same: `a layer` is the cost of one between two columns, `growth` the last of these by the first.
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


def marginal(layers: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Seconds of one more layer, from each number of layers to the next."""
    return [(seconds[i + 1] - seconds[i]) / (layers[i + 1] - layers[i]) for i in range(len(layers) - 1)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--backends", nargs="+", default=[name for name in BACKENDS if name != "eager"], choices=BACKENDS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    jobs = [(backend, layers) for backend in arguments.backends for layers in arguments.layers]
    found = {job: outcome(*job, arguments.threads) for job in track(jobs, description="compiling")}

    table = Table(title="cold compile of a GPT of d = 64, seconds")
    for heading in ("backend", *(f"{layers} layers" for layers in arguments.layers), "a layer", "growth"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for backend in arguments.backends:
        results = [found[backend, layers] for layers in arguments.layers]
        steps = marginal(arguments.layers, [one.get("compile_seconds", math.nan) for one in results])
        growth = f"{steps[-1] / steps[0]:.2f}" if len(steps) > 1 else ""
        slopes = " ".join(f"{step:.2f}" for step in steps)
        table.add_row(backend, *(_cell(one) for one in results), slopes, growth)
    console = Console()
    console.print(table)
    for (backend, layers), one in found.items():
        if "error" in one:
            console.print(f"{backend}, {layers} layers: {one['error']}", style="red")
        elif one["details"]:
            parts = [one["details"][f"{part}_seconds"] for part in ("lowering", "session")]
            share = sum(parts) / one["compile_seconds"]
            console.print(f"{backend}, {layers} layers: lowering {parts[0]:.2f} s, session {parts[1]:.2f} s, together {share:.0%} of the compile")


def _cell(result: dict[str, Any]) -> str:
    return "ERROR" if "error" in result else f"{result['compile_seconds']:.1f}"


if __name__ == "__main__":
    main()
