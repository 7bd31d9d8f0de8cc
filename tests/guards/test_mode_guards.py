"""Small programs that recompile because of a mode or a setting of the process (see `check`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_version import TORCH

Compile = Callable[..., Callable[..., Any]]
Code = Any  # of conftest
Row = dict  # the arguments of `check`


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# modes and settings


def grad_mode_bad(compile: Compile) -> None:
    f = compile(add_one)
    f(torch.ones(2))
    with torch.no_grad():
        f(torch.ones(2))


def grad_mode_good(compile: Compile, code: Code) -> None:
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


def inference_tensor_good(compile: Compile, code: Code) -> None:
    f = compile(add_one)
    with torch.inference_mode():
        made = torch.ones(2)
    with torch.no_grad():
        f(torch.ones(2))
        f(code.gives("x", x=made))


def training_bad(compile: Compile) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    f = compile(model)
    f(torch.ones(1, 2))
    model.eval()
    f(torch.ones(1, 2))


def training_good(compile: Compile, code: Code) -> None:
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


def default_dtype_good(compile: Compile, code: Code) -> None:
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


def autocast_good(compile: Compile, code: Code) -> None:
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


def threads_good(compile: Compile, code: Code) -> None:
    torch.set_num_threads(1)
    f = compile(add_one)
    f(torch.ones(2))
    f(torch.ones(2))


def function_mode_bad(compile: Compile) -> None:
    f = compile(make_zeros)
    f(torch.ones(2))
    with torch.device("cpu"):
        f(torch.ones(2))


def function_mode_good(compile: Compile, code: Code) -> None:
    f = compile(make_zeros)
    for _ in range(2):
        with torch.device("cpu"):
            x = torch.ones(2)
        f(x)


TABLE: list[dict[str, Any]] = [
    Row(
        bad=grad_mode_bad,
        good=grad_mode_good,
        kind="grad mode",
        source="torch.is_grad_enabled()",
        before="enable_grad",
        now="no_grad",
        good_compiles=2,
    ),
    Row(
        bad=inference_tensor_bad,
        good=inference_tensor_good,
        kind="grad mode",
        source="x.is_inference()",
        before="False",
        now="True",
        code="x = x.clone()",
    ),
    Row(
        bad=training_bad,
        good=training_good,
        kind="training flag",
        source="self[1].training",
        before="True",
        now="False",
        passed_as="model[1].training",
        code="model[1].eval()",
        older=((2, 5), {"source": "self.training", "passed_as": "model.training", "code": "model.eval()"}),  # of the whole module only
    ),
    Row(bad=default_dtype_bad, good=default_dtype_good, kind="global state", source="default_dtype", before="torch.float32", now="torch.float64"),
    Row(bad=autocast_bad, good=autocast_good, kind="global state", source="autocast(cpu)_enabled", before="False", now="True"),
    Row(bad=threads_bad, good=threads_good, kind="global state", source="num_threads", before="1", now="2"),
    Row(
        bad=function_mode_bad,
        good=function_mode_good,
        kind="torch function mode",
        source="torch.get_default_device()",
        before=None,
        now=None,
        needs=(TORCH >= (2, 5), "does not guard on torch function modes"),
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["bad"].__name__.removesuffix("_bad"))
def test_record_and_remedy(row: dict[str, Any], check: Callable[..., None]) -> None:
    check(**row)
