"""Other torch versions: private names that are gone, and the guard texts that they write.

`tools/torch_versions.py` runs these tests under the versions themselves; here 2.13 meets what the others write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_version import TORCH

from ort_backend import guards
from ort_backend.guards import recompiles, records
from ort_backend.guards.failures import parse
from ort_backend.guards.sources import Scope

Compile = Callable[..., Callable[..., Any]]


class Without:
    """A module, without one dotted name in it."""

    def __init__(self, module: Any, hidden: str) -> None:
        self._module, self._hidden = module, hidden

    def __getattr__(self, name: str) -> Any:
        head, _, rest = self._hidden.partition(".")
        if name != head:
            return getattr(self._module, name)
        if not rest:
            raise AttributeError(name)
        return Without(getattr(self._module, name), rest)


NAMES = [
    "_guards",
    "_guards.CompileContext",
    "_guards.CompileContext.current_compile_id",
    "_dynamo.utils",
    "_dynamo.utils.guard_failures",
    "_dynamo.utils.graph_break_reasons",
    "_dynamo.callback",
    "_dynamo.callback.callback_handler",
    "_dynamo.callback.callback_handler.end_callbacks",
    "_dynamo",
    "distributed",
    "get_default_device",
    "get_autocast_dtype",
    "is_autocast_enabled",
    "backends",
]


def loop(compiled: Compile) -> tuple[guards.CompileRecord, ...]:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print("break")
        return y * 2

    f = compiled(function, dynamic=False)
    for size in (2, 3):
        f(torch.ones(size))
    with torch.no_grad():
        f(torch.ones(3))
    str(guards.report())
    return records.all()


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_torch_name_costs_only_its_detail(name: str, compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompiles, "torch", Without(torch, name))
    everything = loop(compiled)
    assert len(everything) == 6
    assert [record.recompile for record in everything] == [False, False, True, True, True, True]
    told = TORCH >= FRAME_HAS_REASONS or name not in ("_dynamo", "_dynamo.utils", "_dynamo.utils.guard_failures")
    assert (everything[2].cause is not None) == told
    assert not told or everything[2].cause.source == "x.size(0)"


FRAME_HAS_REASONS = (2, 9)  # before, `guard_failures` alone has them, and the number of graphs says how many to take


def test_without_dynamo_s_compile_frame(compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompiles, "_COMPILE", "renamed")
    everything = loop(compiled)
    assert [record.recompile for record in everything] == [False, False, True, True, True, True]  # by the compile id
    assert everything[0].function == "function" and everything[0].called_from.startswith(__file__)
    assert everything[0].cause is None and everything[2].cause is None and "dynamo" not in everything[0].seconds
    assert "unknown" in str(guards.report())


@pytest.mark.parametrize("local", ["code", "locals", "globals", "cache_size", "reasons", "start_time_ns"])
def test_a_missing_local_of_the_compile_frame(local: str, compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    original = recompiles._compile_locals
    monkeypatch.setattr(recompiles, "_compile_locals", lambda: {name: value for name, value in original().items() if name != local})
    everything = loop(compiled)
    assert [record.recompile for record in everything] == [False, False, True, True, True, True]
    if local != "code" and (TORCH >= FRAME_HAS_REASONS or local != "cache_size"):
        assert everything[2].cause is not None and everything[2].cause.source == "x.size(0)" and everything[2].cause.now == "3"
    if local == "start_time_ns":
        assert all("dynamo" not in record.seconds or record.seconds["dynamo"] < 5 for record in everything)


def test_everything_gone(compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompiles, "torch", Without(torch, "_guards"))
    monkeypatch.setattr(recompiles, "_compile_locals", dict)
    everything = loop(compiled)
    assert len(everything) == 6 and everything[0].compile_id is None and not any(record.recompile for record in everything)


def test_callbacks_without_arguments(compiled: Compile) -> None:
    """torch 2.4 and 2.6 call compile callbacks with nothing."""
    compiled(lambda x: x + 1)(torch.ones(2))
    records._on_compile_end()


def test_start_time_of_torch_2_4() -> None:
    assert recompiles._began({"start_time": 12.5}) == 12.5
    assert recompiles._began({"start_time_ns": 2_000_000_000}) == 2.0
    assert recompiles._began({}) is None


BATCH = {"ids": torch.ones(2, 23)}
SCOPE = Scope({"x": torch.ones(2, 23), "batch": BATCH, "k": 3, "flag": False, "d": {"b": 1}, "self": torch.nn.Linear(2, 2)}, {"N": 7})

# Texts that 2.4.0 (no compile id, no stripped `L[...]`), 2.6.0 (`L[...]` with a compile id) and later versions write.
TEXTS = [
    ("tensor 'L['x']' size mismatch at index 1. expected 17, actual 23", "shape of x.size(1): 17 -> 23"),
    ("0/1: tensor 'L['batch']['ids']' size mismatch at index 1. expected 17, actual 23", 'shape of batch["ids"].size(1): 17 -> 23'),
    ("tensor 'L['x']' dtype mismatch. expected Half, actual BFloat16", "dtype of x.dtype: float16 -> bfloat16"),
    ("0/0: tensor 'L['x']' requires_grad mismatch. expected requires_grad=1", "requires_grad of x.requires_grad: True -> False"),
    ("tensor 'L['x']' Tensor device index mismatch. Expected device index to be 0, actual 1", "device of x.device.index: 0 -> 1"),
    ("L['k'] == 2                # return x * k  # train.py:12 in forward", "python value of k: 2 -> 3"),
    ("___check_obj_id(L['flag'], {true})", "python value of flag: True -> False"),
    ("___check_obj_id(L['self'].training, {false})", "training flag of self.training: False -> True"),
    ("___check_type_id(L['k'], 9123)", "type of k: ? -> int"),
    ("___check_type_id(L['k'], {float})", "type of k: float -> int"),
    ("0/0: ___check_type_id(k, 9123), type=<class 'float'>", "type of k: float -> int"),
    ("expected type of 'k' to be <class 'torch.Tensor'>, but found <class 'int'>", "type of k: Tensor -> int"),
    ("0/0: expected type of 'L['k']' to be a tensor type, ' but found <class 'int'>", "type of k: Tensor -> int"),
    ("L['self'].training == False", "training flag of self.training: False -> True"),
    ("list(L['d'].keys()) == ['a']", "dict keys of d.keys(): ['a'] -> ['b']"),
    ("len(L['d']) == 2", "dict keys of d.keys(): 2 keys -> ['b']"),
    ("'a' in L['d']", None),
    ("G['N'] == 6", "python value of N: 6 -> 7"),
    ("Eq(L['x'].size()[1], 17)", "shape condition of x.size(1) == 17: true -> false, x.size(1) = 23"),
    ("Eq(Mod(L['x'].size()[0], 4), 0)", "shape condition of (x.size(0) % 4) == 0: true -> false, x.size(0) = 2"),
    ("11 <= L['x'].size()[0]", "shape condition of 11 <= x.size(0): true -> false, x.size(0) = 2"),
    ("GLOBAL_STATE changed: grad_mode ", None),
    ("___check_global_state()", None),
    ("utils_device.CURRENT_DEVICE == None", None),
    ("Duplicate tensor found where not expected! tensor 'L['x']' is aliased", None),
    ("0/0: Cache line invalidated because L['self'] got deallocated", "deallocated of self"),
    ("GLOBAL_STATE changed: autocast ", None),
    (
        "tensor 'L['x']' dispatch key set mismatch. expected DispatchKeySet(CPU, AutogradCPU), actual DispatchKeySet(CPU, AutogradCPU, AutocastCPU)",
        "global state of autocast(cpu)_enabled: False -> True",
    ),
    ("", None),
    ("something entirely new $$ (", None),
    ("!1/0/2: tensor 'L['x']' rank mismatch. expected 1, actual 2", "rank of x.dim(): 1 -> 2"),
]


def _with_ids(text: str) -> str:
    for name, value in {"{true}": True, "{false}": False, "{float}": float}.items():
        text = text.replace(name, str(id(value)))
    return text


@pytest.mark.parametrize(("text", "read"), TEXTS)
def test_texts_of_other_versions(text: str, read: str | None) -> None:
    failure = parse(_with_ids(text), SCOPE)
    if read is not None:
        assert str(failure) == read
    assert str(failure)


def test_user_s_line_of_a_text_without_a_stack() -> None:
    failure = parse("L['k'] == 2                # return x * k  # train.py:12 in forward", SCOPE)
    assert failure.line == "train.py:12 in forward: return x * k"


def test_a_property_that_raises_is_no_trouble() -> None:
    class Config:
        @property
        def k(self) -> int:
            raise RuntimeError("not now")

    failure = parse("0/0: c.k == 1", Scope({"c": Config()}, {}))
    assert (failure.kind, failure.before, failure.now) == ("python value", "1", None)


class Odd(dict):  # type: ignore[type-arg]
    """What a user may pass, at its worst."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no entries")

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


ODD = [Odd(), [Odd()], None, 3, torch.nn.Linear(2, 2), object(), [[[1]]], "x" * 1000, float("nan"), {1: 2}, BATCH, range(5), type]


def test_no_text_and_no_value_makes_it_raise() -> None:
    """The diagnosis of a compile must not break the compile: all texts on all values, whole and cut anywhere."""
    readings = [_with_ids(text) for text, _ in TEXTS]
    readings += ["0/0: len(x) == 2", "0/0: not x", "0/0: hasattr(x, 'y')", "0/0: ___dict_contains('b', x)", "0/0: list(dict.keys(x))[0] == 'a'"]
    readings += ["0/0: x.__closure__[0].cell_contents == 0", "0/0: CodeGuardAccessor: Not a function on x.__code__", "0/0: x is None"]
    for value in ODD:
        scope = Scope({"x": value, "fn": torch.nn.Linear(2, 2), "args": (value,), "kwargs": {}}, {}, {"mine": value, "all": [value], "odd": Odd()})
        for text in readings:
            for length in {len(text), *range(0, len(text), 7)}:
                str(parse(text[:length], scope))


def test_containers_of_the_caller_that_may_be_on_a_disk_are_not_read() -> None:
    from collections import UserDict
    from collections.abc import Iterator, Mapping

    class OnDisk(Mapping):  # type: ignore[type-arg]
        def __getitem__(self, key: object) -> object:
            raise AssertionError("read")

        def __iter__(self) -> Iterator[object]:
            raise AssertionError("read")

        def __len__(self) -> int:
            raise AssertionError("read")

    x = torch.ones(2, 23)
    failure = parse("tensor 'x' size mismatch at index 1. expected 17, actual 23", Scope({"x": x}, {}, {"disk": OnDisk(), "batch": UserDict(ids=x)}))
    assert failure.passed_as == 'batch["ids"].size(1)'
