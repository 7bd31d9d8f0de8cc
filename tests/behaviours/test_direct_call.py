"""Training graphs that are called without AOTAutograd's wrappers, and calls that go its way all the same: both are eager's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from behaviours.check import Both, call, compiled, if_on_cuda, on_ort, same_as_eager, single_session
from default_device import DEVICE, seeded
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

import ort_backend
from ort_backend.runtime.pending_run import PendingRun

X = torch.randn(4, 8, generator=seeded(0))


# With `pytest --compile-cache` graphs are kept, and the first step is direct as well.
CACHED = torch._functorch.config.enable_autograd_cache


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))


def is_direct(result: torch.Tensor) -> bool:
    """Whether the graph that gave it was called without AOTAutograd's wrappers."""
    return type(result.grad_fn).__name__ == "CompiledFunctionBackward" and hasattr(result.grad_fn, "run")


def ways(function: Callable[..., Any], *args: Any, python_ops: Sequence[str] | None = ()) -> list[bool]:
    """Which way two training steps of a compiled function go."""
    found = []
    with on_ort(python_ops=python_ops):
        runner = compiled(function)
        for _ in range(2):
            result = runner(*args)
            result = result[0] if isinstance(result, tuple) else result
            found.append(is_direct(result))
            result.sum().backward()
    return found


def settled(function: Callable[..., Any], *args: Any) -> Any:
    """The function compiled, after the first step: AOTAutograd compiles the backward when it runs first, unless its cache is to have it."""
    runner = compiled(function)
    runner(*args).sum().backward()
    for parameter in function.parameters() if isinstance(function, nn.Module) else ():
        parameter.grad = None
    return runner


def leaf() -> torch.Tensor:
    return X.clone().requires_grad_()


def test_the_second_step_is_direct() -> None:
    assert ways(perceptron(), X) == [CACHED, True]


def test_where_the_cache_keeps_the_graph_the_first_step_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._functorch.config.patch(enable_autograd_cache=True):
        assert ways(perceptron(), X) == [True, True]  # compiled
        assert ways(perceptron(), X) == [True, True]  # read
    assert ort_backend.report().graphs[-1].from_cache


W = torch.randn(8, 8, generator=seeded(1)).requires_grad_()


def writes(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x @ W


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: lambda x: (x @ W, x.t()), id="returns a view of an input"),
        pytest.param(lambda: lambda x: ((y := x @ W), y.t()), id="returns a result and a view of it"),
    ],
)
def test_wrappers_that_have_something_to_do(make: Callable[[], Callable[..., Any]]) -> None:
    assert ways(make(), X.clone()) == [False, False]
    same_as_eager(make(), call(X.clone()))


@pytest.mark.parametrize("function", [lambda x: (x @ W).t(), lambda x: torch.complex(x @ W, x), lambda x: (x @ W).mT.contiguous().mT])
def test_results_can_be_written_to(function: Callable[..., Any]) -> None:
    def step(run: Callable[..., Any]) -> torch.Tensor:
        x = leaf()
        result = run(x)
        seen.append(is_direct(result))
        result.mul_(2)
        result.abs().sum().backward()
        return x.grad

    seen: list[bool] = []
    with on_ort(graphs=1):
        runner = compiled(function)
        for _ in range(2):
            torch.testing.assert_close(step(runner), step(function))
    assert seen == [CACHED, False, True, False]


@pytest.mark.parametrize("make", [pytest.param(Normalised, id="to buffers"), pytest.param(lambda: writes, id="to an input")])
def test_writes_that_need_no_gradient(make: Callable[[], Callable[..., Any]]) -> None:
    assert ways(make(), X.clone()) == [CACHED, True]
    same_as_eager(make(), call(X.clone()), call(X.clone()))


def test_writes_that_need_a_gradient() -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        x.add_(W[0])
        return x.sigmoid()

    with on_ort(graphs=1):
        runner = compiled(writes)
        for _ in range(2):
            x, other = X.clone(), X.clone()
            found, expected = runner(x), writes(other)
            assert not is_direct(found)
            gradients = [torch.autograd.grad(y.sum() + z.square().sum(), W)[0] for y, z in ((found, x), (expected, other))]
            torch.testing.assert_close((found, x, gradients[0]), (expected, other, gradients[1]))


def test_what_is_written_to_counts_as_changed() -> None:
    """So that autograd refuses a backward that would read what has been overwritten."""
    with on_ort(graphs=1):
        runner = settled(writes, X.clone())
        x, w = X.clone(), torch.ones((), requires_grad=True)
        kept, version = x * w, x._version
        assert is_direct(runner(x)) and x._version > version
        torch.testing.assert_close(x, 2 * X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_writes_to_memory_that_two_arguments_share() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return (x @ W) * y

    def step(run: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x = X.clone()
        return run(x, x[:, :1]), x

    assert ways(lambda x: both(x, x[:, :1]), X.clone()) == [CACHED, True]  # one argument
    with on_ort():
        runner = compiled(both)
        for _ in range(2):
            (result, x), expected = step(runner), step(both)
            assert not is_direct(result)
            result.sum().backward()
            torch.testing.assert_close((result, x), expected)


def test_autocast() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return x @ W

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                return function(x)

        return run

    same_as_eager(halves, call(X), rtol=1e-2, atol=1e-2)
    with on_ort():
        runner = outside(compiled(lambda x: x @ W))
        runner(X).sum().backward()
        result = runner(X)
        assert is_direct(result) and result.dtype is torch.bfloat16
        result.sum().backward()


def test_what_runs_in_pytorch_is_not_under_autocast() -> None:
    """The graph has the casts already."""
    seen: list[bool] = []

    @torch.library.custom_op("test_direct_call::seen", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled(DEVICE))
        return x.clone()

    look.register_fake(torch.empty_like)
    look.register_autograd(lambda ctx, grad: look(grad))
    with on_ort(python_ops=["test_direct_call::seen"]):
        runner = compiled(lambda x: look(x @ W))
        for _ in range(2):
            with torch.autocast(DEVICE, torch.bfloat16):
                result = runner(X)
                result.sum().backward()
    assert is_direct(result) and seen == [False] * 4


def test_hooks_on_saved_tensors_send_a_call_autograds_way() -> None:
    model, packed = perceptron(), []
    with on_ort(graphs=1, forwards=4, backwards=3):
        runner = settled(model, X)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            result = runner(X)
        assert not is_direct(result) and packed
        result.sum().backward()
        assert is_direct(runner(X))
        runner(X).sum().backward()


def test_results_without_a_gradient() -> None:
    same_as_eager(lambda x: (x @ W, (x @ W).argmax(1), (x @ W).detach(), torch.ones(2)), call(X), graphs=1, python_ops=if_on_cuda("aten::argmax"))
    assert ways(lambda x: (x @ W, (x @ W).argmax(1)), X, python_ops=if_on_cuda("aten::argmax")) == [CACHED, True]


def test_what_gets_no_gradient_passes_none_on() -> None:
    """The upstream of an argument whose gradient is None has None as well, not zeros."""

    def step(side: Any, module: nn.Module) -> Any:
        source = torch.ones(8, requires_grad=True)
        result = side(X, source * 2)
        result.sum().backward()
        return result.detach(), source.grad

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * unused.detach()

    both = Both(Net(8, 8))
    with on_ort(graphs=1):
        for _ in range(2):
            both.step(step)


def test_retained_and_freed() -> None:
    model = perceptron()
    with on_ort(graphs=1):
        result = settled(model, X)(X)
        assert is_direct(result)
        result.sum().backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        result.sum().backward()
        for parameter, gradient in zip(model.parameters(), once, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * gradient)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            result.sum().backward()


def test_a_second_backward_over_a_graph_that_saved_nothing() -> None:
    with on_ort(graphs=1):
        runner = settled(lambda x: x * 2, leaf())
        x = leaf()
        result = runner(x)
        assert is_direct(result)
        result.sum().backward(retain_graph=True)
        result.sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 4))


def test_what_was_changed_in_place() -> None:
    with on_ort(graphs=1):
        runner = settled(lambda y: (y * y).sum(), leaf() * 1)
        y = leaf() * 1
        result = runner(y)
        assert is_direct(result)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


def test_create_graph() -> None:
    with on_ort(graphs=1):
        runner = settled(lambda x: (x * x).sum(), leaf())
        x = leaf()
        result = runner(x)
        assert is_direct(result)
        (gradient,) = torch.autograd.grad(result, x, create_graph=True)
        torch.testing.assert_close(gradient, 2 * x)
        assert gradient.requires_grad
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            gradient.sum().backward()


@pytest.mark.parametrize("inner", [False, True], ids=["leaf", "computed"])
def test_a_second_derivative_is_an_error_on_whatever_way(inner: bool) -> None:
    """Not left out: of the graph's arguments, of what they were computed from, of the tangent; as with AOTAutograd's wrappers."""
    with on_ort():
        runner = settled(lambda x, w: x * w, leaf(), leaf())
        x, w, tangent = leaf(), leaf(), leaf()
        given = w.sin() if inner else w
        result = runner(x, given)
        assert is_direct(result)
        for wanted in (x, w, given, tangent):
            (gradient,) = torch.autograd.grad(result, x, tangent, create_graph=True)
            with pytest.raises(RuntimeError, match="does not currently support double backward"):
                torch.autograd.grad(gradient.sum() + w.sum() + x.sum(), wanted, retain_graph=True)
        del given
        (gradient,) = torch.autograd.grad(result, x, torch.ones(4, 8), create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            (gradient.sum() + w.sum()).backward(inputs=[w])


def test_gradients_that_depend_on_no_argument_have_none() -> None:
    with on_ort():
        runner = settled(lambda x, w: x + 2 * w, leaf(), leaf())
        x, w = leaf(), leaf()
        result = runner(x, w)
        assert is_direct(result)
        (gradient,) = torch.autograd.grad(result.sum(), w, create_graph=True)
        (gradient.square().sum() * 0 + w.sum()).backward()
        torch.testing.assert_close(w.grad, torch.ones(4, 8))


def test_batches_of_tangents_are_refused() -> None:
    with on_ort(graphs=1):
        runner = settled(lambda x: (x * x).sum(1), leaf())
        x = leaf()
        result = runner(x)
        assert is_direct(result)
        with pytest.raises(RuntimeError, match="compiled backward function within vmap"):
            torch.vmap(lambda tangent: torch.autograd.grad(result, x, tangent))(torch.eye(4))


@pytest.mark.parametrize("retain", [False, True])
def test_batches_of_gradients(retain: bool) -> None:
    """A backward a row, on whichever way the call went."""
    function = lambda x, w: (x @ w).sin().sum(1)  # noqa: E731
    with on_ort():
        runner, w = compiled(function), torch.randn(8, 3, requires_grad=True)
        for is_first in (True, False):
            x = leaf()
            result = runner(x, w)
            assert is_direct(result) == (CACHED or not is_first)
            got = torch.autograd.grad(result, (x, w), torch.eye(4), is_grads_batched=True, retain_graph=retain)
            torch.testing.assert_close(got, torch.autograd.grad(function(x, w), (x, w), torch.eye(4), is_grads_batched=True))
            if retain:
                result.sum().backward()


def test_a_vectorized_jacobian() -> None:
    with on_ort():
        runner = settled(lambda x: x.sin() @ x.t(), leaf())
        x = leaf()
        got = torch.autograd.functional.jacobian(runner, x, vectorize=True)
        torch.testing.assert_close(got, torch.autograd.functional.jacobian(lambda x: x.sin() @ x.t(), x))


def test_a_result_that_is_kept_keeps_no_arguments() -> None:
    with on_ort():
        runner = settled(lambda x, w: (x * w).tanh().sum(), torch.ones(3), leaf()[0, :3].detach().requires_grad_())
        w, kept, held = torch.ones(3, requires_grad=True), [], []
        for _ in range(3):
            x = torch.randn(3)
            held.append(StorageWeakRef(x.untyped_storage()))
            result = runner(x, w)
            assert is_direct(result)
            result.backward()
            kept.append(result)
            del x, result
        gc.collect()
        assert all(one.expired() for one in held)


def test_an_argument_that_the_result_is_added_to_goes_with_it() -> None:
    """It would else hold itself: by its new place in autograd's graph, which holds the run, which holds the arguments."""
    with on_ort(idle=True):
        w = torch.randn(8, requires_grad=True)
        runner = settled(lambda h: h * 3, w * 1)
        held = []
        for _ in range(3):
            h = w * 1
            result = runner(h)
            assert is_direct(result)
            h.add_(result)
            held.append(StorageWeakRef(h.untyped_storage()))
            del h, result
        gc.collect()
        assert all(one.expired() for one in held)


def test_numbers_with_a_pending_negation() -> None:
    with on_ort():
        negative = torch.tensor(1 + 2j).conj().imag
        runner = settled(lambda x, y: x * y.sin(), negative, torch.tensor(0.5, requires_grad=True))
        assert negative.is_neg() and negative.is_contiguous()
        x = torch.tensor(0.5, requires_grad=True)
        result = runner(negative, x)
        assert is_direct(result)
        result.backward(negative)
        torch.testing.assert_close(result, -2 * x.sin())
        torch.testing.assert_close(x.grad, 4 * x.detach().cos())


def test_arguments_of_inference_mode() -> None:
    """Their writes are not counted."""
    body, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
    with torch.inference_mode():
        x = torch.randn(3, 4)
    expected = torch.autograd.grad(head(body(x).relu()).sum(), head.weight)
    with on_ort(graphs=1):
        runner = compiled(lambda x: head(body(x).relu()))
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(runner(x).sum(), head.weight), expected)


def test_determinism_that_was_asked_for_too_late() -> None:
    with on_ort(graphs=1):
        result = settled(lambda x: (x * x).sum(), leaf())(leaf())
        assert is_direct(result)
        try:
            torch.use_deterministic_algorithms(True)
            with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
                result.backward()
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_tangent_that_is_no_plain_tensor() -> None:
    with on_ort(graphs=1):
        result = settled(lambda x: x * x, leaf())(leaf())
        assert is_direct(result)
        with pytest.raises(RuntimeError, match="tensor subclass"):
            result.backward(TwoTensor(torch.ones(4, 8), torch.ones(4, 8)))


@pytest.mark.parametrize("tangent", [torch.ones(1, 1).expand(4, 8), torch.arange(32.0).reshape(8, 4).t()], ids=["expanded", "transposed"])
def test_strides_of_tangents(tangent: torch.Tensor) -> None:
    with on_ort(graphs=1):
        runner = settled(torch.sin, leaf())
        x = leaf()
        result = runner(x)
        assert is_direct(result)
        result.backward(tangent)
    torch.testing.assert_close(x.grad, X.cos() * tangent)


def test_a_view_is_saved_without_its_place_in_autograds_graph() -> None:
    with on_ort(graphs=1):
        runner = settled(lambda x: (x * x).sum(), (leaf() * 1)[1:])
        view = (leaf() * 1)[1:]
        result = runner(view)
        assert is_direct(result)
        seen = weakref.ref(view)
        del view
        gc.collect()
        result.backward()
    assert seen() is None


@single_session
def test_a_run_goes_with_its_result() -> None:
    def pending() -> int:
        gc.collect()
        return sum(type(one) is PendingRun for one in gc.get_objects())

    before = pending()
    with on_ort(graphs=1):
        runner = settled(perceptron(), X)
        results = [runner(X) for _ in range(4)]
        assert all(map(is_direct, results)) and pending() == before + 4
        results[0].sum().backward()
        assert results[0].grad_fn.run.state is None
        del results[:2]
        assert pending() == before + 2
        results.clear()
        assert pending() == before


def test_pending_forwards() -> None:
    model = perceptron()
    both = Both(model)

    def step(side: Any, module: nn.Module) -> Any:
        module.zero_grad()
        first, second = side(X), side(X * 2)
        second.square().sum().backward()
        first.sum().backward()
        return first.detach(), second.detach()

    with on_ort(graphs=1, forwards=6, backwards=6):
        for _ in range(3):
            both.step(step)
