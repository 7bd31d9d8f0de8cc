"""Writes behind a user's Function that computes in numpy: as in eager PyTorch, only what it has saved must stay as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from autograd_function.harness import same_as_eager
from torch import Tensor
from torch.autograd import Function


class SavesResult(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 - ctx.saved_tensors[0] ** 2)


class SavesNothing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class BackwardInNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.from_numpy(gradient.numpy() * np.cos(ctx.saved_tensors[0].detach().numpy()))


def _argument(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    h = x * 2
    y = function(h)
    h.relu_()
    return y + h


def _result(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    h = x * 2
    y = function(h)
    y.add_(h)
    return y * h


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "write"), [(SavesResult, _argument), (SavesNothing, _argument), (SavesNothing, _result), (BackwardInNumpy, _result)]
)
def test_what_is_not_saved_may_be_written_to(function: Any, write: Callable[..., Tensor], dynamic: bool) -> None:
    same_as_eager(lambda x: write(function.apply, x), (3, 4), sweep=[((5, 4),)], functions=1, dynamic=dynamic, fullgraph=True)


@pytest.mark.parametrize(("function", "write"), [(SavesResult, _result), (BackwardInNumpy, _argument)])
def test_what_is_saved_may_not(function: Any, write: Callable[..., Tensor]) -> None:
    for run in (lambda x: write(function.apply, x), torch.compile(lambda x: write(function.apply, x), backend="ort_training")):
        with pytest.raises(Exception, match="modified by an inplace operation"):
            run(torch.ones(3, 4, requires_grad=True)).sum().backward()


arrays: list[Any] = []


class KeepsArrays(Function):
    """Arrays of numpy, over the memory of what it gets and returns: in its `ctx`, or where nobody looks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, elsewhere: bool) -> Tensor:
        before = x.detach().numpy()
        after = np.tanh(before)
        ctx.after = {"it": [after]}
        if elsewhere:
            arrays.append(before)
        else:
            ctx.before = before
        return torch.from_numpy(after)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        before = ctx.before if hasattr(ctx, "before") else arrays.pop()
        return gradient * torch.from_numpy(1 - ctx.after["it"][0] ** 2 + before), None


@pytest.mark.parametrize("elsewhere", [False, True])
def test_memory_that_arrays_look_at_is_not_used_again(elsewhere: bool) -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.relu(KeepsArrays.apply(x @ weight, elsewhere)) * 0.1 + x * 0.1
        return x

    same_as_eager(program, (4, 4), (4, 4), functions=10, fullgraph=True)
