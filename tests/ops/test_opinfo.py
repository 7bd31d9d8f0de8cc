"""A fixed part of what `make test-all` runs: every operator of PyTorch's own database in float32, every fourth one in something else too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from behaviours.check import WHOLE_GRAPHS
from default_device import ON_CPU
from ops.expectations import NOT_RUN, TOLERANCES, UNINITIALISED, gap_of, is_run
from ops.judging import KINDS, WRONG, Case, judge

from ort_backend.operator_database import operators

DATABASE = operators()
SAMPLES = 2


def _cases() -> Iterator[Any]:
    others = [(kind, dynamic) for kind in KINDS for dynamic in (False, True) if (kind, dynamic) != ("float32", False)]
    for i, (name, info) in enumerate(DATABASE.items()):
        if is_run(name):
            turn = others[i // 4 % len(others)]
            for kind, dynamic in (("float32", False), *([turn] if i % 4 == 0 else [])):
                case = Case(name, kind, dynamic)
                if case.dtypes(info):
                    yield pytest.param(case, id=str(case))


@pytest.mark.parametrize("case", list(_cases()))
@pytest.mark.filterwarnings("ignore")
def test_operator(case: Case) -> None:
    verdict = judge(case, DATABASE[case.name], SAMPLES)
    assert verdict.kind != WRONG, verdict.detail
    if WHOLE_GRAPHS and ON_CPU:  # between sessions PyTorch also runs what is too little for one; of CUDA's provider no gaps are recorded
        assert not [pair for pair in verdict.outside if gap_of(*pair) is None], "a PythonOp that is no recorded gap"


def test_expectations_are_about_operators_that_exist() -> None:
    assert set(TOLERANCES) | UNINITIALISED <= set(DATABASE)
    assert sum(not is_run(name) for name in DATABASE) >= len(NOT_RUN)
