"""Causes of recompiles ranked by the seconds that they cost, as text and as data."""

from __future__ import annotations

import collections
import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from ort_backend.guards import journal, records
from ort_backend.guards.events import CompileRecord, LimitHit, from_event
from ort_backend.guards.failures import GuardFailure
from ort_backend.guards.remedies import Remedy, Symptom, break_remedy, limit_remedy, remedy

WIDTH = 140


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """All recompiles of one function because of one thing.

    Attributes:
        function: The function, and `where` it is defined.
        kind: Kind of the failed guards, and their `source`.
        passed_as: The source as the caller writes it, if known.
        count: Recompiles.
        seconds: What they took.
        values: Distinct values seen, the first graph's first.
        called_from: The line that most of the calls came from.
        line: The line that Dynamo guards for, if known.
        guard: Dynamo's words, of the last one.
        steps: Training steps at which it happened, as far as known.
        ranks: Ranks it happened on, empty for one process.
        remedy: What to do.
    """

    function: str
    where: str
    kind: str
    source: str
    passed_as: str | None
    count: int
    seconds: float
    values: tuple[str, ...]
    called_from: str
    line: str
    guard: str
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    remedy: Remedy

    @property
    def shown_values(self) -> str:
        """`17, 23, 31, ... 40 values`."""
        return compress(self.values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Break:
    """A place where Dynamo cuts a function into several graphs."""

    function: str
    where: str
    reason: str
    remedy: Remedy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the records say; `str()` is the text report."""

    records: tuple[CompileRecord, ...]
    limits: tuple[LimitHit, ...]
    causes: tuple[Cause, ...]
    breaks: tuple[Break, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all compiles."""
        return sum(record.total_seconds for record in self.records)

    @property
    def lost(self) -> float:
        """Seconds of the recompiles."""
        return sum(cause.seconds for cause in self.causes)

    @property
    def recompiles(self) -> int:
        """Recompiles of the process that has the most."""
        counts = collections.Counter((record.rank, record.pid) for record in self.records if record.recompile)
        return max(counts.values(), default=0)

    def __str__(self) -> str:
        return _text(self)

    def to_json(self) -> dict[str, Any]:
        """As plain data: totals, causes, limits, graph breaks."""
        return {
            "compiles": len(self.records),
            "recompiles": self.recompiles,
            "seconds": self.seconds,
            "seconds_lost": self.lost,
            "causes": [dataclasses.asdict(cause) for cause in self.causes],
            "limits": [
                {**dataclasses.asdict(hit), "remedy": dataclasses.asdict(limit_remedy(hit.limit, hit.value, str(hit.cause)))} for hit in self.limits
            ],
            "graph_breaks": [dataclasses.asdict(cut) for cut in self.breaks],
        }


def report() -> Diagnosis:
    """The diagnosis of this process so far; print it."""
    return diagnose(records.all(), records.limits())


def from_journals(paths: Iterable[str]) -> Diagnosis:
    """The diagnosis of guard logs.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is no guard log.
    """
    entries = [from_event(event) for event in journal.read(paths)]
    return diagnose([entry for entry in entries if isinstance(entry, CompileRecord)], [entry for entry in entries if isinstance(entry, LimitHit)])


def diagnose(compiles: Sequence[CompileRecord], limits: Sequence[LimitHit] = ()) -> Diagnosis:
    """Groups recompiles by cause."""
    groups: dict[tuple[str, str, str, str], list[CompileRecord]] = {}
    for record in compiles:
        if record.recompile:
            groups.setdefault(record.cause_key, []).append(record)
    causes = sorted((_cause(group) for group in groups.values()), key=lambda cause: -cause.seconds)
    return Diagnosis(records=tuple(compiles), limits=tuple(limits), causes=tuple(causes), breaks=_breaks(compiles))


def _cause(group: list[CompileRecord]) -> Cause:
    failures = [record.cause or GuardFailure(kind="unknown") for record in group]
    last = failures[-1]
    values = tuple(dict.fromkeys(value for failure in failures for value in (failure.before, failure.now) if value is not None))
    passed_as = next((failure.passed_as for failure in failures if failure.passed_as), None)
    guard = " ".join(dict.fromkeys(failure.guard for failure in failures[-1:]))
    line = next((failure.line for failure in failures if failure.line), "")
    symptom = Symptom(kind=last.kind, expression=passed_as or last.source, values=values, count=len(group), line=line, guard=guard)
    return Cause(
        function=group[0].function,
        where=group[0].where,
        kind=last.kind,
        source=last.source,
        passed_as=passed_as,
        count=len(group),
        seconds=sum(record.total_seconds for record in group),
        values=values,
        called_from=collections.Counter(record.called_from for record in group).most_common(1)[0][0],
        line=line,
        guard=guard,
        steps=tuple(record.step for record in group if record.step is not None),
        ranks=tuple(sorted({record.rank for record in group if record.rank is not None})),
        remedy=remedy(symptom),
    )


def _breaks(compiles: Sequence[CompileRecord]) -> tuple[Break, ...]:
    found = {(record.function, cut.where, cut.reason) for record in compiles for cut in record.graph_breaks}
    return tuple(Break(function=function, where=where, reason=reason, remedy=break_remedy([reason])) for function, where, reason in sorted(found))


def compress(values: Sequence[str], most: int = 4) -> str:
    """`17, 23, 31, ... 40 values`; all of them if there are few."""
    return ", ".join(values) if len(values) <= most else f"{', '.join(values[: most - 1])}, ... {len(values)} values"


def _text(diagnosis: Diagnosis) -> str:
    if not diagnosis.records and not diagnosis.limits:
        return "No compile has been recorded."
    count = sum(record.recompile for record in diagnosis.records)
    functions = len({record.where for record in diagnosis.records})
    lines = [
        f"{counted(len(diagnosis.records), 'compile')} of {counted(functions, 'function')} took {diagnosis.seconds:.1f} s; "
        f"{counted(count, 'recompile')} lost {diagnosis.lost:.1f} s of them."
    ]
    for hit in diagnosis.limits:
        advice = limit_remedy(hit.limit, hit.value, str(hit.cause))
        lines += ["", f"!!! {hit.function} ({hit.where}) RUNS IN EAGER PYTORCH: torch._dynamo.config.{hit.limit} ({hit.value}) was reached."]
        lines += [f"    called from {hit.called_from}", *_remedy(advice, 4)]
    if diagnosis.causes:
        lines += ["", f"{'seconds':>8}  {'count':>5}  cause"]
    for cause in diagnosis.causes:
        lines += _cause_lines(cause)
    if diagnosis.breaks:
        lines += ["", "Graph breaks (each cuts a function into more graphs, and every one of them can recompile)"]
    for cut in diagnosis.breaks:
        lines += [f"{'':>8}  {cut.where or cut.function}", *_wrapped(cut.reason, 17), *_remedy(cut.remedy, 17)]
    return "\n".join(lines)


def _cause_lines(cause: Cause) -> list[str]:
    lines = [f"{cause.seconds:8.1f}  {cause.count:5}  {cause.kind} of {cause.source or 'unknown'} in {cause.function} ({cause.where})"]
    details = [f"values: {cause.shown_values}" if cause.values else ""]
    details.append(f"passed as: {cause.passed_as}" if cause.passed_as and cause.passed_as != cause.source else "")
    details.append(f"called from {cause.called_from}")
    details.append(f"guarded for {cause.line}" if cause.line else "")
    details.append(f"steps: {compress([str(step) for step in cause.steps], 8)}" if cause.steps else "")
    details.append(f"ranks: {', '.join(map(str, cause.ranks))}" if cause.ranks else "")
    lines += [line for detail in details if detail for line in _wrapped(detail, 17)]
    return lines + _remedy(cause.remedy, 17)


def _remedy(advice: Remedy, indent: int) -> list[str]:
    return _wrapped(f"-> {advice.text}", indent) + ([" " * (indent + 7) + advice.code] if advice.code else [])


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 3), break_long_words=False)


def counted(count: int, noun: str) -> str:
    """`1 compile`, `2 compiles`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
