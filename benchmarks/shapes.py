"""Thirty sequence lengths in a row: how often each backend compiles, and what it all takes.

    python -m benchmarks.shapes

Each backend in a fresh process with empty caches: a GPT of two layers trains one step at each length, in a shuffled order, then a second
time. Dynamo makes the length dynamic by itself at its second value.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import process
from benchmarks.models import gpt
from benchmarks.training import BACKENDS, import_backend

LENGTHS = tuple(range(20, 140, 4))


def sweep(backend: str, lengths: list[int], dynamic: bool | None) -> dict[str, Any]:
    """Trains one step at each length, twice over.

    Returns:
        `import_seconds`; `seconds` and `compiles` of each pass; `losses`.
    """
    torch.manual_seed(0)
    model, _ = gpt(2, 128, 4, max(lengths))
    imports = import_backend(backend)
    compiled = model if backend == "eager" else torch.compile(model, backend=backend, dynamic=dynamic)
    generator = torch.Generator().manual_seed(0)
    result: dict[str, Any] = {"import_seconds": imports, "seconds": [], "compiles": [], "losses": []}
    for _ in range(2):
        before, started = _compiles(), time.perf_counter()
        for length in lengths:
            tokens = torch.randint(3, 2000, (4, length), generator=generator)
            model.zero_grad()
            loss = compiled(tokens, tokens)
            loss.backward()
            result["losses"].append(loss.item())
        result["seconds"].append(time.perf_counter() - started)
        result["compiles"].append(_compiles() - before)
    return result


def _compiles() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--dynamic", choices=("default", "yes", "no"), default="default", help="torch.compile's dynamic=None, True, False")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    lengths = list(LENGTHS)
    random.Random(0).shuffle(lengths)
    dynamic = {"default": None, "yes": True, "no": False}[arguments.dynamic]
    found = {}
    for backend in track(arguments.backends, description="training"):
        try:
            found[backend] = process.call(sweep, threads=arguments.threads, timeout=1800.0, backend=backend, lengths=lengths, dynamic=dynamic)
        except process.ProcessError as error:
            found[backend] = {"error": str(error)}

    console = Console()
    table = Table(title=f"{len(lengths)} sequence lengths, one step each, twice over; seconds")
    for heading in ("backend", "compiles", "first pass", "compiles", "second pass", "loss apart"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for backend, one in found.items():
        if "error" in one:
            console.print(f"{backend}: {one['error']}", style="red")
            continue
        apart = max(abs(a - b) for a, b in zip(one["losses"], found.get("eager", one)["losses"], strict=True))
        seconds = one["seconds"][0] + one["import_seconds"], one["seconds"][1]
        table.add_row(backend, str(one["compiles"][0]), f"{seconds[0]:.1f}", str(one["compiles"][1]), f"{seconds[1]:.2f}", f"{apart:.0e}")
    console.print(table)


if __name__ == "__main__":
    main()
