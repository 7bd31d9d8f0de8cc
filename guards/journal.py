"""The `guard_log` file: one JSON object per line, appended as things happen, one file per rank.

A compile is a line at once (`"event": "compile"`), and a later line with the same session and index (`"event": "seconds"`) when more
of its time is known: Dynamo's guard building, a backward compiled at the first `.backward()`. A line is one `write` to a file opened for
appending, so a killed process leaves at most its last line cut short, which the reader skips.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SESSION = f"{os.getpid()}-{time.time_ns():x}"

# What a warning has said already.
_warned: set[str] = set()


def rank_path(path: str | os.PathLike[str], rank: int | None) -> Path:
    """`run.jsonl`, or `run.rank3.jsonl` where there are several ranks."""
    file = Path(path)
    return file if rank is None else file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


def session() -> str:
    """The name of this process in a journal; a fork is another process."""
    return SESSION if SESSION.startswith(f"{os.getpid()}-") else f"{os.getpid()}-{SESSION}"


def append(path: Path, event: Mapping[str, Any]) -> None:
    """Adds one line. A journal that cannot be written is a warning, once for each path and cause, and does not stop the training."""
    line = json.dumps({"session": session(), **event}, default=_plain, separators=(",", ":")) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        if (said := f"{path}: {error}") not in _warned:
            _warned.add(said)
            log.warning('the option guard_log="%s" cannot be written: %s', path, error)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)


def read(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """The events of several journals in order of time, `seconds` merged into their `compile`; lines cut short are left out.

    A path that does not exist stands for its rank files: `run.jsonl` for `run.rank0.jsonl`, `run.rank1.jsonl`, ...

    Raises:
        FileNotFoundError: neither the path nor rank files of it exist.
        ValueError: a file has lines, and none of them is an event: it is another file.
    """
    events: list[dict[str, Any]] = []
    compiles: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        for file in _files(Path(path)):
            text = file.read_text(encoding="utf-8", errors="replace")
            parsed = [_parsed(line) for line in text.splitlines()]
            if "\n" in text and not any(parsed):  # the first line is whole
                raise ValueError(f'{file} is no file that options={{"guard_log": ...}} wrote: none of its lines is an event')
            for event in parsed:
                if event is None:
                    continue
                key = (str(event.get("session")), event.get("index", -1))
                if event["event"] == "seconds":
                    if key in compiles:
                        compiles[key]["seconds"] = event.get("seconds", {})
                    continue
                if event["event"] == "compile":
                    compiles[key] = event
                events.append(event)
    return sorted(events, key=lambda event: event.get("time") or 0.0)


def _files(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    ranks = sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}"))
    if not ranks:
        raise FileNotFoundError(f"no such file: {path}")
    return ranks


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
