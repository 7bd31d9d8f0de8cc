"""Processor time of functions that take turns in one process: what other processes disturb least."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

WARM_UP = 3


def processor_times(runs: Sequence[Callable[[], Any]], seconds: float, least: int, most: int) -> list[list[float]]:
    """Seconds that each takes, round by round: `least` to `most` rounds, as many as fit into `seconds`, after a warm-up."""
    for run in runs:
        for _ in range(WARM_UP):
            run()
    whole = sum(map(_timed, runs))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(max(least, min(most, int(seconds / whole)))):
        for run, found in zip(runs, times):
            found.append(_timed(run))
    return times


def cell(times: list[float], base: list[float]) -> str:
    """For a table: the median in milliseconds, and behind it the median ratio to what `base` took in the same rounds, unless that is `times`."""
    ratio = "" if times is base else f" ({statistics.median(a / b for a, b in zip(times, base)):.2f})"
    return f"{statistics.median(times) * 1e3:.2f}{ratio}"


def _timed(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started
