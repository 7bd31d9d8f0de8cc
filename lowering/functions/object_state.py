"""What the objects that a user's Function gets have as attributes, put back after a run whose results nobody is to see."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

# How many objects that are neither modules nor tensors lie between an argument and what is looked at, the last one included: behind a module may be
# all of a program.
_OBJECTS = 2
_FREE = (torch.nn.Module, torch.Tensor)
_CONTAINERS = (dict, list, set, collections.deque)
_LEAVES = (str, bytes, int, float, type, types.ModuleType, weakref.ProxyType, weakref.CallableProxyType)


@contextlib.contextmanager
def put_back(arguments: Sequence[Any]) -> Iterator[None]:
    """Gives objects and containers among the arguments, and modules, tensors and what these have, the attributes and items that they had before.

    A module keeps tables that it made in its first call, counts its calls, assigns buffers; a parameter is given the gradient of each sample.
    """
    kept = [(container, container.copy()) for container in _containers(arguments)]
    try:
        yield
    finally:
        for container, before in kept:
            if not same(container, before):
                container.clear()
                getattr(container, "extend" if isinstance(container, (list, collections.deque)) else "update")(before)


def _containers(arguments: Sequence[Any]) -> Iterator[Any]:
    """Every container that is reached, the dictionaries of attributes among them."""
    waiting: list[tuple[Any, int]] = [(one, 0) for one in arguments]
    seen = set()
    while waiting:
        value, objects = waiting.pop()
        if id(value) in seen or issubclass(type(value), _LEAVES):
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            yield value
        following, objects = _following(value, objects)
        waiting.extend((one, objects) for one in following)


def _following(value: Any, objects: int) -> tuple[tuple[Any, ...], int]:
    if isinstance(value, dict):
        return tuple(value.values()), objects
    if isinstance(value, (tuple, *_CONTAINERS)):
        return tuple(value), objects
    if isinstance(value, types.MethodType):
        return (value.__self__,), objects
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords), objects
    if isinstance(value, types.FunctionType):
        return tuple(cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY), objects
    if type(value).__dictoffset__ and (isinstance(value, _FREE) or objects < _OBJECTS):
        return (vars(value),), objects + (not isinstance(value, _FREE))
    return (), objects


_EMPTY = types.CellType()


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What somebody has stored in a tensor's attributes, but for the notes of Dynamo, and of fake tensors about themselves (read in torch 2.13)."""
    stored = {name: value for name, value in vars(tensor).items() if not name.startswith("_dynamo")}
    if isinstance(tensor, FakeTensor):
        stored = {name: value for name, value in stored.items() if not name.startswith(_OF_FAKES) and "_memo" not in name}
    return stored


_OF_FAKES = ("fake_", "_fake_", "real_tensor", "constant", "pytype", "dispatch_keys")


def same(container: Any, before: Any) -> bool:
    """Whether a container holds the objects that another one of its kind does."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(key is other and one is two for (key, one), (other, two) in zip(container.items(), before.items()))
    return container == before if isinstance(container, set) else all(map(operator.is_, container, before))
