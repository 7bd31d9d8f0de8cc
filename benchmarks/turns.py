"""Processor time of functions that take turns in one process: what other processes disturb least."""

from __future__ import annotations

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


def _timed(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started
