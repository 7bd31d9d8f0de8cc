"""What every compile of the backend cost and why it happened: `CompileRecord`, made by a `Compilation`.

The records live in a bounded list and, with `options={"guard_log": ...}`, in a file. Nothing here runs on a step whose guards hold.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ort_backend.guards import journal, recompiles
from ort_backend.guards.callers import Caller, find_caller
from ort_backend.guards.events import CompileRecord, LimitHit, to_event
from ort_backend.guards.failures import GuardFailure, parse, primary
from ort_backend.guards.recompiles import DynamoFrame
from ort_backend.guards.sources import Scope, wrapped

log = logging.getLogger(__name__)

MAX_RECORDS = 1000
WARN_FROM = 3  # recompiles of one cause

_lock = threading.RLock()
_records: collections.deque[CompileRecord] = collections.deque(maxlen=MAX_RECORDS)
_limits: collections.deque[LimitHit] = collections.deque(maxlen=MAX_RECORDS)
_ending: dict[int, list[Compilation]] = {}  # by thread: compilations whose Dynamo part has not ended yet
_guard_logs: dict[str, set[Path]] = {}  # by where a function is defined
# Where and compile id of the backend's own graphs: Dynamo names other backends' graphs of the same function among those that failed.
_own_graphs: collections.deque[tuple[str, str | None]] = collections.deque(maxlen=10 * MAX_RECORDS)
_index = itertools.count()


class Compilation:
    """A compile under way. `phase` times its parts, `finish` publishes its record."""

    def __init__(self, frame: DynamoFrame, details: dict[str, Any], guard_log: Path | None) -> None:
        self._details = details
        self._guard_log = guard_log
        self._seconds: dict[str, float] = {}
        self._nesting = threading.local()
        self._record: CompileRecord | None = None
        self._compile_id = frame.compile_id
        self._started = self._ended = recompiles.now()
        if frame.began is not None:
            self._seconds["dynamo"] = max(0.0, self._started - frame.began)

    @property
    def record(self) -> CompileRecord:
        """The record so far.

        Raises:
            RuntimeError: `finish` has not been called.
        """
        if self._record is None:
            raise RuntimeError("Compilation.record exists after finish()")
        return self._record

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside as `name`; a phase inside another is taken out of the outer one's time.

        It may be entered again after `finish`, on any thread: the backward of a static graph is compiled at the first `.backward()`.
        """
        if not hasattr(self._nesting, "inner"):
            self._nesting.inner = []
        inner: list[float] = self._nesting.inner
        inner.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            own = spent - inner.pop()
            if inner:
                inner[-1] += spent
            self._add(name, own, publish=not inner)

    def finish(self, graph_report: Any = None) -> CompileRecord:
        """Publishes the record, logs it, and writes it to the guard log. To be called once, at the end of the backend's call."""
        self._ended = recompiles.now()
        with _lock:
            phases = sum(spent for name, spent in self._seconds.items() if name != "dynamo")
            self._seconds["other"] = max(0.0, self._ended - self._started - phases)
            record = CompileRecord(index=next(_index), seconds=dict(self._seconds), graph_report=graph_report, time=self._ended, **self._details)
            self._record = record
            _records.append(record)
            _own_graphs.append((record.where, record.compile_id))
            _ending.setdefault(threading.get_ident(), []).append(self)
        log.info("%s", record)
        _warn(record)
        if self._guard_log is not None:
            _guard_logs.setdefault(record.where, set()).add(self._guard_log)
            journal.append(self._guard_log, to_event(record))
        return record

    def _add(self, name: str, seconds: float, publish: bool = True) -> None:
        with _lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._record is None or not publish:
                return
            old, self._record = self._record, dataclasses.replace(self._record, seconds=dict(self._seconds))
            place = next((place for place, record in enumerate(_records) if record.index == old.index), None)
            if place is not None:
                _records[place] = self._record
        if self._guard_log is not None:
            journal.append(self._guard_log, {"event": "seconds", "index": self._record.index, "seconds": self._record.seconds})

    @property
    def function(self) -> str:
        """The user's function and the line where it is defined, known from the start."""
        return f"{self._details['function']} ({self._details['where']})"

    def _dynamo_ended(self, compile_id: str | None) -> None:
        ours = compile_id is None or self._compile_id is None or compile_id == self._compile_id
        if ours and "dynamo" in self._seconds:  # its greater part, the tracing, is known
            self._add("dynamo", max(0.0, recompiles.now() - self._ended))


def start(gm: torch.fx.GraphModule, options: Any) -> Compilation:
    """Opens the record of the compile under way; to be called first thing in the backend.

    Args:
        gm: What Dynamo hands to the backend.
        options: The `CompileOptions`; `guard_log` is what is read of them.
    """
    with _lock:
        earlier = _ending.pop(threading.get_ident(), [])
        recompiles.on_compile_end(_on_compile_end)
        recompiles.on_recompile_limit(_on_recompile_limit)
    frame, caller = recompiles.current_frame(), find_caller()
    for other in earlier:  # another graph of the same compile (a backend may be called per DDP bucket): Dynamo's time counts once
        if frame.began is not None and other._compile_id == frame.compile_id and frame.began < other._started:
            frame = dataclasses.replace(frame, began=other._ended)
    rank, guard_log = recompiles.distributed_rank(), getattr(options, "guard_log", None)
    details = _describe(gm, frame, caller) | {
        "state": recompiles.global_state(),
        "thread": threading.current_thread().name,
        "rank": rank,
        "pid": os.getpid(),
    }
    return Compilation(frame, details, journal.rank_path(guard_log, rank) if guard_log else None)


def _describe(gm: torch.fx.GraphModule, frame: DynamoFrame, caller: Caller) -> dict[str, Any]:
    function, where = _function(gm, frame)
    failures = _failures(frame, caller, where)
    earlier = frame.attempt if frame.graphs is None else frame.graphs
    return {
        "compile_id": frame.compile_id,
        "attempt": frame.attempt,
        "function": recompiles.function_name(function),
        "where": where,
        "called_from": caller.line,
        "step": caller.step,
        "resumed": function != recompiles.function_name(function),
        "recompile": bool(failures) or bool(earlier and not frame.reasons),
        "failures": failures,
        "graph_breaks": recompiles.graph_breaks(gm, frame.code),
    }


def _function(gm: torch.fx.GraphModule, frame: DynamoFrame) -> tuple[str, str]:
    """Name and `file:line` of the user's function."""
    code, name = frame.code, ""
    inner = wrapped(frame.scope)
    if isinstance(inner, torch.nn.Module):
        name, code = f"{type(inner).__name__}.forward", getattr(type(inner).forward, "__code__", code)
    elif inner is not None:
        code = getattr(inner, "__code__", code)
    if code is None:
        stack = list(getattr(getattr(gm, "compile_subgraph_reason", None), "user_stack", None) or [])
        return (stack[0].name, f"{stack[0].filename}:{stack[0].lineno}") if stack else ("unknown", "unknown")
    return name or getattr(code, "co_qualname", code.co_name).replace("<locals>.", ""), f"{code.co_filename}:{code.co_firstlineno}"


def _failures(frame: DynamoFrame, caller: Caller, where: str) -> tuple[GuardFailure, ...]:
    def before(graph: str | None, name: str) -> str | None:
        with _lock:
            matching = (record for record in reversed(_records) if record.where == where and graph in (None, record.compile_id))
            return next((record.state.get(name) for record in matching), None)

    scope = Scope(frame.scope, frame.module_globals, caller.variables)
    failures = (parse(reason, scope, before) for reason in frame.reasons)
    with _lock:
        own = {graph for place, graph in _own_graphs if place == where}
    # Where Dynamo does not say which graph it was, it may be ours if there are any of ours.
    told = tuple(failure for failure in failures if failure.kind != "backend" and own and (failure.graph in own or None in (failure.graph, *own)))
    return _marked(told, where)


def _marked(failures: tuple[GuardFailure, ...], where: str) -> tuple[GuardFailure, ...]:
    """The failures, `met` where one of the other graphs was compiled for the value, as far as earlier failures tell."""
    known: dict[str | None, dict[str, str | None]] = {}  # by graph: the values it was compiled for, by source
    with _lock:
        earlier = [record for record in _records if record.where == where] if len(failures) > 1 else []
    for record in earlier:
        known[record.compile_id] = {failure.source: failure.now for failure in record.failures}
        for failure in record.failures:
            known.setdefault(failure.graph, {})[failure.source] = failure.before
    graphs = {failure.graph for failure in failures} - {None}

    def met(failure: GuardFailure) -> bool:
        return failure.now is not None and any(known.get(graph, {}).get(failure.source) == failure.now for graph in graphs - {failure.graph})

    return tuple(dataclasses.replace(failure, met=met(failure)) for failure in failures)


def _warn(record: CompileRecord) -> None:
    if record.cause is None:
        return
    with _lock:
        same = [other for other in _records if other.cause and other.cause_key == record.cause_key]
    if record.attempt is not None:
        same = same[-max(record.attempt, 1) :]  # not what was compiled before the last `torch._dynamo.reset()`
    if len(same) >= WARN_FROM:
        spent = sum(other.total_seconds for other in same)
        log.warning(
            "%s has recompiled %d times for one cause, %s, and lost %.1f s. Now: %s. Called from %s. ort_backend.guards.report() says what to do.",
            *(record.function, len(same), record.cause.title, spent, record.cause, record.called_from),
        )


def _on_compile_end(*arguments: Any) -> None:
    """Dynamo's callback: without arguments before torch 2.8, with a trigger and a compile id since."""
    trigger = getattr(getattr(arguments[0], "callback_trigger", None), "name", "DYNAMO") if arguments else "DYNAMO"
    if trigger != "DYNAMO":
        return
    with _lock:
        ended = _ending.pop(threading.get_ident(), [])
    for compilation in ended[-1:]:
        compilation._dynamo_ended(getattr(arguments[0], "compile_id", None) if arguments else None)


def _on_recompile_limit(limit: str, value: int, function: str, reason: str) -> None:
    frame, caller = recompiles.current_frame(), find_caller()
    name, where = _function(torch.fx.GraphModule({}, torch.fx.Graph()), frame)
    with _lock:
        known = [record for record in _records if record.where == where]
    if not known:  # a function that another backend compiles
        return
    failures = _failures(frame, caller, where) or (parse(reason, Scope({}, {})),)
    hit = LimitHit(
        function=recompiles.function_name(name),
        where=where,
        called_from=caller.line,
        limit=limit,
        value=value,
        cause=primary(failures),
        compile_id=frame.compile_id,
        time=recompiles.now(),
    )
    with _lock:
        _limits.append(hit)
    log.warning(
        "%s reached torch._dynamo.config.%s (%d): from now on a call that fits none of its graphs runs in EAGER PyTorch, not in ONNX Runtime, "
        "without further notice. Last cause: %s. Called from %s. ort_backend.guards.report() says what to do.",
        *(hit.function, limit, value, hit.cause, hit.called_from),
    )
    for path in _guard_logs.get(where, ()):
        journal.append(path, to_event(hit))


def all() -> tuple[CompileRecord, ...]:
    """The newest records, oldest first."""
    with _lock:
        return tuple(_records)


def limits() -> tuple[LimitHit, ...]:
    """The functions on which Dynamo gave up."""
    with _lock:
        return tuple(_limits)


def clear() -> None:
    """Forgets every record."""
    with _lock:
        _records.clear()
        _limits.clear()
        _ending.clear()
