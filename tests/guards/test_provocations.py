"""Small programs that recompile, one per kind of guard: what the record must say, and that its remedy stops it.

`bad` recompiles at its last call; `good` gets the remedy's code and must not recompile at all.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ort_backend import guards
from ort_backend.guards import records

Compile = Callable[..., Callable[..., Any]]


def applied(code: str, name: str, **variables: Any) -> Any:
    """Runs the remedy where the user would write it, and gives the variable it changes."""
    scope = {"torch": torch, **variables}
    exec(code, scope)
    return scope[name]


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def scale(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * k


def branch(x: torch.Tensor, mode: Any) -> torch.Tensor:
    return x * 2 if mode else x + 1


def total(xs: Any) -> torch.Tensor:
    return sum(xs) * 1.0


def of_ids(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["input_ids"] * 2


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


# shape


def shape_bad(compile: Compile) -> None:
    f = compile(of_ids)
    for length in (17, 23):
        batch = {"input_ids": torch.ones(2, length)}
        f(batch)


def shape_good(compile: Compile, code: str) -> None:
    f = compile(of_ids)
    for length in (17, 23, 31):
        batch = {"input_ids": torch.ones(2, length)}
        exec(code)
        f(batch)


def static_shape_bad(compile: Compile) -> None:
    f = compile(of_ids, dynamic=False)
    for length in (17, 23, 31, 47, 61):
        batch = {"input_ids": torch.ones(2, length)}
        f(batch)


def static_shape_good(compile: Compile, code: str) -> None:
    f = compile(of_ids, dynamic=False)
    for length in (17, 23, 31, 47, 61):
        batch = {"input_ids": torch.ones(2, length)}
        exec(code)
        f(batch)


def last_batch_bad(compile: Compile) -> None:
    f = compile(add_one, dynamic=True)
    for size in (4, 1):
        x = torch.ones(size, 3)
        f(x)


def last_batch_good(compile: Compile, code: str) -> None:
    f = compile(add_one, dynamic=True)
    dataset, batch_size = torch.ones(9, 3), 4
    for x in applied(code, "loader", dataset=dataset, batch_size=batch_size):
        f(x)


def by_four(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 4).sum(0) if x.size(0) % 4 == 0 else x.sum() + torch.zeros(4)


def condition_bad(compile: Compile) -> None:
    f = compile(by_four, dynamic=True)
    for size in (16, 5):
        x = torch.ones(size)
        f(x)


def condition_good(compile: Compile, code: str) -> None:
    f = compile(by_four, dynamic=True)
    for size in (16, 5, 9):
        x = applied(code, "x", x=torch.ones(size))
        assert x.size(0) % 4 == 0
        f(x)


def threshold(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.size(0) > 10 else x - 1


def threshold_bad(compile: Compile) -> None:
    f = compile(threshold, dynamic=True)
    for size in (17, 5):
        x = torch.ones(size)
        f(x)


def threshold_good(compile: Compile, code: str) -> None:
    """Decide outside."""
    large, small = (compile(function, dynamic=True) for function in (lambda x: x + 1, lambda x: x - 1))
    for size in (17, 5, 6):
        x = torch.ones(size)
        (large if size > 10 else small)(x)


# other properties of tensors


def rank_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2, 3))
    x = torch.ones(3)
    f(x)


def rank_good(compile: Compile, code: str) -> None:
    f = compile(add_one)
    f(torch.ones(1, 3))
    f(applied(code, "x", x=torch.ones(3)))


def dtype_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    x = torch.ones(2, dtype=torch.float64)
    f(x)


def dtype_good(compile: Compile, code: str) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    f(applied(code, "x", x=torch.ones(2, dtype=torch.float64)))


def device_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    x = torch.ones(2, device="meta")
    f(x)


def device_good(compile: Compile, code: str) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    assert code == 'x = x.to("cpu")'
    f(torch.ones(2))  # a meta tensor has no data to move


def requires_grad_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    f(x)


def requires_grad_good(compile: Compile, code: str) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    f(applied(code, "x", x=torch.ones(2, requires_grad=True)))


def freeze_bad(compile: Compile) -> None:
    model = Scaled()
    f = compile(model)
    x = torch.ones(1, 2)
    f(x)
    model.linear.weight.requires_grad_(False)
    f(x)


def freeze_good(compile: Compile, code: str) -> None:
    model = Scaled()
    f, optimizer = compile(model), torch.optim.SGD(model.parameters(), 1.0)
    before = model.linear.weight.detach().clone()
    for _ in range(2):
        f(torch.ones(1, 2)).sum().backward()
        exec(code)
        optimizer.step()
    assert torch.equal(model.linear.weight, before)


def layout_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2, 3))
    x = torch.ones(3, 2).t()
    f(x)


def layout_good(compile: Compile, code: str) -> None:
    f = compile(add_one)
    f(torch.ones(2, 3))
    f(applied(code, "x", x=torch.ones(3, 2).t()))


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def aliasing_bad(compile: Compile) -> None:
    f = compile(add)
    x, y = torch.ones(2), torch.ones(2)
    f(x, y)
    y = x
    f(x, y)


def aliasing_good(compile: Compile, code: str) -> None:
    f = compile(add)
    x = torch.ones(2)
    f(x, torch.ones(2))
    f(x, applied(code, "y", y=x))


# modes and settings


def grad_mode_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    with torch.no_grad():
        f(torch.ones(2))


def grad_mode_good(compile: Compile, code: str) -> None:
    """One graph for each mode is as it should be: no more than these two come."""
    f = compile(add_one)
    for _ in range(3):
        f(torch.ones(2))
        with torch.no_grad():
            f(torch.ones(2))


def inference_tensor_bad(compile: Compile) -> None:
    f = compile(add_one)
    with torch.inference_mode():
        x = torch.ones(2)
    with torch.no_grad():
        f(torch.ones(2))
        f(x)


def inference_tensor_good(compile: Compile, code: str) -> None:
    f = compile(add_one)
    with torch.inference_mode():
        made = torch.ones(2)
    with torch.no_grad():
        f(torch.ones(2))
        f(applied(code, "x", x=made))


def training_bad(compile: Compile) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    f = compile(model)
    f(torch.ones(1, 2))
    model.eval()
    f(torch.ones(1, 2))


def training_good(compile: Compile, code: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    exec(code)
    f = compile(model)
    f(torch.ones(1, 2))
    model.eval()
    f(torch.ones(1, 2))


def make_zeros(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(2)


def default_dtype_bad(compile: Compile) -> None:
    f = compile(make_zeros)
    f(torch.ones(2))
    torch.set_default_dtype(torch.float64)
    try:
        f(torch.ones(2, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def default_dtype_good(compile: Compile, code: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        f = compile(make_zeros)
        f(torch.ones(2, dtype=torch.float32))
        f(torch.ones(2, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def square(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def autocast_bad(compile: Compile) -> None:
    f = compile(square)
    f(torch.ones(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        f(torch.ones(2, 2))


def autocast_good(compile: Compile, code: str) -> None:
    f = compile(square)
    with torch.autocast("cpu", torch.bfloat16):
        f(torch.ones(2, 2))
        f(torch.ones(2, 2))


def threads_bad(compile: Compile) -> None:
    torch.set_num_threads(1)
    f = compile(add_one)
    f(torch.ones(2))
    torch.set_num_threads(2)
    f(torch.ones(2))


def threads_good(compile: Compile, code: str) -> None:
    torch.set_num_threads(1)
    f = compile(add_one)
    f(torch.ones(2))
    f(torch.ones(2))


def function_mode_bad(compile: Compile) -> None:
    f = compile(make_zeros)
    f(torch.ones(2))
    with torch.device("cpu"):
        f(torch.ones(2))


def function_mode_good(compile: Compile, code: str) -> None:
    f = compile(make_zeros)
    for _ in range(2):
        with torch.device("cpu"):
            x = torch.ones(2)
        f(x)


# Python values and objects


def attribute_value_bad(compile: Compile) -> None:
    model = Scaled()
    f = compile(model)
    for number in (2, 3, 4):
        model.scale = number
        f(torch.ones(1, 2))


def attribute_value_good(compile: Compile, code: str) -> None:
    model = Scaled()
    f = compile(model)
    for number in (2, 3, 4):
        exec(code.replace("4", str(number)))
        f(torch.ones(1, 2))


def attribute_setting_good(compile: Compile, code: str) -> None:
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


def float_good(compile: Compile, code: str) -> None:
    f = compile(scale)
    for k in (0.1, 0.2, 0.3):
        f(torch.ones(2), applied(code.replace("0.2", str(k)), "k"))


def string_bad(compile: Compile) -> None:
    f = compile(lambda x, mode: x * 2 if mode == "train" else x + 1)
    f(torch.ones(2), "train")
    f(torch.ones(2), "test")


def train_step(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def eval_step(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def string_good(compile: Compile, code: str) -> None:
    by_mode = {"train": compile(train_step), "test": compile(eval_step)}
    for mode in ("train", "test", "train"):
        by_mode[mode](torch.ones(2))


def flag_bad(compile: Compile) -> None:
    f = compile(branch)
    f(torch.ones(2), True)
    f(torch.ones(2), False)


def flag_good(compile: Compile, code: str) -> None:
    by_mode = {True: compile(train_step), False: compile(eval_step)}
    for mode in (True, False, True):
        by_mode[mode](torch.ones(2))


def enum_bad(compile: Compile) -> None:
    f = compile(lambda x, color: x + 1 if color is Color.RED else x - 1)
    f(torch.ones(2), Color.RED)
    f(torch.ones(2), Color.BLUE)


def global_bad(compile: Compile) -> None:
    global FACTOR
    f = compile(lambda x: x * FACTOR)
    for number in (3, 4):
        FACTOR = number
        f(torch.ones(2))


FACTOR: Any = 3


def global_good(compile: Compile, code: str) -> None:
    global FACTOR
    f = compile(lambda x: x * FACTOR)
    for number in (3, 4, 5):
        FACTOR = applied(code.replace("4", str(number)), "FACTOR")
        f(torch.ones(2))
    FACTOR = 3


def adder(amount: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + amount


def closure_bad(compile: Compile) -> None:
    f = compile(apply)
    for amount in (1, 2):
        f(adder(amount), torch.ones(2))


def closure_good(compile: Compile, code: str) -> None:
    f = compile(apply)
    for amount in (1, 2, 3):
        f(adder(applied(code.replace("2", str(amount)), "amount")), torch.ones(2))


def identity_bad(compile: Compile) -> None:
    f = compile(apply)
    for number in range(2):
        scope: dict[str, Any] = {}
        exec(f"def made(x):\n    return x + {number}", scope)
        f(scope["made"], torch.ones(2))


def identity_good(compile: Compile, code: str) -> None:
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


def none_good(compile: Compile, code: str) -> None:
    f = compile(plus)
    f(torch.ones(2), torch.zeros(()))
    f(torch.ones(2), applied(code, "mask", mask=None))


def type_bad(compile: Compile) -> None:
    f = compile(apply)
    f(torch.nn.ReLU(), torch.ones(2))
    f(torch.nn.Tanh(), torch.ones(2))


def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


def type_good(compile: Compile, code: str) -> None:
    for f in (compile(relu), compile(tanh)):
        f(torch.ones(2))


def keys_bad(compile: Compile) -> None:
    f = compile(lambda batch: sum(batch.values()) * 1.0)
    f({"a": torch.ones(2), "b": torch.ones(2)})
    batch = {"a": torch.ones(2)}
    f(batch)


def keys_good(compile: Compile, code: str) -> None:
    f = compile(lambda batch: sum(batch.values()) * 1.0)
    keys = ("a", "b")
    for given in ({"a": torch.ones(2), "b": torch.ones(())}, {"a": torch.ones(2)}):
        f(applied(code, "batch", batch=given, KEYS=keys))


def contains_bad(compile: Compile) -> None:
    f = compile(lambda batch: batch["a"] * 2 if "mask" in batch else batch["a"] + 1)
    f({"a": torch.ones(2)})
    f({"a": torch.ones(2), "mask": torch.ones(2)})


def length_bad(compile: Compile) -> None:
    f = compile(total)
    for count in (2, 3):
        xs = [torch.ones(2) for _ in range(count)]
        f(xs)


def length_good(compile: Compile, code: str) -> None:
    f = compile(lambda xs: xs.sum(0), dynamic=True)
    for count in (2, 3, 4):
        f(applied(code, "xs", xs=[torch.ones(7) for _ in range(count)]))


class Late(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if hasattr(self, "ready") else x + 1


def attribute_bad(compile: Compile) -> None:
    model = Late()
    f = compile(model)
    f(torch.ones(2))
    model.ready = True
    f(torch.ones(2))


def attribute_good(compile: Compile, code: str) -> None:
    model = Late()
    model.ready = True
    f = compile(model)
    f(torch.ones(2))
    f(torch.ones(2))


def parameter_shape_bad(compile: Compile) -> None:
    for width in (3, 4, 5):
        model = torch.nn.Linear(2, width, bias=False)
        compile(model)(torch.ones(1, 2))


def parameter_shape_good(compile: Compile, code: str) -> None:
    by_model = functools.partial(compile, isolate_recompiles=True)
    assert code == "compile = functools.partial(torch.compile, isolate_recompiles=True)"
    for width in (3, 4, 5):
        model = torch.nn.Linear(2, width, bias=False)
        by_model(model)(torch.ones(1, 2))


@dataclasses.dataclass(frozen=True)
class Row:
    bad: Callable[[Compile], None]
    good: Callable[[Compile, str], None] | None
    kind: str
    source: str
    before: str | None
    now: str | None
    passed_as: str | None = None
    code: str = ""
    good_compiles: int | None = None  # where the right number of graphs is not one per function


TABLE = [
    Row(shape_bad, shape_good, "shape", 'batch["input_ids"].size(1)', "17", "23", code='torch._dynamo.mark_dynamic(batch["input_ids"], 1)'),
    Row(
        static_shape_bad,
        static_shape_good,
        "shape",
        'batch["input_ids"].size(1)',
        "47",
        "61",
        code='torch._dynamo.mark_dynamic(batch["input_ids"], 1)',
    ),
    Row(last_batch_bad, last_batch_good, "shape condition", "2 <= x.size(0)", "true", "false, x.size(0) = 1"),
    Row(condition_bad, condition_good, "shape condition", "(x.size(0) % 4) == 0", "true", "false, x.size(0) = 5"),
    Row(threshold_bad, threshold_good, "shape condition", "11 <= x.size(0)", "true", "false, x.size(0) = 5"),
    Row(rank_bad, rank_good, "rank", "x.dim()", "2", "1", code="x = x.unsqueeze(0)"),
    Row(dtype_bad, dtype_good, "dtype", "x.dtype", "float32", "float64", code="x = x.to(torch.float32)"),
    Row(device_bad, device_good, "device", "x.device", "cpu", "meta", code='x = x.to("cpu")'),
    Row(requires_grad_bad, requires_grad_good, "requires_grad", "x.requires_grad", "False", "True", code="x = x.detach()"),
    Row(freeze_bad, freeze_good, "requires_grad", "self.linear.weight.requires_grad", "True", "False", passed_as="model.linear.weight.requires_grad"),
    Row(layout_bad, layout_good, "layout", "x.stride(0)", "3", "1", code="x = x.contiguous()"),
    Row(aliasing_bad, aliasing_good, "aliasing", "x is y", "False", "True", code="y = y.clone()"),
    Row(grad_mode_bad, grad_mode_good, "grad mode", "torch.is_grad_enabled()", "enable_grad", "no_grad", good_compiles=2),
    Row(inference_tensor_bad, inference_tensor_good, "grad mode", "x.is_inference()", "False", "True", code="x = x.clone()"),
    Row(training_bad, training_good, "training flag", "self[1].training", "True", "False", passed_as="model[1].training", code="model[1].eval()"),
    Row(default_dtype_bad, default_dtype_good, "global state", "default_dtype", "torch.float32", "torch.float64"),
    Row(autocast_bad, autocast_good, "global state", "autocast(cpu)_enabled", "False", "True"),
    Row(threads_bad, threads_good, "global state", "num_threads", "1", "2"),
    Row(function_mode_bad, function_mode_good, "torch function mode", "torch.get_default_device()", None, None),
    Row(attribute_value_bad, attribute_value_good, "python value", "self.scale", "3", "4", passed_as="model.scale"),
    Row(attribute_value_bad, attribute_setting_good, "python value", "self.scale", "3", "4", passed_as="model.scale", good_compiles=2),
    Row(float_bad, float_good, "python value", "k", "0.1", "0.2", code="k = torch.tensor(0.2)"),
    Row(string_bad, string_good, "python value", "mode", "'train'", "'test'"),
    Row(flag_bad, flag_good, "python value", "mode", "True", "False"),
    Row(enum_bad, None, "python value", "color", None, "Color.BLUE"),
    Row(global_bad, global_good, "python value", "FACTOR", "3", "4", code="FACTOR = torch.tensor(4)"),
    Row(closure_bad, closure_good, "closure value", "amount", "1", "2", code="amount = torch.tensor(2)"),
    Row(identity_bad, identity_good, "object identity", "fn", None, "made"),
    Row(none_bad, none_good, "type", "mask", "Tensor", "None", code="mask = torch.zeros(()) if mask is None else mask"),
    Row(type_bad, type_good, "type", "fn", "ReLU", "Tanh"),
    Row(keys_bad, keys_good, "dict keys", "batch.keys()", "2 keys", "['a']"),
    Row(contains_bad, None, "dict keys", "'mask' in batch", "absent", "present"),
    Row(length_bad, length_good, "length", "len(xs)", "2", "3", code="xs = torch.stack(tuple(xs))"),
    Row(attribute_bad, attribute_good, "attribute", "self.ready", "absent", "present", passed_as="model.ready"),
    Row(parameter_shape_bad, parameter_shape_good, "shape", "self.weight.size(0)", "4", "5", passed_as="model.weight.size(0)"),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.bad.__name__.removesuffix("_bad"))
def test_record_and_remedy(row: Row, compiled: Compile) -> None:
    row.bad(compiled)
    record = records.all()[-1]
    assert record.recompile and record.cause is not None
    cause = record.cause
    assert (cause.kind, cause.source, cause.before, cause.now) == (row.kind, row.source, row.before, row.now)
    assert cause.guard and cause.graph is not None
    assert "test_provocations.py" in record.called_from
    if row.passed_as:
        assert cause.passed_as == row.passed_as
    diagnosed = guards.report().causes[0]
    assert diagnosed.remedy.text and "No remedy is known" not in diagnosed.remedy.text
    if row.code:
        assert diagnosed.remedy.code == row.code
    str(guards.report())

    if row.good is None:
        return
    torch._dynamo.reset()
    records.clear()
    row.good(compiled, diagnosed.remedy.code)
    after = records.all()
    if row.good_compiles is not None:
        assert len(after) == row.good_compiles
    else:
        assert after and not [record for record in after if record.recompile], "\n".join(map(str, after))
