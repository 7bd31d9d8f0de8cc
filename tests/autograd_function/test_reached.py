"""Which backward of a user's Function runs, and what has no gradient: as in eager PyTorch, where autograd runs what a gradient reaches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from autograd_function.harness import leaves, same_as_eager
from torch import Tensor
from torch.autograd import Function

called: list[str] = []


class AddsLoss(Function):
    """As mixtures of experts add a loss of their routers: its gradient is 1, whatever comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        called.append("backward")
        return gradient, torch.ones(())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_function_that_no_gradient_reaches_is_not_run(dynamic: bool) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return AddsLoss.apply(x.sin(), y.square().sum()), (x * y).cos()

    compiled = torch.compile(program, backend="ort_training", dynamic=dynamic)
    for reached in (True, False):
        for used in (0, 1):
            expected, own = leaves((3,), (3,)), leaves((3,), (3,))
            for function, tensors in ((program, expected), (compiled, own)):
                results = function(*tensors)
                called.clear()
                (sum(results).sum() if reached else results[used].sum()).backward()
                assert called == ["backward"] * (reached or used == 0)
            torch.testing.assert_close([one.grad for one in own], [one.grad for one in expected])


class Doubles(Function):
    """Tells that its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        called.append("doubles")
        return gradient * 2


class HasNoneForScale(Function):
    """Has no gradient for one of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        called.append("scales")
        return gradient * ctx.saved_tensors[0], None


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("used", range(3))
def test_none_for_what_a_function_made_lets_its_backward_run(used: int, also: bool) -> None:
    """With zeros; not so what only PyTorch's operators made."""

    def program(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        made = Doubles.apply(x.sin())
        scaled = HasNoneForScale.apply(y, made.exp() + z.tanh())
        return (scaled, z.cos(), *([made.cos()] if also else [y.square()]))

    expected, own = leaves((3,), (3,), (3,)), leaves((3,), (3,), (3,))
    calls = []
    for function, tensors in ((program, expected), (torch.compile(program, backend="ort_training"), own)):
        results = function(*tensors)
        called.clear()
        results[used].sum().backward()
        calls.append(called.copy())
    assert calls[0] == calls[1] == [["scales", "doubles"], [], ["doubles"] if also else []][used]
    torch.testing.assert_close([one.grad for one in own], [one.grad for one in expected])
    assert (own[0].grad is None) == (not calls[0]) and (own[2].grad is None) == (used != 1)


class ReturnsArgument(Function):
    """An argument that it does not write to, at two places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x, y, x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0] * 2 + gradients[2] * 3, gradients[1]


def test_an_argument_returned_at_two_places_is_two_tensors() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Any, ...]:
        first, middle, last = ReturnsArgument.apply(x * 2, y)
        return first.sin(), middle, last * 5, first is last

    same_as_eager(program, (3, 2), (2,), functions=1, fullgraph=True)


class InNumpy(Function):
    """A backward that takes numbers, and has none for its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, also: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2 + also

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        made = torch.from_numpy(np.cos(x.detach().numpy())) * gradient
        return made, None, gradient * 3 if gradient.any() else None


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_in_numpy_that_has_no_gradient_for_an_argument(dynamic: bool) -> None:
    same_as_eager(InNumpy.apply, (4,), (2,), (4,), sweep=[((6,), (2,), (6,))], functions=1, dynamic=dynamic, fullgraph=True)


class WhollyInNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, also: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2) + also

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradient * 3 if gradient.any() or not gradient.numel() else None


def test_a_backward_that_has_no_gradient_where_what_arrives_is_zero() -> None:
    same_as_eager(WhollyInNumpy.apply, (4,), (4,), functions=1, fullgraph=True)


def test_a_backward_goes_back_over_a_graph_made_before() -> None:
    """Trying it out leaves that graph as it is."""
    other = torch.rand(3, requires_grad=True)

    class GoesBack(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            loss.backward()
            return gradient

    compiled = torch.compile(lambda x: GoesBack.apply(x * x), backend="ort_training", fullgraph=True)
    x = torch.rand(3, requires_grad=True)
    for i in range(1, 3):
        loss = other.square().sum()
        compiled(x).sum().backward()
        torch.testing.assert_close(other.grad, 2 * i * other.detach())
        torch.testing.assert_close(x.grad, 2 * i * x.detach())


def test_called_inside_a_transform_on_a_tensor_that_it_does_not_map() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x: Any) -> Any:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * 2

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row * Doubled.apply(weight.detach()))(x)

    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(3)
    result = torch.compile(function, backend="ort_training", fullgraph=True)(x, weight)
    torch.testing.assert_close(result, x * 2 * weight)
    result.sum().backward()
    torch.testing.assert_close(x.grad, (2 * weight).expand(2, 3))
