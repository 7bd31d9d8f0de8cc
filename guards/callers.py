"""Who called the compiled function: the user's line, variables, and training step, read when a compile happens."""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import linecache
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ort_backend.guards import recompiles

T = TypeVar("T")

# A loop variable of one of these names, in the caller or a function around it, is taken for the training step.
STEP_NAMES = ("step", "global_step", "step_idx", "batch_idx", "iteration", "iter_num", "batch_index", "it", "i")

_step: contextvars.ContextVar[int | None] = contextvars.ContextVar("step", default=None)


@dataclasses.dataclass(frozen=True)
class Caller:
    """The user's code around a compile.

    Attributes:
        line: `train.py:27 in main: loss = model(batch)`.
        variables: The caller's local variables. Not kept beyond the compile.
        step: The training step, if there is one.
    """

    line: str = "unknown"
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    step: int | None = None


def find_caller() -> Caller:
    """The user's frame that called the compiled function whose compile is under way on this thread."""
    frame = recompiles.call_site()
    if frame is None:
        return Caller(step=_step.get())
    code, text = frame.f_code, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    line = f"{code.co_filename}:{frame.f_lineno} in {recompiles.function_name(code.co_name)}" + (f": {text}" if text else "")
    step = _step.get()
    return Caller(line, _variables(frame), _step_variable(frame) if step is None else step)


def _step_variable(frame: types.FrameType | None) -> int | None:
    """The value of the first name of `STEP_NAMES` that the caller or a function around it has: a `step` far out goes before an `i` near by."""
    around: list[dict[str, Any]] = []
    while frame is not None and len(around) < _MAX_FRAMES:
        if not recompiles.is_torch(frame.f_code.co_filename):
            around.append(_variables(frame))
        frame = frame.f_back
    for name in STEP_NAMES:
        for variables in around:
            value = variables.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


_MAX_FRAMES = 20


def _variables(frame: types.FrameType) -> dict[str, Any]:
    """A copy of a frame's local variables.

    Until Python 3.12 a function's `f_locals` stays with its frame and would keep alive what the user deletes later, so it is emptied, unless
    someone else, such as a `settings = locals()` of the user, has it too.
    """
    shared = frame.f_locals
    variables = dict(shared)
    if isinstance(shared, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(shared) <= _OWN_REFERENCES:
        shared.clear()
    return variables


_OWN_REFERENCES = 3  # the frame's, the variable's, and getrefcount's own


def steps(batches: Iterable[T]) -> Iterator[T]:
    """Numbers the training steps for the report: `for batch in steps(loader)`. Only for loops without a `step` variable of their own."""
    try:
        for number, batch in enumerate(batches):
            _step.set(number)
            yield batch
    finally:
        _step.set(None)
