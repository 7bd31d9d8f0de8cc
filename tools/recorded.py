"""A plugin of pytest for a machine that may be taken away: each test's outcome is written as it comes, and tests that have one are left out.

    RECORDED_TO=FILE RECORDED_BEFORE=FILE python -m pytest -p recorded -n 8

Both files hold a JSON object a line: `test`, `outcome` (passed, failed, skipped), `seconds`, `text` (of a failure). With pytest-xdist, which starts
a worker again, a worker ends itself when a test takes longer than `LIMIT`, or leaves an error on the CUDA device that every later test would meet.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_health import device_works
from outcomes import outcomes

LIMIT = 120.0  # seconds
_TEXT = 2500  # characters of a failure
_WORKER = "PYTEST_XDIST_WORKER"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what has an outcome. The file does not change during a run: every worker has to collect the same tests."""
    before = outcomes(Path(os.environ["RECORDED_BEFORE"]))
    items[:] = [item for item in items if item.nodeid not in before]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called for each part of a test; by pytest-xdist also for one whose worker died."""
    if _WORKER in os.environ or (report.when in ("setup", "teardown") and report.passed):
        return
    text = report.longreprtext[-_TEXT:] if report.failed else ""
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "text": text}
    with Path(os.environ["RECORDED_TO"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Around a test."""
    if _WORKER not in os.environ:
        return (yield)
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if not device_works():
            os._exit(70)
