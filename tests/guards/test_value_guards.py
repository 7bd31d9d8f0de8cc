"""Small programs that recompile because of a Python value or object (see `check`)."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch_version import TORCH

Compile = Callable[..., Callable[..., Any]]
Code = Any  # of conftest
Row = dict  # the arguments of `check`


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def scale(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * k


def branch(x: torch.Tensor, mode: Any) -> torch.Tensor:
    return x * 2 if mode else x + 1


def total(xs: Any) -> torch.Tensor:
    return sum(xs) * 1.0


def apply(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return fn(x) * 2


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.scale = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Color(enum.Enum):
    RED = 1
    BLUE = 2


# Python values and objects


def attribute_value_bad(compile: Compile) -> None:
    model = Scaled()
    f = compile(model)
    for number in (2, 3, 4):
        model.scale = number
        f(torch.ones(1, 2))


def attribute_value_good(compile: Compile, code: Code) -> None:
    model = Scaled()
    last = "3" if TORCH < (2, 7) else "4"
    if TORCH < (2, 5):
        assert code == f"model.scale.fill_({last})  # and self.scale = torch.tensor({last}) in __init__"
        model.scale = torch.tensor(4)
    f = compile(model)
    for number in (2, 3, 4):
        exec(code.replace(last, str(number)))
        f(torch.ones(1, 2))


def attribute_setting_good(compile: Compile, code: Code) -> None:
    """The other way that the remedy names: the second value makes it dynamic."""
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    model = Scaled()
    f = compile(model)
    for number in (2, 3, 4, 5):
        model.scale = number
        f(torch.ones(1, 2))


def float_bad(compile: Compile) -> None:
    f = compile(scale)
    for k in (0.1, 0.2):
        f(torch.ones(2), k)


def float_good(compile: Compile, code: Code) -> None:
    f = compile(scale)
    for k in (0.1, 0.2, 0.3):
        f(torch.ones(2), code.replace("0.2", str(k)).gives("k"))


def string_bad(compile: Compile) -> None:
    f = compile(lambda x, mode: x * 2 if mode == "train" else x + 1)
    f(torch.ones(2), "train")
    f(torch.ones(2), "test")


def train_step(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def eval_step(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def string_good(compile: Compile, code: Code) -> None:
    by_mode = {"train": compile(train_step), "test": compile(eval_step)}
    for mode in ("train", "test", "train"):
        by_mode[mode](torch.ones(2))


def flag_bad(compile: Compile) -> None:
    f = compile(branch)
    f(torch.ones(2), True)
    f(torch.ones(2), False)


def flag_good(compile: Compile, code: Code) -> None:
    by_mode = {True: compile(train_step), False: compile(eval_step)}
    for mode in (True, False, True):
        by_mode[mode](torch.ones(2))


def enum_bad(compile: Compile) -> None:
    f = compile(lambda x, color: x + 1 if color is Color.RED else x - 1)
    f(torch.ones(2), Color.RED)
    f(torch.ones(2), Color.BLUE)


def enum_good(compile: Compile, code: Code) -> None:
    by_color = {Color.RED: compile(train_step), Color.BLUE: compile(eval_step)}
    for color in (Color.RED, Color.BLUE, Color.RED):
        by_color[color](torch.ones(2))


def global_bad(compile: Compile) -> None:
    global FACTOR
    f = compile(lambda x: x * FACTOR)
    for number in (3, 4):
        FACTOR = number
        f(torch.ones(2))


FACTOR: Any = 3


def global_good(compile: Compile, code: Code) -> None:
    global FACTOR
    f = compile(lambda x: x * FACTOR)
    for number in (3, 4, 5):
        FACTOR = code.replace("4", str(number)).gives("FACTOR")
        f(torch.ones(2))
    FACTOR = 3


def adder(amount: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + amount


def closure_bad(compile: Compile) -> None:
    f = compile(apply)
    for amount in (1, 2):
        f(adder(amount), torch.ones(2))


def closure_good(compile: Compile, code: Code) -> None:
    f = compile(apply)
    for amount in (1, 2, 3):
        f(adder(code.replace("2", str(amount)).gives("amount")), torch.ones(2))


def identity_bad(compile: Compile) -> None:
    f = compile(apply)
    for number in range(2):
        scope: dict[str, Any] = {}
        exec(f"def made(x):\n    return x + {number}", scope)
        f(scope["made"], torch.ones(2))


def identity_good(compile: Compile, code: Code) -> None:
    f = compile(apply)
    for _ in range(2):
        f(add_one, torch.ones(2))


def plus(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return x * 2 if mask is None else x + mask


def none_bad(compile: Compile) -> None:
    f = compile(plus)
    mask = torch.zeros(())
    f(torch.ones(2), mask)
    f(torch.ones(2), None)


def none_good(compile: Compile, code: Code) -> None:
    f = compile(plus)
    f(torch.ones(2), torch.zeros(()))
    f(torch.ones(2), code.gives("mask", mask=None))


class SetsItself(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "labels" if x.dim() == 1 else "numbers"
        return x * 2 if self.kind == "labels" else x + 1


def set_late_bad(compile: Compile) -> None:
    model = compile(SetsItself())
    model(torch.ones(2))
    model(torch.ones(2))


def set_late_good(compile: Compile, code: Code) -> None:
    model = SetsItself()
    exec(code, {"model": model})
    f = compile(model)
    f(torch.ones(2))
    f(torch.ones(2))


def type_bad(compile: Compile) -> None:
    f = compile(apply)
    f(torch.nn.ReLU(), torch.ones(2))
    f(torch.nn.Tanh(), torch.ones(2))


def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


def type_good(compile: Compile, code: Code) -> None:
    for f in (compile(relu), compile(tanh)):
        f(torch.ones(2))


def keys_bad(compile: Compile) -> None:
    f = compile(lambda batch: sum(batch.values()) * 1.0)
    f({"a": torch.ones(2), "b": torch.ones(2)})
    batch = {"a": torch.ones(2)}
    f(batch)


def keys_good(compile: Compile, code: Code) -> None:
    f = compile(lambda batch: sum(batch.values()) * 1.0)
    keys = ("a", "b")
    for given in ({"a": torch.ones(2), "b": torch.ones(())}, {"a": torch.ones(2)}):
        f(code.gives("batch", batch=given, KEYS=keys))


def contains_bad(compile: Compile) -> None:
    f = compile(lambda batch: batch["a"] * 2 if "mask" in batch else batch["a"] + 1)
    f({"a": torch.ones(2)})
    f({"a": torch.ones(2), "mask": torch.ones(2)})


def contains_good(compile: Compile, code: Code) -> None:
    f = compile(lambda batch: batch["a"] * batch["mask"] + 1)
    for given in ({"a": torch.ones(2)}, {"a": torch.ones(2), "mask": torch.ones(())}):
        f(code.gives("batch", batch=given, KEYS=("a", "mask")))


def length_bad(compile: Compile) -> None:
    f = compile(total)
    for count in (2, 3):
        xs = [torch.ones(2) for _ in range(count)]
        f(xs)


def length_good(compile: Compile, code: Code) -> None:
    f = compile(lambda xs: xs.sum(0), dynamic=True)
    for count in (2, 3, 4):
        f(code.gives("xs", xs=[torch.ones(7) for _ in range(count)]))


class Late(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if hasattr(self, "ready") else x + 1


def attribute_bad(compile: Compile) -> None:
    model = Late()
    f = compile(model)
    f(torch.ones(2))
    model.ready = True
    f(torch.ones(2))


def attribute_good(compile: Compile, code: Code) -> None:
    model = Late()
    model.ready = True
    f = compile(model)
    f(torch.ones(2))
    f(torch.ones(2))


TABLE: list[dict[str, Any]] = [
    Row(
        bad=attribute_value_bad,
        good=attribute_value_good,
        kind="python value",
        source="self.scale",
        before="3",
        now="4",
        passed_as="model.scale",
        older=((2, 7), {"before": "2", "now": "3"}),  # the second value makes it dynamic, as allow_unspec_int_on_nn_module does now
    ),
    Row(
        bad=attribute_value_bad,
        good=attribute_setting_good,
        kind="python value",
        source="self.scale",
        before="3",
        now="4",
        passed_as="model.scale",
        good_compiles=2,
        needs=(hasattr(torch._dynamo.config, "allow_unspec_int_on_nn_module"), "has no allow_unspec_int_on_nn_module"),
    ),
    Row(bad=float_bad, good=float_good, kind="python value", source="k", before="0.1", now="0.2", code="k = torch.tensor(0.2)"),
    Row(bad=string_bad, good=string_good, kind="python value", source="mode", before="'train'", now="'test'"),
    Row(bad=flag_bad, good=flag_good, kind="python value", source="mode", before="True", now="False"),
    Row(bad=enum_bad, good=enum_good, kind="python value", source="color", before=None, now="Color.BLUE"),
    Row(bad=global_bad, good=global_good, kind="python value", source="FACTOR", before="3", now="4", code="FACTOR = torch.tensor(4)"),
    Row(bad=closure_bad, good=closure_good, kind="closure value", source="amount", before="1", now="2", code="amount = torch.tensor(2)"),
    Row(bad=identity_bad, good=identity_good, kind="object identity", source="fn", before=None, now="made"),
    Row(
        bad=none_bad, good=none_good, kind="type", source="mask", before="Tensor", now="None", code="mask = torch.zeros(()) if mask is None else mask"
    ),
    Row(bad=set_late_bad, good=set_late_good, kind="type", source="self.kind", before="None", now="'labels'", code="model.kind = 'labels'"),
    Row(
        bad=type_bad,
        good=type_good,
        kind="type",
        source="fn",
        before="ReLU",
        now="Tanh",
        needs=(TORCH >= (2, 5), "does not tell which module it compiled for"),
    ),
    Row(bad=keys_bad, good=keys_good, kind="dict keys", source="batch.keys()", before="2 keys", now="['a']"),
    Row(
        bad=contains_bad,
        good=contains_good,
        kind="dict keys",
        source="'mask' in batch",
        before="absent",
        now="present",
        older=((2, 7), {"source": "batch.keys()", "before": "1 key", "now": "['a', 'mask']"}),  # guards on the whole dict
    ),
    Row(bad=length_bad, good=length_good, kind="length", source="len(xs)", before="2", now="3", code="xs = torch.stack(tuple(xs))"),
    Row(bad=attribute_bad, good=attribute_good, kind="attribute", source="self.ready", before="absent", now="present", passed_as="model.ready"),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["bad"].__name__.removesuffix("_bad"))
def test_record_and_remedy(row: dict[str, Any], check: Callable[..., None]) -> None:
    check(**row)
