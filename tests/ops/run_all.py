"""`make test-all`: every operator of PyTorch's operator database, in every dtype, with static and with symbolic sizes.

    python -m ops.run_all [--match REGEX] [--kinds float32,...] [--sizes static] [--samples N] [--workers N] [--json FILE]

ONNX Runtime can bring a process down, so that cases run in processes of their own, a chunk each; the case at which one dies is wrong.
Exit status 1 if a case is wrong, or if what runs as `PythonOp` is not what `expectations.GAPS` says.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ops.expectations import GAPS, NOT_RUN, Gap, gap_of, is_run
from ops.judging import AS_PYTHON, KINDS, NO_SAMPLES, NOT_CAPTURED, ON_ORT, WRONG, Case, Verdict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ort_backend.operator_database import operators

CHUNK = 120
SECONDS_FOR_A_CASE = 240.0

console = Console()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit status."""
    options = _options(arguments)
    verdicts = _run(list(_cases(options)), options)
    _print_summary(verdicts)
    whole = not options.match and options.sizes == "both" and set(options.kinds.split(",")) == set(KINDS)
    return 1 if _print_complaints(verdicts, whole) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ops.run_all", description="Every operator of PyTorch's operator database on ONNX Runtime.")
    parser.add_argument("--match", default="", metavar="REGEX", help="only operators whose name has this")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B", help=f"of dtypes: only these of {', '.join(KINDS)}")
    parser.add_argument("--sizes", choices=("static", "dynamic", "both"), default="both")
    parser.add_argument(
        "--samples", type=int, default=6, metavar="N", help="samples of a case, at most; a third of it where the dtype is not float32"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--json", default="", metavar="FILE", help="write every verdict here, a line each")
    parser.add_argument("--resume", action="store_true", help="keep what that file has already, but for what is wrong in it")
    return parser.parse_args(arguments)


def _kept(options: argparse.Namespace) -> dict[Case, Verdict]:
    """What a run that is resumed has judged already."""
    if not (options.resume and options.json and Path(options.json).exists()):
        return {}
    told = [_verdict(line) for line in Path(options.json).read_text(encoding="utf-8").splitlines()]
    return {one.case: one for one in told if one.kind != WRONG}


def _verdict(line: str) -> Verdict:
    told = json.loads(line)
    return Verdict(Case(**told["case"]), told["kind"], tuple((a, b) for a, b in told["outside"]), told["detail"], told["seconds"])


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Static sizes and float32 first, so that what is broken shows early."""
    database = operators()
    for dynamic in (False, True) if options.sizes == "both" else (options.sizes == "dynamic",):
        for kind in (kind for kind in KINDS if kind in options.kinds.split(",")):
            for name, info in database.items():
                case = Case(name, kind, dynamic)
                if is_run(name) and re.search(options.match, name) and case.dtypes(info):
                    yield case


def _run(cases: Sequence[Case], options: argparse.Namespace) -> list[Verdict]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    kept = _kept(options)
    verdicts = [kept[case] for case in cases if case in kept]
    cases = [case for case in cases if case not in kept]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(options.json, "w", encoding="utf-8")) if options.json else None
        for verdict in verdicts if log is not None else ():
            log.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
        progress = stack.enter_context(Progress(*columns, console=console))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(options.workers))
        task = progress.add_task("operators", total=len(cases))

        def done(verdict: Verdict) -> None:
            verdicts.append(verdict)
            if log is not None:
                log.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
                log.flush()
            if verdict.kind == WRONG:
                progress.console.print(f"[red]wrong[/] {verdict.case}: {verdict.detail}", markup=True, highlight=False, soft_wrap=True)
            wrong = sum(one.kind == WRONG for one in verdicts)
            progress.update(task, advance=1, description=f"operators, {wrong} wrong")

        chunks = [cases[i : i + CHUNK] for i in range(0, len(cases), CHUNK)]
        for future in [pool.submit(_run_chunk, chunk, options.samples, done) for chunk in chunks]:
            future.result()
    return verdicts


def _run_chunk(chunk: Sequence[Case], samples: int, done: Callable[[Verdict], None]) -> None:
    """Judges a chunk; a new process goes on behind a case at which the last one died."""
    left = list(chunk)
    while left:
        judged = 0
        for verdict in _in_a_process(left, samples):
            done(verdict)
            judged += 1
        left = left[judged:]


def _in_a_process(cases: Sequence[Case], samples: int) -> Iterator[Verdict]:
    """The verdicts of one process, which may end early: the last one is then about the case at which it did."""
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as given:
        given.write("".join(json.dumps(dataclasses.asdict(case)) + "\n" for case in cases))
        given.seek(0)
        command = [sys.executable, "-m", "ops.worker", str(samples)]
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1)
        assert process.stdout is not None
        with process.stdout:
            for case in cases:
                started = time.perf_counter()
                begun, line = _next_line(process), ""
                if begun:
                    line = _next_line(process)
                if not line:
                    why = _ended(process, errors.fileno(), timed_out=time.perf_counter() - started > SECONDS_FOR_A_CASE)
                    yield Verdict(case, WRONG, detail=why, seconds=time.perf_counter() - started)
                    return
                yield _verdict(line)
        process.wait()


def _next_line(process: subprocess.Popen[str]) -> str:
    """The next line that the process writes; empty if it ended, or took too long."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], SECONDS_FOR_A_CASE)
    return process.stdout.readline() if ready else ""


def _ended(process: subprocess.Popen[str], errors: int, *, timed_out: bool) -> str:
    """Ends the process if it has not ended; how it did, with the end of what it said."""
    if process.poll() is None and timed_out:
        process.kill()
    code = process.wait()
    with open(errors, encoding="utf-8", errors="replace", closefd=False) as said:
        said.seek(0)
        last = " ".join(said.read()[-600:].split())
    how = "took too long" if timed_out else f"aborted: {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"{how}; {last}"


def _print_summary(verdicts: Sequence[Verdict]) -> None:
    """Cases and operators by verdict. An operator counts where the worst of its cases does."""
    order = (ON_ORT, AS_PYTHON, NOT_CAPTURED, WRONG)
    table = Table(
        title="operators of PyTorch's database on ONNX Runtime, against eager", caption="An operator stands where the worst of its cases does."
    )
    columns = {"float32, static": ("float32",), "floats": ("float32", "float64", "half"), "all dtypes": tuple(KINDS)}
    table.add_column("")
    for heading in (*columns, "cases"):
        table.add_column(heading, justify="right")
    for kind in order:
        counts = []
        for heading, kinds in columns.items():
            worst: dict[str, int] = {}
            for one in verdicts:
                if one.case.kind in kinds and not ("static" in heading and one.case.dynamic) and not _is_vacuous(one):
                    worst[one.case.name] = max(worst.get(one.case.name, 0), order.index(one.kind))
            counts.append(sum(rank == order.index(kind) for rank in worst.values()))
        table.add_row(kind, *map(str, counts), str(sum(one.kind == kind for one in verdicts)))
    console.print(table)
    console.print(
        f"Not run: {len(NOT_RUN)} entries, each with its cause in tests/ops/expectations.py. {sum(one.seconds for one in verdicts):.0f} s of cases."
    )


def _is_vacuous(verdict: Verdict) -> bool:
    return verdict.kind == NOT_CAPTURED and verdict.detail == NO_SAMPLES


def _print_complaints(verdicts: Sequence[Verdict], whole: bool) -> int:
    """Prints the gaps with their causes, and what is wrong; returns how many things are."""
    seen: dict[tuple[str, str], list[Verdict]] = collections.defaultdict(list)
    for verdict in verdicts:
        for pair in verdict.outside:
            seen[pair].append(verdict)
    _print_gaps({gap: [pair for pair in seen if gap_of(*pair) is gap] for gap in GAPS}, seen)
    _print_refusals([verdict for verdict in verdicts if verdict.kind == NOT_CAPTURED and not _is_vacuous(verdict)])
    complaints = [f"wrong: {verdict.case}: {verdict.detail}" for verdict in verdicts if verdict.kind == WRONG]
    for pair, found in seen.items():
        if gap_of(*pair) is None:
            complaints.append(f"not in GAPS: {pair[0]}: {pair[1]} ({len(found)} cases, such as {found[0].case})")
    alone = [Gap(gap.cause, (name,), gap.reason) for gap in GAPS for name in gap.operators] if whole else []
    complaints += [f"stale in GAPS: {one.operators[0]} ({one.cause}) was not seen" for one in alone if not any(one.covers(*pair) for pair in seen)]
    for complaint in complaints:
        console.print(complaint, style="red", markup=False, highlight=False, soft_wrap=True)
    return len(complaints)


def _print_gaps(gaps: dict[Gap, list[tuple[str, str]]], seen: dict[tuple[str, str], list[Verdict]]) -> None:
    table = Table(title="gaps: what runs as PythonOp, and why")
    for heading in ("cause", "operators", "cases"):
        table.add_column(heading, overflow="fold")
    for gap, pairs in gaps.items():
        names = sorted({operator.removeprefix("aten::") for operator, _ in pairs})
        if names:
            shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            table.add_row(gap.cause, shown, str(len({verdict.case for pair in pairs for verdict in seen[pair]})))
    console.print(table)


def _print_refusals(refused: Sequence[Verdict]) -> None:
    table = Table(title="not for torch.compile: as with PyTorch's own reference backend")
    for heading in ("operator", "cases", "why, for instance"):
        table.add_column(heading, overflow="fold")
    for name, count in sorted(collections.Counter(verdict.case.name for verdict in refused).items()):
        table.add_row(name, str(count), next(verdict.detail for verdict in refused if verdict.case.name == name)[:200])
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
