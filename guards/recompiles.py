"""What Dynamo knows about the compile under way: the only file that reads its private names.

`tools/torch_versions.py` ran every name under torch 2.4.1, 2.6.0, 2.9.1, 2.11.0, 2.13.0 and 2.15.0; it is the same in all of them unless its line
says otherwise. A name that is gone costs the detail that it gave, never an exception:

| name | gives | without it |
|---|---|---|
| `torch._guards.CompileContext.current_compile_id` | frame and compile id | no id, recompiles told by their failures only |
| frame `_compile` of convert_frame.py: `code`, `locals`, `globals`, `cache_size` | function, values now | the graph's line, no values |
| its `start_time_ns` (2.6 on), `start_time` (2.4: a float of seconds) | Dynamo's seconds | no `dynamo` entry |
| its `reasons` (2.9 on), `torch._dynamo.utils.guard_failures` | which guards failed | no causes |
| `torch._dynamo.utils.graph_break_reasons`, `GraphModule.compile_subgraph_reason` | graph breaks | none reported |
| `torch._dynamo.callback.callback_handler` (callbacks take an argument from 2.8 on) | the end of the compile | `dynamo` without guard building |
| `torch._dynamo.config.inline_inbuilt_nn_modules` (False in 2.4), and whether `config` has a setting | which remedies work | the newest one's |
| log record `torch._dynamo hit config.%s` of logger `torch._dynamo.convert_frame` | the recompile limit | limit not reported |
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_DYNAMO_ROOT = os.path.join(_TORCH_ROOT, "_dynamo") + os.sep
_COMPILE = "_compile"  # of convert_frame.py
_OWN_ROOTS = tuple({os.path.dirname(path) + os.sep for path in (os.path.abspath(__file__), os.path.realpath(__file__))})
_OWN_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_GONE = (AttributeError, ImportError, KeyError, TypeError, IndexError, ValueError)  # how a private name that moved shows


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo cut the user's function into several graphs: the first line of its reason, and where."""

    reason: str
    where: str


@dataclasses.dataclass(frozen=True)
class DynamoFrame:
    """The frame that Dynamo compiles, as far as this torch tells.

    Attributes:
        compile_id: Such as `"0/1"`: frame 0, its second compile.
        attempt: The second number: 0 is the first compile of the frame.
        code: Code object of the user's function.
        scope: The function's arguments and locals now.
        module_globals: The function's globals.
        graphs: How many graphs the function has already; None if unknown.
        reasons: Dynamo's text of the failed guard, one per graph compiled before, last used graph first.
        began: When Dynamo started, in seconds of `time.time()`.
    """

    compile_id: str | None = None
    attempt: int | None = None
    code: types.CodeType | None = None
    scope: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    module_globals: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    graphs: int | None = None
    reasons: tuple[str, ...] = ()
    began: float | None = None


def compile_ids() -> tuple[str | None, int | None]:
    """Compile id (`"0/1"`) and its second number, or None outside a compile."""
    try:
        current = torch._guards.CompileContext.current_compile_id()
        return (None, None) if current is None else (str(current), current.frame_compile_id)
    except _GONE:
        return None, None


def current_frame() -> DynamoFrame:
    """The frame under compilation on this thread."""
    compile_id, attempt = compile_ids()
    compiling = _compile_locals()
    code = compiling.get("code")
    if not isinstance(code, types.CodeType):
        return DynamoFrame(compile_id, attempt)
    graphs = getattr(compiling.get("cache_size"), "num_cache_entries", None)
    return DynamoFrame(
        compile_id=compile_id,
        attempt=attempt,
        code=code,
        scope=_mapping(compiling.get("locals")),
        module_globals=_mapping(compiling.get("globals")),
        graphs=graphs,
        reasons=_reasons(code, compiling, graphs or 0),
        began=_began(compiling),
    )


def _compile_locals() -> Mapping[str, Any]:
    """The locals of the innermost `_compile` in torch's convert_frame.py above us, or nothing."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _COMPILE and frame.f_code.co_filename.endswith("convert_frame.py"):
            return frame.f_locals
        frame = frame.f_back
    return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _reasons(code: types.CodeType, compiling: Mapping[str, Any], count: int) -> tuple[str, ...]:
    reasons = compiling.get("reasons")
    if not isinstance(reasons, list):
        try:
            failures = torch._dynamo.utils.guard_failures
            reasons = failures[code][-count:] if count and code in failures else []
        except _GONE:
            reasons = []
    return tuple(str(reason) for reason in reasons)


def _began(compiling: Mapping[str, Any]) -> float | None:
    nanoseconds, seconds = compiling.get("start_time_ns"), compiling.get("start_time")
    if isinstance(nanoseconds, int):
        return nanoseconds / 1e9
    return seconds if isinstance(seconds, float) else None


def graph_breaks(gm: torch.fx.GraphModule, code: types.CodeType | None) -> tuple[GraphBreak, ...]:
    """The graph breaks known so far in the function that `gm` is a part of, this one's last."""
    try:
        known = list(torch._dynamo.utils.graph_break_reasons)
    except _GONE:
        known = []
    own = getattr(gm, "compile_subgraph_reason", None)
    if own is not None and getattr(own, "graph_break", False) and own not in known:
        known.append(own)
    found: dict[GraphBreak, None] = {}
    for cut in known:
        stack = list(getattr(cut, "user_stack", None) or [])
        if code is None and cut is not own:
            continue
        if code is not None and not any(entry.filename == code.co_filename and same_function(entry.name, code.co_name) for entry in stack[:1]):
            continue
        found[GraphBreak(_first_line(cut), _where(stack))] = None
    return tuple(found)


def same_function(one: str, other: str) -> bool:
    """Whether two names are one function, or parts of it that Dynamo resumes after a graph break."""
    return function_name(one) == function_name(other)


def function_name(name: str) -> str:
    """The user's function behind `torch_dynamo_resume_in_f_at_12`."""
    head, mark, tail = name.rpartition("torch_dynamo_resume_in_")
    return head + tail.rpartition("_at_")[0] if mark and "_at_" in tail else name


def _first_line(cut: object) -> str:
    text = str(getattr(cut, "reason", "")).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    detail = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    return f"{lines[0]}: {detail}" if detail else (lines[0] if lines else "unknown")


def _where(stack: list[traceback.FrameSummary]) -> str:
    return describe_line(user_line(stack)) if stack else ""


def user_line(stack: list[traceback.FrameSummary]) -> traceback.FrameSummary:
    """The innermost entry that is not torch's own code, or the innermost one."""
    return next((entry for entry in reversed(stack) if not is_torch(entry.filename)), stack[-1])


def describe_line(entry: traceback.FrameSummary) -> str:
    """Such as `train.py:12 in forward: y = x * k`."""
    line = f": {entry.line.strip()}" if entry.line and entry.line.strip() else ""
    return f"{entry.filename}:{entry.lineno} in {function_name(entry.name)}{line}"


def is_torch(filename: str) -> bool:
    """Whether a file is part of torch, of this backend, or generated by them, so not the user's."""
    return filename.startswith((_TORCH_ROOT, _OWN_PACKAGE, *_OWN_ROOTS, "<eval_with_key>", "<frozen "))


def call_site() -> types.FrameType | None:
    """The user's frame that called the compiled function. Do not keep it: it keeps the user's variables alive."""
    frame: types.FrameType | None = sys._getframe(1)
    inside = True  # in the backend, which Dynamo calls
    while frame is not None:
        if frame.f_code.co_filename.startswith(_DYNAMO_ROOT):
            inside = False
        elif not inside and not is_torch(frame.f_code.co_filename) and frame.f_code.co_filename != contextlib.__file__:  # as a decorator
            return frame
        frame = frame.f_back
    return None


def global_state() -> dict[str, str]:
    """The process-wide settings that Dynamo guards, by the name that its `GLOBAL_STATE changed` message uses."""
    readers: dict[str, Callable[[], object]] = {
        "grad_mode": lambda: torch.is_grad_enabled(),
        "inference_mode": lambda: torch.is_inference_mode_enabled(),
        "default_dtype": lambda: torch.get_default_dtype(),
        "deterministic_algorithms": lambda: torch.are_deterministic_algorithms_enabled(),
        "num_threads": lambda: torch.get_num_threads(),
        "allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "autocast(cpu)_enabled": lambda: torch.is_autocast_enabled("cpu"),
        "autocast(cuda)_enabled": lambda: torch.is_autocast_enabled("cuda"),
        "autocast(cpu)_dtype": lambda: torch.get_autocast_dtype("cpu"),
        "autocast(cuda)_dtype": lambda: torch.get_autocast_dtype("cuda"),
        "default_device": lambda: torch.get_default_device(),
    }
    state = {}
    for name, read in readers.items():
        try:
            state[name] = str(read())
        except (*_GONE, RuntimeError):
            continue
    return state


def on_compile_end(callback: Callable[..., None]) -> bool:
    """Has Dynamo call `callback` when it ends a compile; again after `torch._dynamo.reset()` has dropped it. False if it cannot."""
    try:
        handler = torch._dynamo.callback.callback_handler
        if callback not in handler.end_callbacks:
            handler.register_end_callback(callback)
        return True
    except _GONE:
        return False


class _LimitFilter(logging.Filter):
    """Sees Dynamo's warning that a recompile limit was hit go by."""

    def __init__(self, callback: Callable[[str, int, str, str], None]) -> None:
        super().__init__()
        self.callback = callback

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and record.msg.startswith("torch._dynamo hit config.%s"):
            limit, value, function, reason, *_ = (*(record.args if isinstance(record.args, tuple) else ()), "", "", "", "")
            self.callback(str(limit), int(value) if isinstance(value, int) else 0, str(function), str(reason))
        return True


def on_recompile_limit(callback: Callable[[str, int, str, str], None]) -> None:
    """Calls `callback(limit name, its value, function, last reason)` when Dynamo gives up on a function and runs it eager."""
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(entry, _LimitFilter) for entry in logger.filters):
        logger.addFilter(_LimitFilter(callback))


def distributed_rank() -> int | None:
    """This process's rank, or None if it is alone."""
    try:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank() if distributed.get_world_size() > 1 else None
    except _GONE:
        pass
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdigit() and world.isdigit() and int(world) > 1 else None


def compares_strides_first() -> bool:
    """Whether Dynamo compares a dimension's stride before the sizes of the dimensions after it, as torch 2.4.1 does and 2.6.0 does not."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 5)


def guards_attributes_by_identity() -> bool:
    """Whether another tensor in a module's attribute is a recompile, as in torch 2.4.1, where modules are not inlined."""
    try:
        return not torch._dynamo.config.inline_inbuilt_nn_modules
    except _GONE:
        return False


def has_setting(name: str) -> bool:
    """Whether `torch._dynamo.config` has it: `allow_unspec_int_on_nn_module` is in 2.9.1 and not in 2.6.0."""
    try:
        return hasattr(torch._dynamo.config, name)
    except _GONE:
        return False


def now() -> float:
    """Seconds on the clock that `DynamoFrame.began` uses."""
    return time.time()
