"""Python's collection of garbage waits while Dynamo compiles for this backend.

Tracing makes a million objects that refer to each other, and nearly all of them live until the compile is over: to go through them again and again
takes a seventh of a compile's time (a GPT of 12 layers, Python 3.11). Dynamo collects once itself when it is done (`run_gc_after_compile`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo import convert_frame


def waits_while_compiling(is_ours: Callable[[Any], bool]) -> None:
    """Makes it so, once, where this torch has the function that compiles a frame and is told the backend (read in 2.13).

    Args:
        is_ours: Whether what Dynamo compiles with is this backend.
    """
    original = getattr(convert_frame, "_compile", None)
    if original is None or hasattr(original, "ort_training_original"):
        return
    parameters = list(inspect.signature(original).parameters)
    if "compiler_fn" not in parameters:
        return
    place = parameters.index("compiler_fn")

    @functools.wraps(original)
    def compile_frame(*args: Any, **options: Any) -> Any:
        if "skip" in options:  # frames of Python above Dynamo's own, which its trace leaves out
            options["skip"] += 1
        backend = args[place] if place < len(args) else options.get("compiler_fn")
        with waiting() if is_ours(backend) else contextlib.nullcontext():
            return original(*args, **options)

    compile_frame.ort_training_original = original  # type: ignore[attr-defined]
    convert_frame._compile = compile_frame


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """No collections meanwhile; a program that has turned them off keeps them off."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
