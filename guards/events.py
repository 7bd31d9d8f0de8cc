"""What is kept of a compile, in memory and as a line of the guard log."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ort_backend.guards.failures import KINDS, GuardFailure, primary
from ort_backend.guards.recompiles import GraphBreak


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileRecord:
    """One compile of the backend.

    Attributes:
        index: Number of the compile in this process, from 0.
        compile_id: Dynamo's: `"0/1"` is frame 0, second compile.
        attempt: The second number of the compile id.
        function: The user's function; the parts after a graph break carry its name too.
        where: Where the function is defined, `file:line`.
        called_from: The user's line that called it, `file:line in function: text`.
        step: The training step, if the caller has one (see `callers`).
        resumed: Whether it is a part of the function that follows a graph break.
        recompile: Whether the function had a graph of this backend before that did not fit.
        failures: Why each earlier graph did not fit, last used graph first.
        graph_breaks: Where Dynamo cut the function so far.
        seconds: By phase: `dynamo`, `aot`, `lowering`, `session`, and `other` for the rest of the backend. Grows when a backward is
            compiled later.
        graph_report: What the compiler says of the resulting graph, as handed to `Compilation.finish`.
        state: Process-wide settings at the time, such as the grad mode.
        time: When it was finished, seconds since the epoch.
        thread: Name of the thread.
        rank: Rank of the process, None if it is alone.
        pid: Process id.
    """

    index: int
    compile_id: str | None
    attempt: int | None
    function: str
    where: str
    called_from: str
    step: int | None
    resumed: bool
    recompile: bool
    failures: tuple[GuardFailure, ...]
    graph_breaks: tuple[GraphBreak, ...]
    seconds: Mapping[str, float]
    graph_report: Any = None
    state: Mapping[str, str] = dataclasses.field(default_factory=dict)
    time: float = 0.0
    thread: str = ""
    rank: int | None = None
    pid: int = 0

    @property
    def cause(self) -> GuardFailure | None:
        """The failure of the graph that was closest to fitting, None for a first compile."""
        return primary(self.failures) if self.recompile else None

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    @property
    def cause_key(self) -> tuple[str, str, str, str]:
        """What makes two recompiles one cause: function, kind and source, or Dynamo's words where they name none."""
        cause = self.cause
        if cause is None:
            return (self.function, self.where, "unknown", "")
        return (self.function, self.where, cause.kind, cause.guard if cause.kind == "unknown" else cause.source)

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {spent:.2f}" for name, spent in self.seconds.items())
        kind = f"recompiled, {self.cause or 'Dynamo gives no cause'}" if self.recompile else "compiled"
        return f"{kind}: {self.function} ({self.where}) [{self.compile_id}] in {self.total_seconds:.2f} s ({phases}), called from {self.called_from}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitHit:
    """Dynamo gave up on a function: from here on whatever fits none of its graphs runs in eager PyTorch, silently."""

    function: str
    where: str
    called_from: str
    limit: str
    value: int
    cause: GuardFailure | None
    compile_id: str | None
    time: float


def to_event(entry: CompileRecord | LimitHit) -> dict[str, Any]:
    """As a line of the guard log."""
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    kind = "compile" if isinstance(entry, CompileRecord) else "limit"
    return {"event": kind, **fields, "cause": entry.cause}


def from_event(event: Mapping[str, Any]) -> CompileRecord | LimitHit | None:
    """The entry that a line of a guard log holds, None for other lines; unknown fields are left out, missing ones get a plain value."""
    cause = _filled(GuardFailure, event["cause"]) if isinstance(event.get("cause"), dict) else None
    if event["event"] == "limit":
        return _filled(LimitHit, {**event, "cause": cause})
    if event["event"] != "compile":
        return None
    failures = tuple(_filled(GuardFailure, failure) for failure in event.get("failures") or ())
    breaks = tuple(_filled(GraphBreak, cut) for cut in event.get("graph_breaks") or ())
    return _filled(CompileRecord, {**event, "failures": failures, "graph_breaks": breaks})


_EMPTY: dict[str, Any] = {
    "index": -1,
    "seconds": {},
    "failures": (),
    "graph_breaks": (),
    "recompile": False,
    "resumed": False,
    "value": 0,
    "time": 0.0,
}
_OPTIONAL = ("compile_id", "attempt", "step", "cause", "rank", "before", "now", "passed_as", "graph")


def _filled(cls: type[Any], values: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    missing = {
        name: _EMPTY.get(name, None if name in _OPTIONAL else "unknown")
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    given = {name: value for name, value in values.items() if name in fields}
    if "kind" in fields and given.get("kind") not in KINDS:
        given["kind"] = "unknown"
    return cls(**{**missing, **given})
