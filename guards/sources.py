"""Sources and values as the user writes them: `batch["input_ids"].size(1)` for `L['batch']['input_ids'].size()[1]`."""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

MAX_VALUE = 80  # characters of a value that a record keeps


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where a source is looked up: the compiled function's locals and globals, and its caller's locals."""

    local: Mapping[str, Any]
    module_globals: Mapping[str, Any]
    caller: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def value(self, source: str) -> Any:
        """What `source` is now.

        Raises:
            LookupError: it cannot be told.
        """
        names = {**self.local, "L": self.local, "G": self.module_globals}
        try:
            return eval(source, {"__builtins__": {"len": len, "dict": dict, "list": list, "hasattr": hasattr, "type": type}}, names)
        except Exception as error:  # it runs the user's own properties, which may raise anything
            raise LookupError(source) from error

    def shown(self, source: str) -> str | None:
        """The value as text, None if it cannot be told."""
        try:
            return self._shown(source)
        except LookupError:
            return None

    def _shown(self, source: str) -> str:
        value = self.value(source)
        try:
            return show(value)
        except Exception as error:  # likewise the user's own __repr__
            raise LookupError(source) from error


def show(value: object, inside: bool = False) -> str:
    """A value in few characters: tensors by dtype and shape, containers one level deep, modules and other objects by class."""
    if isinstance(value, torch.Tensor):
        text = f"{type(value).__name__}({str(value.dtype).removeprefix('torch.')}{list(value.shape)})"
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)):
        text = repr(value)
    elif isinstance(value, enum.Enum):
        text = str(value)
    elif isinstance(value, (list, tuple, set, frozenset)) and type(value) in _BRACKETS and not inside:
        left, right = _BRACKETS[type(value)]
        text = left + ", ".join(show(entry, True) for entry in itertools.islice(value, _MAX_ENTRIES)) + right
    elif isinstance(value, dict) and not inside:
        text = f"keys {show(list(itertools.islice(value, _MAX_ENTRIES)))}"
    elif isinstance(value, type) or callable(value) and not isinstance(value, torch.nn.Module):
        text = getattr(value, "__qualname__", type(value).__name__)
    else:
        text = type(value).__name__
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), frozenset: ("frozenset({", "})")}


def user_source(source: str, scope: Scope) -> str:
    """Dynamo's source as it reads in the user's code: `self._modules['1'].training` is `self[1].training`."""
    text = re.sub(r"\bG\['(\w+)'\]", r"\1", _unwrapped(source, scope))
    text = re.sub(r"([\w.\]\)]+?)\.__closure__\[(\d+)\]\.cell_contents", lambda match: _free_variable(match, scope), text)
    text = re.sub(r"len\((.+)\._modules\)", r"len(\1)", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\d+)'\]", r"[\1]", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]|\.__dict__\['(\w+)'\]", lambda match: f".{match.group(1) or match.group(2)}", text)
    text = re.sub(r"\['([^'\"\\]*)'\]", r'["\1"]', text)
    return sized(text)


def sized(text: str) -> str:
    """`x.size()[1]` as `x.size(1)`."""
    return re.sub(r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)", text)


def _free_variable(match: re.Match[str], scope: Scope) -> str:
    try:
        return str(scope.value(match.group(1)).__code__.co_freevars[int(match.group(2))])
    except (LookupError, AttributeError, IndexError):
        return match.group(0)


def _unwrapped(source: str, scope: Scope) -> str:
    """Undoes the `inner(*args, **kwargs): return fn(*args, **kwargs)` that Dynamo puts around library modules such as Sequential."""
    inner = wrapped(scope.local)
    if inner is None:
        return source
    try:
        called = inner.forward if isinstance(inner, torch.nn.Module) else inner
        names = [name for name in inspect.signature(called).parameters if name not in ("args", "kwargs")]
    except (TypeError, ValueError):
        names = []
    itself = "self" if isinstance(inner, torch.nn.Module) else getattr(inner, "__name__", "fn")
    text = re.sub(r"\bkwargs\['(\w+)'\]", r"\1", re.sub(r"\bfn\b", itself, source))
    return re.sub(r"\bargs\[(\d+)\]", lambda match: names[int(match.group(1))] if int(match.group(1)) < len(names) else match.group(0), text)


def wrapped(local: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What Dynamo's `inner(*args, **kwargs)` calls, if that wrapper is the compiled frame: a library module, or a function without a file."""
    inner = local.get("fn")
    without_file = getattr(getattr(inner, "__code__", None), "co_filename", "").startswith("<")
    return inner if set(local) == {"fn", "args", "kwargs"} and (isinstance(inner, torch.nn.Module) or without_file) else None


def passed_as(source: str, scope: Scope) -> str | None:
    """`source` with the caller's expression in the place of the argument it starts from."""
    match = re.search(r"\b(args\[\d+\]|kwargs\['\w+'\]|[A-Za-z_]\w*(?:\['[^']*'\]|\[\d+\])?)", source)
    if not match or not scope.caller:
        return None
    for root in dict.fromkeys((match.group(1), match.group(1).partition("[")[0])):
        try:
            name = _callers_name(scope.value(root), scope.caller)
        except LookupError:
            continue
        if name:
            return user_source(source.replace(root, name, 1), dataclasses.replace(scope, local=scope.caller))
    return None


def _callers_name(value: Any, caller: Mapping[str, Any]) -> str | None:
    """A caller's variable, or entry of a caller's dict or list, that is the very object `value` (small constants excluded)."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    for name, candidate in caller.items():
        if candidate is value or _compiled_from(candidate) is value:
            return name
    for name, candidate in caller.items():
        for key, entry in _entries(candidate):
            if entry is value and isinstance(key, (str, int)):
                return f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key}]"
    return None


def _compiled_from(candidate: Any) -> Any:
    """The module that `torch.compile` made an `OptimizedModule` of."""
    return vars(candidate).get("_modules", {}).get("_orig_mod") if isinstance(candidate, torch.nn.Module) else None


def _entries(candidate: Any) -> list[tuple[Any, Any]]:
    """The first entries of a dict or list; other containers are left alone, for theirs may be read from a disk."""
    if isinstance(candidate, collections.UserDict):  # such as the BatchEncoding of transformers
        candidate = candidate.data
    if isinstance(candidate, dict):
        return list(itertools.islice(dict.items(candidate), _MAX_ENTRIES))
    return list(enumerate(candidate[:_MAX_ENTRIES])) if type(candidate) in (list, tuple) else []


_MAX_ENTRIES = 64
