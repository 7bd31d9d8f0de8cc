"""C function pointers, made with ctypes, that ONNX Runtime calls, and what is raised in them before their first line.

A signal that arrives while ONNX Runtime computes (Ctrl-C, a time limit) is handled where Python code runs next: as a callback is entered, where no
`try` of its own holds yet. ctypes hands such an exception to `sys.unraisablehook`, which prints it, and C++ goes on with results that nobody has
written: runs failed for another reason, or the process ended (`free(): invalid pointer`, onnxruntime-training 1.19.2 under Python 3.11).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


class _Kept(threading.local):
    """Of this thread."""

    # The exception raised inside a callback: it cannot cross C++, so it waits here until the run returns.
    error: BaseException | None = None


_kept = _Kept()


def take_error() -> BaseException | None:
    """The exception that a callback raised during the run that just ended on this thread, if any; forgets it."""
    error, _kept.error = _kept.error, None
    return error


def keep_error(error: BaseException) -> None:
    """Keeps what a callback raised until the run on this thread returns."""
    _kept.error = error


# By the address of the function, which lives as long as the process: what is called with its arguments where it could not begin.
_refusals: dict[int, Callable[..., Any]] = {}


def callback(prototype: Any, function: Callable[..., Any], refuse: Callable[..., Any]) -> Any:
    """A C function pointer.

    Args:
        prototype: As `ctypes.CFUNCTYPE` makes it.
        function: What it calls, a Python function with positional arguments alone, which lets no exception out.
        refuse: Called with the same arguments where something was raised before the first line of `function`. It writes results that make ONNX
            Runtime end the run.
    """
    _refusals[id(function)] = refuse
    return prototype(function)


class _Hook:
    """In the place of `sys.unraisablehook`, in front of the one that was there."""

    def __init__(self, behind: Callable[[Any], Any]) -> None:
        self._behind = behind

    def __call__(self, unraisable: Any) -> None:
        function = unraisable.object
        refuse = _refusals.get(id(function))
        if refuse is None or unraisable.exc_traceback is None:
            self._behind(unraisable)
            return
        keep_error(unraisable.exc_value)
        code, values = function.__code__, unraisable.exc_traceback.tb_frame.f_locals
        refuse(*(values[name] for name in code.co_varnames[: code.co_argcount]))


def watch() -> None:
    """Keeps such exceptions as `keep_error` does. Others, such as pytest, put hooks of their own in the place of this one: so it is called before
    each run.
    """
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
