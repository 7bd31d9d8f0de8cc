"""`with expect_no_recompiles():` for loops that are meant to be warm, and for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ort_backend.errors import OrtBackendError
from ort_backend.guards import records
from ort_backend.guards.diagnosis import Diagnosis, diagnose


class UnexpectedRecompile(OrtBackendError, AssertionError):
    """A function was recompiled, or Dynamo gave up on it, where none of that was expected; `diagnosis` has the causes."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(f"a recompile happened where none was expected.\n{diagnosis}")
        self.diagnosis = diagnosis


@contextlib.contextmanager
def expect_no_recompiles() -> Iterator[None]:
    """Raises at its end if this backend recompiled anything inside, on any thread. First compiles are fine.

    Raises:
        UnexpectedRecompile: with the causes and their remedies.
    """
    compiles, limits = records.all(), records.limits()
    last = compiles[-1].index if compiles else -1
    yield
    inside = [record for record in records.all() if record.index > last]
    gave_up = [hit for hit in records.limits() if hit not in limits]
    if gave_up or any(record.recompile for record in inside):
        raise UnexpectedRecompile(diagnose([record for record in inside if record.recompile] or inside, gave_up))
