"""Small programs that recompile because of a tensor: what the record must say, and that the remedy stops it (see `check`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_version import GUARDS_PARAMETERS, TORCH

Compile = Callable[..., Callable[..., Any]]
Code = Any  # of conftest
Row = dict  # the arguments of `check`


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def of_ids(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["input_ids"] * 2


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.scale = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


# shape


def shape_bad(compile: Compile) -> None:
    f = compile(of_ids)
    for length in (17, 23):
        batch = {"input_ids": torch.ones(2, length)}
        f(batch)


def shape_good(compile: Compile, code: Code) -> None:
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


def static_shape_good(compile: Compile, code: Code) -> None:
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


def last_batch_good(compile: Compile, code: Code) -> None:
    f = compile(add_one, dynamic=True)
    dataset, batch_size = torch.ones(9, 3), 4
    for x in code.gives("loader", dataset=dataset, batch_size=batch_size):
        f(x)


def by_four(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 4).sum(0) if x.size(0) % 4 == 0 else x.sum() + torch.zeros(4)


def condition_bad(compile: Compile) -> None:
    f = compile(by_four, dynamic=True)
    for size in (16, 5):
        x = torch.ones(size)
        f(x)


def condition_good(compile: Compile, code: Code) -> None:
    f = compile(by_four, dynamic=True)
    for size in (16, 5, 9):
        x = code.gives("x", x=torch.ones(size))
        assert x.size(0) % 4 == 0
        f(x)


def threshold(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.size(0) > 10 else x - 1


def threshold_bad(compile: Compile) -> None:
    f = compile(threshold, dynamic=True)
    for size in (17, 5):
        x = torch.ones(size)
        f(x)


def threshold_good(compile: Compile, code: Code) -> None:
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


def rank_good(compile: Compile, code: Code) -> None:
    f = compile(add_one)
    f(torch.ones(1, 3))
    f(code.gives("x", x=torch.ones(3)))


def dtype_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    x = torch.ones(2, dtype=torch.float64)
    f(x)


def dtype_good(compile: Compile, code: Code) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    f(code.gives("x", x=torch.ones(2, dtype=torch.float64)))


def device_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    x = torch.ones(2, device="meta")
    f(x)


def device_good(compile: Compile, code: Code) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    assert code == 'x = x.to("cpu")'
    f(torch.ones(2))  # a meta tensor has no data to move


def requires_grad_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    f(x)


def requires_grad_good(compile: Compile, code: Code) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    f(code.gives("x", x=torch.ones(2, requires_grad=True)))


def freeze_bad(compile: Compile) -> None:
    model = Scaled()
    f = compile(model)
    x = torch.ones(1, 2)
    f(x)
    model.linear.weight.requires_grad_(False)
    f(x)


def freeze_good(compile: Compile, code: Code) -> None:
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


def layout_good(compile: Compile, code: Code) -> None:
    f = compile(add_one)
    f(torch.ones(2, 3))
    f(code.gives("x", x=torch.ones(3, 2).t()))


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def aliasing_bad(compile: Compile) -> None:
    f = compile(add)
    x, y = torch.ones(2), torch.ones(2)
    f(x, y)
    y = x
    f(x, y)


def aliasing_good(compile: Compile, code: Code) -> None:
    f = compile(add)
    x = torch.ones(2)
    f(x, torch.ones(2))
    f(x, code.gives("y", y=x))


def parameter_shape_bad(compile: Compile) -> None:
    for width in (3, 4, 5):
        model = torch.nn.Linear(2, width, bias=False)
        compile(model)(torch.ones(1, 2))


def linear_of_3(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def linear_of_4(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def parameter_shape_good(compile: Compile, code: Code) -> None:
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:  # the other way that the remedy names: a def of its own for each
        assert code == ""
        for function, width in ((linear_of_3, 3), (linear_of_4, 4)):
            compile(function)(torch.ones(1, 2), torch.nn.Linear(2, width).weight)
        return
    by_model = functools.partial(compile, isolate_recompiles=True)
    assert code == "compile = functools.partial(torch.compile, isolate_recompiles=True)"
    for width in (3, 4, 5):
        model = torch.nn.Linear(2, width, bias=False)
        by_model(model)(torch.ones(1, 2))


TABLE: list[dict[str, Any]] = [
    Row(
        bad=shape_bad,
        good=shape_good,
        kind="shape",
        source='batch["input_ids"].size(1)',
        before="17",
        now="23",
        code='torch._dynamo.mark_dynamic(batch["input_ids"], 1)',
    ),
    Row(
        bad=static_shape_bad,
        good=static_shape_good,
        kind="shape",
        source='batch["input_ids"].size(1)',
        before="47",
        now="61",
        code='torch._dynamo.mark_dynamic(batch["input_ids"], 1)',
    ),
    Row(bad=last_batch_bad, good=last_batch_good, kind="shape condition", source="2 <= x.size(0)", before="true", now="false, x.size(0) = 1"),
    Row(bad=condition_bad, good=condition_good, kind="shape condition", source="(x.size(0) % 4) == 0", before="true", now="false, x.size(0) = 5"),
    Row(bad=threshold_bad, good=threshold_good, kind="shape condition", source="11 <= x.size(0)", before="true", now="false, x.size(0) = 5"),
    Row(bad=rank_bad, good=rank_good, kind="rank", source="x.dim()", before="2", now="1", code="x = x.unsqueeze(0)"),
    Row(bad=dtype_bad, good=dtype_good, kind="dtype", source="x.dtype", before="float32", now="float64", code="x = x.to(torch.float32)"),
    Row(bad=device_bad, good=device_good, kind="device", source="x.device", before="cpu", now="meta", code='x = x.to("cpu")'),
    Row(
        bad=requires_grad_bad,
        good=requires_grad_good,
        kind="requires_grad",
        source="x.requires_grad",
        before="False",
        now="True",
        code="x = x.detach()",
    ),
    Row(
        bad=freeze_bad,
        good=freeze_good,
        kind="requires_grad",
        source="self.linear.weight.requires_grad",
        before="True",
        now="False",
        passed_as="model.linear.weight.requires_grad",
        needs=(TORCH >= GUARDS_PARAMETERS, "does not guard on what a parameter requires"),
    ),
    Row(bad=layout_bad, good=layout_good, kind="layout", source="x.stride(0)", before="3", now="1", code="x = x.contiguous()"),
    Row(bad=aliasing_bad, good=aliasing_good, kind="aliasing", source="x is y", before="False", now="True", code="y = y.clone()"),
    Row(
        bad=parameter_shape_bad,
        good=parameter_shape_good,
        kind="shape",
        source="self.weight.size(0)",
        before="4",
        now="5",
        passed_as="model.weight.size(0)",
        needs=(TORCH >= (2, 5), "compiles a library module once per instance"),
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["bad"].__name__.removesuffix("_bad"))
def test_record_and_remedy(row: dict[str, Any], check: Callable[..., None]) -> None:
    check(**row)
