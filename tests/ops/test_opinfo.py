"""Every operator of PyTorch's own operator database: forward and backward on ONNX Runtime against eager.

`ORT_TRAINING_OPINFO=all` runs all operators with more samples; without it, those that training uses, with two samples each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ops.expectations import GAPS, NOT_COMPARABLE, NOT_IN_CI, OTHER_DTYPES, PYTHON_FAMILIES, RARE_GAPS, TOLERANCES, WITHOUT_EMPTY, family_of
from ops.opinfo import run, samples
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

ALL = os.environ.get("ORT_TRAINING_OPINFO") == "all"


def _name(info: OpInfo) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def _cases() -> Iterator[Any]:
    for info in op_db:
        name = _name(info)
        if family_of(name, NOT_COMPARABLE):
            continue
        in_ci = not family_of(name, NOT_IN_CI) and name not in GAPS
        for dtype in (torch.float32, *OTHER_DTYPES.get(name, ())):
            if (ALL or in_ci) and dtype in info.supported_dtypes("cpu"):
                yield pytest.param(info, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("info", "dtype"), list(_cases()))
@pytest.mark.filterwarnings("ignore")
def test_operator(info: OpInfo, dtype: torch.dtype) -> None:
    name = _name(info)
    outside: set[str] = set()
    for sample in samples(info, dtype, 8 if ALL else 2):
        if name in WITHOUT_EMPTY and sample.input.numel() == 0:
            continue
        outcome = run(info, sample)
        _compare(name, dtype, outcome.actual, outcome.expected)
        outside.update(outcome.outside)
        assert outcome.onnx_nodes + len(outcome.outside) > 0, f"nothing reached ONNX Runtime: {sample}"
    if name in GAPS:
        assert outside, f"{name} runs on ONNX Runtime now: take it out of GAPS"
    elif name not in RARE_GAPS and not family_of(name, PYTHON_FAMILIES):
        assert not outside, f"not on ONNX Runtime: {sorted(outside)}"


def _compare(name: str, dtype: torch.dtype, actual: list[Any], expected: list[Any]) -> None:
    rtol, atol = TOLERANCES.get(name, {}).get(dtype) or _DEFAULT.get(dtype, (0.0, 0.0))
    for mine, theirs in zip(actual, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert mine == theirs


_DEFAULT = {
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-7, 1e-7),
    # Half precision is computed in float32 and rounded once; eager rounds every step.
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
}


@pytest.mark.skipif(not ALL, reason="ORT_TRAINING_OPINFO=all looks at every name")
def test_expectations_are_about_operators_that_exist() -> None:
    names = {_name(info) for info in op_db}
    for table in (GAPS, RARE_GAPS, TOLERANCES, OTHER_DTYPES, WITHOUT_EMPTY):
        assert set(table) <= names, set(table) - names
