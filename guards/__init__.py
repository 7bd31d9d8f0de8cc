"""Why Dynamo compiled again, what it cost and what to do about it.

print(ort_backend.guards.report())             # what happened in this process so far
with ort_backend.guards.expect_no_recompiles():
    train_one_epoch()                          # raises if something recompiled
python -m ort_backend.guards run.jsonl         # the same from options={"guard_log": "run.jsonl"}
"""

from __future__ import annotations

from ort_backend.guards.callers import steps
from ort_backend.guards.diagnosis import Cause, Diagnosis, report
from ort_backend.guards.events import CompileRecord, LimitHit
from ort_backend.guards.expectation import UnexpectedRecompile, expect_no_recompiles
from ort_backend.guards.failures import GuardFailure
from ort_backend.guards.remedies import Remedy

__all__ = [
    "Cause",
    "CompileRecord",
    "Diagnosis",
    "GuardFailure",
    "LimitHit",
    "Remedy",
    "UnexpectedRecompile",
    "expect_no_recompiles",
    "report",
    "steps",
]
