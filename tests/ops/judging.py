"""Judges one case of the operator database: right on ONNX Runtime, right in part by PythonOp, not for `torch.compile`, or wrong."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from ops.expectations import REFERENCES, TOLERANCES, UNINITIALISED
from ops.opinfo import Results, compiled, in_eager
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.opinfo.core import OpInfo

from ort_backend.operator_database import Sample, samples

# A verdict is one of these.
ON_ORT, AS_PYTHON, NOT_CAPTURED, WRONG = "right, on ONNX Runtime", "right, with PythonOps", "not for torch.compile", "wrong"
NO_SAMPLES = "no samples of this dtype"


# Dtypes that are judged together, as one graph, and how many samples of each there are for one of float32.
KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "float32": (torch.float32,),
    "float64": (torch.float64,),
    "half": (torch.float16, torch.bfloat16),
    "integer": (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    "complex": (torch.complex64, torch.complex128, torch.complex32),
    "other": (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An entry of the operator database, a kind of dtypes, static or dynamic sizes."""

    name: str
    kind: str
    dynamic: bool

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}{'-dynamic' if self.dynamic else ''}"

    def dtypes(self, info: OpInfo) -> list[torch.dtype]:
        """The dtypes of this kind that the operator takes on the CPU."""
        return [dtype for dtype in KINDS[self.kind] if dtype in info.supported_dtypes(torch.get_default_device().type)]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
        case: Which.
        kind: One of the four above.
        outside: (operator, reason) of what ran as `PythonOp`.
        detail: What is wrong, or what `torch.compile` says against the operator.
        seconds: How long it took.
    """

    case: Case
    kind: str
    outside: tuple[tuple[str, str], ...] = ()
    detail: str = ""
    seconds: float = 0.0


def judge(case: Case, info: OpInfo, at_most: int) -> Verdict:
    """Runs up to `at_most` samples of a case as one graph, and compares with eager; where they differ, finds the first sample that does."""
    started = time.perf_counter()
    chosen: list[Sample] = []
    refusal = ""
    for dtype in case.dtypes(info):
        more, refused = _usable(info, dtype, at_most if case.kind == "float32" else max(at_most // 3, 1))
        chosen += more
        refusal = refused or refusal
    kind, outside, detail = _together(case, info, chosen) if chosen else (NOT_CAPTURED, (), refusal or NO_SAMPLES)
    return Verdict(case, kind, outside, detail, time.perf_counter() - started)


def _usable(info: OpInfo, dtype: torch.dtype, at_most: int) -> tuple[list[Sample], str]:
    """Samples that eager PyTorch runs: with gradients, if not so without them; and why there are none, if there are none."""
    refusal = ""
    for gradients in (True, False):
        chosen = samples(info, dtype, at_most, gradients=gradients)
        try:
            in_eager(info.op, chosen)
        except (RuntimeError, ValueError, TypeError) as error:  # NotImplementedError is a RuntimeError
            refusal = f"eager PyTorch fails: {_first_line(error)}"
        else:
            return chosen, ""
    return [], refusal


_Found = tuple[str, tuple[tuple[str, str], ...], str]


def _together(case: Case, info: OpInfo, chosen: list[Sample]) -> _Found:
    """All samples as one graph; one by one if that is not right."""
    found = _found(case, info, chosen)
    if found[0] in (ON_ORT, AS_PYTHON) or len(chosen) == 1:
        return found
    each = [_found(case, info, [sample]) for sample in chosen]
    wrong = next((one for one in each if one[0] == WRONG), None)
    if wrong is not None or found[0] == WRONG:
        return wrong or (WRONG, found[1], f"only with all samples in one graph: {found[2]}")
    captured = [one for one in each if one[0] != NOT_CAPTURED]
    if not captured:
        return found
    outside = tuple(sorted({pair for one in captured for pair in one[1]}))
    return (AS_PYTHON if outside else ON_ORT), outside, f"not for torch.compile: {len(each) - len(captured)} of {len(each)} samples"


def _found(case: Case, info: OpInfo, chosen: Sequence[Sample]) -> _Found:
    expected = in_eager(REFERENCES.get(case.name, info.op), chosen)
    try:
        outcome = compiled(info, chosen, dynamic=case.dynamic)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict
        refusal = _refusal_of_aot_eager(case, info, chosen)
        return (NOT_CAPTURED, (), refusal) if refusal else (WRONG, (), _last_lines(error))
    difference = _difference(case, info, chosen, outcome.results, expected)
    if difference:
        reference = _aot_eager_too(case, info, chosen, expected)
        return (NOT_CAPTURED, (), reference) if reference else (WRONG, outcome.outside, difference)
    if outcome.onnx_nodes + len(outcome.outside) == 0:
        return NOT_CAPTURED, (), "no node reaches a backend"
    return (AS_PYTHON if outcome.outside else ON_ORT), outcome.outside, ""


def _refusal_of_aot_eager(case: Case, info: OpInfo, chosen: Sequence[Sample]) -> str:
    """Why PyTorch's own reference backend cannot run these samples as one graph either; empty if it can."""
    try:
        compiled(info, chosen, dynamic=case.dynamic, backend="aot_eager")
    except Exception as error:  # noqa: BLE001 - likewise
        return f'backend="aot_eager" fails as well: {_first_line(error)}'
    return ""


def _aot_eager_too(case: Case, info: OpInfo, chosen: Sequence[Sample], expected: Results) -> str:
    """How PyTorch's own reference backend differs from eager on these samples; empty if it does not."""
    outcome = compiled(info, chosen, dynamic=case.dynamic, backend="aot_eager")
    difference = _difference(case, info, chosen, outcome.results, expected)
    return f'backend="aot_eager" differs from eager as well: {difference}' if difference else ""


def _difference(case: Case, info: OpInfo, chosen: Sequence[Sample], actual: Results, expected: Results) -> str:
    """The first difference, or an empty string.

    A result equals eager's within the tolerances, or its distance from the result in float64 is within them of eager's own: half precision
    is computed in float32 here and rounded once, eager rounds every step.
    """
    exact: Results | None = None
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        dtype = chosen[i].dtype
        tolerances = tolerance_of(info, case.name, dtype)
        for j, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            message = _unequal(case, one, other, tolerances)
            if message and _is_float(one, other) and dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64):
                exact = in_eager(REFERENCES.get(case.name, info.op), chosen, torch.float64) if exact is None else exact
                message = "" if _as_good(one, other, exact[i][j], tolerances) else message
            if message:
                return f"sample {i} ({chosen[i]}), {_what(j, theirs, other)}: {message}"
    return ""


def _is_float(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.dtype == other.dtype and _has_fractions(one)


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _widest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _what(j: int, theirs: list[Any], other: Any) -> str:
    return f"value {j + 1} of {len(theirs)} (results, then gradients)"


def _unequal(case: Case, one: Any, other: Any, tolerances: tuple[float, float]) -> str:
    if not isinstance(other, torch.Tensor):
        return "" if one == other or (one != one and other != other) else f"{one} and not {other}"
    if not isinstance(one, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return f"{_kind(one)} and not {_kind(other)}"
    if case.name in UNINITIALISED:
        return ""
    try:
        torch.testing.assert_close(one, other, rtol=tolerances[0], atol=tolerances[1], equal_nan=True, check_layout=False)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _as_good(one: torch.Tensor, other: torch.Tensor, exact: Any, tolerances: tuple[float, float]) -> bool:
    """Whether each value is eager's or as near to the exact one as eager's; or all of them are as near, on average and at worst."""
    if not isinstance(exact, torch.Tensor) or exact.shape != other.shape or exact.is_complex() != other.is_complex() or not _has_fractions(exact):
        return False
    one, other = _widest(one), _widest(other)
    mine, theirs = (one - exact).abs(), (other - exact).abs()
    if not exact.is_complex():  # an overflow of eager's excuses no distance from a finite value
        theirs = torch.where(exact.isfinite() & ~other.isfinite(), 0.0, theirs)
    settled = torch.isclose(one, other, rtol=tolerances[0], atol=tolerances[1], equal_nan=True)
    if (settled | (mine <= theirs + tolerances[1] + tolerances[0] * exact.abs())).all():
        return True
    return bool(mine.mean() <= theirs.mean() and mine.max() <= theirs.max())


def tolerance_of(info: OpInfo, name: str, dtype: torch.dtype) -> tuple[float, float]:
    """(rtol, atol): the widest that PyTorch's own tests of this operator use on the CPU, or ours where a row says so."""
    if dtype in TOLERANCES.get(name, {}):
        return TOLERANCES[name][dtype]
    result_like = dtype if dtype.is_floating_point or dtype.is_complex else torch.float32
    rtol, atol = torch.testing._comparison.default_tolerances(result_like)
    for wider in _overrides(info, dtype):
        rtol, atol = max(rtol, wider.rtol), max(atol, wider.atol)
    return rtol, atol


def _overrides(info: OpInfo, dtype: torch.dtype) -> Iterator[Any]:
    for decorator in info.decorators:
        if getattr(decorator, "device_type", None) in (None, torch.get_default_device().type):
            for inner in getattr(decorator, "decorators", ()):
                if isinstance(inner, toleranceOverride) and dtype in inner.d:
                    yield inner.d[dtype]


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next((line for line in str(error).splitlines() if line.strip()), '')}"[:300]


def _last_lines(error: Exception) -> str:
    """The error, and the innermost lines of ours that it came through."""
    ours = [
        f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "ort_backend" in frame.filename
    ]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:700]} [{' '.join(ours[-4:])}]"
