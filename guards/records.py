"""What every compile of the backend cost and why it happened: `CompileRecord`, made by a `Compilation`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

MAX_RECORDS = 1000

_lock = threading.Lock()
_records: collections.deque[CompileRecord] = collections.deque(maxlen=MAX_RECORDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileRecord:
    """One compile of the backend."""

    seconds: dict[str, float]
    graph_report: Any = None


class Compilation:
    """A compile under way; `finish` publishes its record."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.record: CompileRecord | None = None
        self._stack = threading.local()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside as `name`; a phase inside another is taken out of the outer one's time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def finish(self, graph_report: Any = None) -> CompileRecord:
        """Publishes the record."""
        self.record = CompileRecord(seconds=dict(self.seconds), graph_report=graph_report)
        with _lock:
            _records.append(self.record)
        return self.record


def start(gm: Any, options: Any) -> Compilation:
    """A new compilation of `gm`."""
    return Compilation()


def all() -> tuple[CompileRecord, ...]:
    """The newest records, oldest first."""
    with _lock:
        return tuple(_records)


def clear() -> None:
    """Forgets every record."""
    with _lock:
        _records.clear()
