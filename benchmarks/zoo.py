"""The zoo: one training step of many small models, each compared with eager PyTorch, with static sizes and with changing ones.

    python -m benchmarks.zoo                            # everything
    python -m benchmarks.zoo --only gpt2 attention      # by name or by family
    python -m benchmarks.zoo --list
    python -m benchmarks.zoo --json zoo.json
    python -m benchmarks.zoo --checkpointed --static    # with torch.utils.checkpoint around their blocks

Loss, every gradient, every buffer and the random state must equal eager's from one seed, dropout on. Each workload runs in a process of
its own, so that one that ends it is counted as broken. The exit status is 1 if any is wrong or broken.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch comes in: its pool of threads is slow on small machines

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.zoo_models import WORKLOADS, Workload, checkpointed
from benchmarks.zoo_process import run
from benchmarks.zoo_step import Call, Result

CHAOTIC = "Chaotic: gradients differ by what rounding eager's parameters otherwise changes in eager's own."


def choose(wanted: Sequence[str]) -> list[Workload]:
    """The workloads of these names and families (a family also by the beginning of its name); all without any.

    Raises:
        SystemExit: there is no such name or family.
    """
    chosen = []
    for word in wanted:
        found = [WORKLOADS[word]] if word in WORKLOADS else [one for one in WORKLOADS.values() if one.family.startswith(word)]
        if not found:
            raise SystemExit(f"no workload and no family is called {word!r}; --list names them")
        chosen += [one for one in found if one not in chosen]
    return chosen or list(WORKLOADS.values())


def measure(workloads: Sequence[Workload], mode: str, jobs: int, console: Console, file: Path | None = None) -> list[Result]:
    """Runs them under a progress bar; results in the order of the workloads. `file` gets those so far after each."""
    results: dict[str, Result] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("zoo", total=len(workloads))
        for result in run(workloads, mode, jobs):
            results[result.name] = result
            progress.update(task, advance=1, description=result.name)
            for line in _problems(result):
                progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            if file is not None:
                file.write_text(json.dumps([dataclasses.asdict(results[one.name]) for one in workloads if one.name in results], indent=1))
    return [results[workload.name] for workload in workloads]


def _problems(result: Result) -> list[str]:
    if result.broken:
        return [f"{result.name} broken: {result.broken}"]
    calls = [(f"{result.name} ({call.batch}, {call.length})", call.problems) for call in result.calls if call.problems]
    return [
        f"{where}: {text}" for where, problems in calls for text in (*problems[:4], *([f"... {len(problems)} in all"] if len(problems) > 4 else []))
    ]


def table(results: Iterable[Result]) -> Table:
    """A row for each workload."""
    made = Table(title="the zoo", caption="compiles: for each call. Nodes: of the static graphs + of those compiled afterwards.\n" + CHAOTIC)
    for heading in ("workload", "family", "static", "dynamic"):
        made.add_column(heading)
    for heading in ("compiles", "breaks", "on ORT", "PythonOps", "seconds"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("by operator", overflow="fold")
    for one in results:
        if one.skipped:
            made.add_row(one.name, one.family, one.skipped)
            continue
        words = ("[red]broken", "[red]broken") if one.broken else (_word(one.static), _word(one.dynamic))
        compiles, breaks = (
            (" ".join(str(value) for value in values) for values in zip(*((c.compiles, c.breaks) for c in one.calls))) if one.calls else ("", "")
        )
        python = _operators([one])
        halves = (one.static, one.dynamic)
        nodes = (" + ".join(str(count(half)) for half in halves) for count in (_on_ort, _python))
        made.add_row(one.name, one.family, *words, compiles, breaks, *nodes, f"{sum(c.seconds for c in one.calls):.1f}", _listed(python))
    return made


def totals(results: Sequence[Result]) -> Table:
    """A row for each family, and one for all: right, wrong, broken, and the part of the nodes that are `PythonOp`s."""
    made = Table(title="totals", caption="% of the ONNX nodes (of the FX nodes). Right: static, dynamic.")
    made.add_column("family")
    for heading in ("workloads", "right", "wrong", "broken", "skipped", "nodes", "PythonOps", "%"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("by operator", overflow="fold")
    families = dict.fromkeys(one.family for one in results)
    for family in families:
        _add_total(made, family, [one for one in results if one.family == family])
    made.add_section()
    _add_total(made, "all", results)
    return made


def _add_total(made: Table, name: str, results: Sequence[Result]) -> None:
    calls = [call for one in results for call in one.calls]
    nodes, fx_nodes, python = sum(c.nodes for c in calls), sum(c.fx_nodes for c in calls), _python(calls)
    right = [sum(bool(half) and not any(c.problems for c in half) for half in halves) for halves in zip(*((r.static, r.dynamic) for r in results))]
    percent = f"{100 * python / max(nodes, 1):.2f} ({100 * python / max(fx_nodes, 1):.2f})"
    counted = (" ".join(map(str, right)), *(str(sum(bool(getattr(r, what)) for r in results)) for what in ("wrong", "broken", "skipped")))
    made.add_row(name, str(len(results)), *counted, str(nodes), str(python), percent, _listed(_operators(results)))


def _word(calls: Sequence[Call]) -> str:
    if not calls or any(call.problems for call in calls):
        return "[red]wrong" if calls else ""
    return "[green]right, but chaotic" if any(call.ill_conditioned for call in calls) else "[green]right"


def _python(calls: Iterable[Call]) -> int:
    return sum(sum(call.python_ops.values()) for call in calls)


def _on_ort(calls: Sequence[Call]) -> int:
    return sum(call.nodes for call in calls) - _python(calls)


def _operators(results: Iterable[Result]) -> collections.Counter[str]:
    counted: collections.Counter[str] = collections.Counter()
    for result in results:
        for call in result.calls:
            counted.update(call.python_ops)
    return counted


def _listed(operators: collections.Counter[str]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in operators.most_common())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="workloads or families")
    parser.add_argument("--list", action="store_true", help="names the workloads and ends")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the results, too")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--checkpointed", action="store_true", help="the backward computes the blocks of each model again")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--static", dest="mode", action="store_const", const="static", default="both", help="the first size only")
    which.add_argument("--dynamic", dest="mode", action="store_const", const="dynamic", help="the other sizes only, under dynamic=True")
    chosen = parser.parse_args(arguments)
    workloads = choose(chosen.only)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    if chosen.list:
        for one in workloads:
            console.print(f"{one.name:32} {one.family}", highlight=False)
        return 0
    if chosen.checkpointed:
        workloads = [checkpointed.find(one.name + checkpointed.SUFFIX) for one in workloads]
    results = measure(workloads, chosen.mode, chosen.jobs, console, chosen.json)
    console.print(table(results))
    console.print(totals(results))
    return int(any(one.wrong or one.broken for one in results))


if __name__ == "__main__":
    sys.exit(main())
