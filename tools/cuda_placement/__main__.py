"""Which nodes of the zoo's graphs would not run on a CUDA device, on a machine without one.

    python -m tools.cuda_placement                        # every workload, with fixed sizes and with symbolic ones
    python -m tools.cuda_placement --only gpt2 resnet     # by name or by family
    python -m tools.cuda_placement --sizes fixed --names  # fixed sizes only; names of the nodes as well
    python -m tools.cuda_placement --sizes changing --only swin   # symbolic where they change from batch to batch: all would take PyTorch too long
    python -m tools.cuda_placement --json FILE --resume   # goes on where an earlier run was stopped

Needs the stand-in CUDA libraries (`libraries.py`). Shows placement, never values: nothing runs on a GPU. The exit status is 1 if a session copies
between devices, or computes something else than sizes on the CPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.zoo import choose
from tools.cuda_placement import libraries
from tools.cuda_placement.placement import SIZES, Placed, place

_MARK = "ORT_PLACEMENT_CHILD"
_LIMIT = 600  # seconds for a workload
_PRELOAD = ["tools.cuda_placement.placement", "onnxruntime", "transformers", "ort_backend.compiler"]


def placements(names: Sequence[str], sizes: str) -> Iterator[Placed]:
    """Places workloads one after the other, each in a process of its own. To be called in a process with `libraries.environment()`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    for name in names:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                yield pool.submit(place, name, sizes=sizes).result(timeout=_LIMIT)
            except TimeoutError:
                for process in pool._processes.values():  # the pool's end waits for it (3.14: kill_workers)
                    process.kill()
                yield Placed(name, problem=f"not done in {_LIMIT} s")
            except Exception as error:  # noqa: BLE001  whatever it is, it is this workload's result
                yield Placed(name, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def table(placed: Sequence[Placed], title: str) -> Table:
    """A row for each workload."""
    made = Table(title=title)
    made.add_column("workload")
    for heading in ("sessions", "CUDA", "CPU", "Memcpy", "Python"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("on the CPU; in PyTorch", overflow="fold")
    for one in placed:
        on_cpu, python = (", ".join(f"{name} x{count}" for name, count in some.items()) for some in (one.cpu, one.python))
        numbers = (one.graphs, one.cuda, sum(one.cpu.values()), one.copies, sum(one.python.values()))
        made.add_row(one.name, *map(str, numbers), one.problem or "; ".join(filter(None, (on_cpu, python))))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.cuda_placement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="workloads or families")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the placements, too")
    parser.add_argument("--resume", action="store_true", help="takes over what the JSON file has")
    parser.add_argument("--names", action="store_true", help="prints the names of nodes on the CPU and of copies")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["fixed", "symbolic"], help="default: fixed symbolic")
    chosen = parser.parse_args(arguments)
    names = [one.name for one in choose(chosen.only)]
    if os.environ.get(_MARK) is None:  # the libraries must be there when the process starts
        try:
            environment = libraries.environment()
        except libraries.NotThere as why:
            sys.exit(str(why))
        os.execve(sys.executable, [sys.executable, "-m", "tools.cuda_placement", *(sys.argv[1:])], {**environment, _MARK: "1"})
    console = Console() if sys.stdout.isatty() else Console(width=200)
    progress = Console(stderr=True, width=200)
    found = _before(chosen.json) if chosen.resume else {}
    for sizes in chosen.sizes:
        title = f"{sizes} sizes"
        results = found.setdefault(title, [])
        done = {one.name for one in results}
        for one in placements([name for name in names if name not in done], sizes):
            results.append(one)
            progress.print(f"{title}: {one.name} {_finding(one)} {one.cpu or ''}", highlight=False, markup=False)
            if chosen.names:
                progress.print(*one.names, sep="\n", highlight=False, markup=False)
            if chosen.json is not None:
                chosen.json.write_text(json.dumps({key: [dataclasses.asdict(p) for p in some] for key, some in found.items()}, indent=1))
    for title, results in found.items():
        console.print(table(results, title))
    return int(any(_finding(one) and "not installed" not in one.problem for some in found.values() for one in some))


def _finding(one: Placed) -> str:
    """What is wrong; empty if nothing is."""
    copies, strays = f"{one.copies} Memcpy" if one.copies else "", f"on the CPU: {', '.join(one.strays)}" if one.strays else ""
    return one.problem or ", ".join(filter(None, (copies, strays)))


def _before(file: Path | None) -> dict[str, list[Placed]]:
    if file is None or not file.exists():
        return {}
    return {title: [Placed(**{**one, "names": tuple(one["names"])}) for one in some] for title, some in json.loads(file.read_text()).items()}


if __name__ == "__main__":
    sys.exit(main())
