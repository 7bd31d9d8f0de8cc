"""Forwards that wait for their backward, several at once, and the tensors that they keep until then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviours.check import WHOLE_GRAPHS, Both, compiled, on_ort, same_gradients, single_session, twin
from default_device import seeded
from torch import nn

from ort_backend.errors import OrtBackendError


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*(shape or (4, 3)), generator=seeded(seed))
    return made.requires_grad_()


A = tensor()
X = A.detach()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.parametrize("order", ["01|10", "01|01", "012|201", "010|102"])
def test_pending_forwards_share_no_memory(order: str) -> None:
    """Digits before the bar: the forwards, with which input. Behind it: the order of their backwards."""
    forwards, backwards = order.split("|")
    both = Both(mlp())
    with on_ort(graphs=1, forwards=len(forwards), backwards=len(backwards)):

        def do(runner: Any, module: nn.Module) -> Any:
            inputs = [twin(tensor(seed=int(which))) for which in forwards]
            results = [runner(x) for x in inputs]
            before = [result.detach().clone() for result in results]
            for position in backwards:
                results[int(position)].square().sum().backward()
            return [result.detach() for result in results], before, [x.grad for x in inputs]

        both.step(do)


def test_pending_forwards_of_different_graphs() -> None:
    def function(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return x.sin() if flag else x.exp() * x

    with on_ort(graphs=2):
        found = []
        for side in (compiled(function), function):
            x = twin(A)
            one, other = side(x, True), side(x, False)
            one.sum().backward()
            more = side(x, True)
            (other.sum() + more.square().sum()).backward()
            found.append(x)
    same_gradients(found[:1], found[1:])


# Of sums of 256 products in float32, in whichever order a processor's kernels add them up; results are in the hundreds.
ROUNDING = {"rtol": 1e-4, "atol": 1e-3}


def product_of(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, w).square().sum()


def filled(like: torch.Tensor) -> list[torch.Tensor]:
    """Memory of that size, taken and written to: what was given back before is among it."""
    return [torch.full_like(like, float("nan")) for _ in range(20)]


@single_session
def test_a_tensor_gets_other_memory_before_the_backward() -> None:
    """`tensor.data = other` frees what the tensor had; the backward reads the values of the forward, as eager's linear layers do."""
    found = []
    with on_ort(graphs=1):
        for side in (compiled(product_of), product_of):
            w, x = twin(tensor(256, 256)), twin(tensor(4, 256, seed=1))
            loss = side(w, x)
            w.data = torch.full((256, 256), 1e-3)
            kept = filled(w)
            loss.backward()
            found.append((w.grad, x.grad))
            del kept
    torch.testing.assert_close(*found, **ROUNDING)


def test_memory_released_behind_the_forward_and_gathered_again(caplog: pytest.LogCaptureFixture) -> None:
    """What FSDP does with the parameters of a block."""
    found = []
    with on_ort(graphs=1):
        for side in (compiled(product_of), product_of):
            w, x = twin(tensor(256, 256)), twin(tensor(4, 256, seed=1))
            values, memory = w.detach().clone(), w.untyped_storage()
            for _ in range(2):
                loss = side(w, x)
                memory.resize_(0)
                kept = filled(values)
                memory.resize_(values.nbytes)
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
                    w.copy_(values)
                loss.backward()
                del kept
            found.append((w.grad, x.grad))
    torch.testing.assert_close(*found, **ROUNDING)
    assert sum("reshard_after_forward" in one.message for one in caplog.records) == WHOLE_GRAPHS


@single_session
def test_memory_released_for_good_is_an_error() -> None:
    w, x = twin(tensor(256, 256)), twin(tensor(4, 256, seed=1))
    with on_ort(graphs=1, backwards=1):
        loss = compiled(product_of)(w, x)
        w.untyped_storage().resize_(0)
        with pytest.raises(OrtBackendError, match="released behind the forward"):
            loss.backward()


def test_retain_graph_allows_a_second_backward() -> None:
    both = Both(nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.LayerNorm(5), nn.Linear(5, 2)))
    with on_ort(graphs=1, backwards=3):

        def do(runner: Any, module: nn.Module) -> Any:
            x = twin(A)
            loss = runner(x).square().sum()
            loss.backward(retain_graph=True)
            first = x.grad.clone()
            loss.backward(retain_graph=True)
            second = x.grad.clone()
            loss.backward()
            return first, second, x.grad

        first, second, third = both.step(do)
    torch.testing.assert_close(second, 2 * first)
    torch.testing.assert_close(third, 3 * first)


class Averaging(nn.Module):
    """A BatchNorm, and a buffer that the backward reads as it was before the forward writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(x)) * self.scale.clone()
        self.scale.mul_(0.5).add_(x.detach().mean())
        return hidden


def test_a_second_backward_over_a_forward_that_writes_to_buffers() -> None:
    both = Both(Averaging())
    with on_ort(graphs=1, forwards=2, backwards=4):

        def do(runner: Any, module: nn.Module) -> Any:
            result = runner(A)
            gradients = [torch.autograd.grad(result.square().sum(), list(module.parameters()), retain_graph=True) for _ in range(2)]
            return [*gradients[0], *gradients[1]]

        both.step(do)
        both.step(do)


def test_a_second_backward_without_retain_graph_is_torchs_error() -> None:
    with on_ort(graphs=1):
        loss = compiled(mlp())(X).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("what", ["result", "input", "weight"])
def test_changing_in_place_what_the_backward_needs_is_torchs_error(what: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).exp()

    with on_ort(graphs=1, idle=True):
        for side in (function, compiled(function)):
            x, w = twin(A), twin(tensor(3, 2))
            result = side(x, w)
            with torch.no_grad():
                {"result": result, "input": x, "weight": w}[what].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()


SAVED: dict[str, Any] = {
    "cast": lambda x: ((y := x.double()), y * y),
    "cast_of_computed": lambda x: ((y := x.exp().double()), y * y),
    "product": lambda x: ((y := x @ x.t()), y * y),
}


@pytest.mark.parametrize("kind", SAVED)
def test_changing_a_result_that_the_backward_reads_is_torchs_error(kind: str) -> None:
    function = SAVED[kind]
    with on_ort(graphs=1, idle=True):
        for side in (function, compiled(function)):
            result, product = side(twin(A))
            with torch.no_grad():
                result.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                (result.sum() + product.sum()).backward()


def test_a_copy_of_what_the_backward_reads_may_be_changed() -> None:
    def function(x: torch.Tensor) -> Any:
        hidden = x.exp()
        return hidden, hidden.clone()

    found = []
    with on_ort(graphs=1):
        for side in (compiled(function), function):
            x = twin(A)
            hidden, copied = side(x)
            with torch.no_grad():
                copied.add_(1)
            (hidden.sum() + copied.sum()).backward()
            found.append(x)
    same_gradients(found[:1], found[1:])


def test_changing_in_place_between_two_backwards_is_an_error() -> None:
    with on_ort(graphs=1):
        for side in (compiled(lambda x: x.exp() * x), lambda x: x.exp() * x):
            x = twin(A)
            result = side(x)
            result.sum().backward(retain_graph=True)
            with torch.no_grad():
                x.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()
