"""Threads and streams of the user's own: forwards and backwards may run on any of them, at the same time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort, same_module, same_tree
from behaviours.operators import BOTH, cube
from default_device import on_this_thread, seeded
from torch import nn
from torch_version import THREADS_CRASH

THREADS, STEPS = 4, 5


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2))


def x_of(seed: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=seeded(seed))


def in_threads(function: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """`function(0), function(1), ...`, started together, each on a thread of its own."""
    start = threading.Barrier(count)

    def run(i: int) -> Any:
        with on_this_thread():
            start.wait(30)
            return function(i)

    with ThreadPoolExecutor(count) as pool:
        return [one.result(timeout=60) for one in [pool.submit(run, i) for i in range(count)]]


def test_one_model_used_by_several_threads() -> None:
    model = net()
    reference = copy.deepcopy(model)
    with on_ort(graphs=1, forwards=1 + THREADS * STEPS, backwards=1 + THREADS * STEPS):
        runner = compiled(model)
        runner(x_of(0).requires_grad_()).sum().backward()

        def work(i: int) -> list[Any]:
            found = []
            for step in range(STEPS):
                x = x_of(10 * i + step).requires_grad_()
                result = runner(x)
                (grad,) = torch.autograd.grad(result.square().sum(), x)
                found.append((result.detach(), grad))
            return found

        everything = in_threads(work)
    for i, found in enumerate(everything):
        for step, (result, grad) in enumerate(found):
            x = x_of(10 * i + step).requires_grad_()
            expected = reference(x)
            same_tree(result, expected.detach())
            same_tree(grad, torch.autograd.grad(expected.square().sum(), x)[0])


@THREADS_CRASH
def test_a_model_for_each_thread() -> None:
    models = [net() for _ in range(THREADS)]
    references = copy.deepcopy(models)
    with on_ort():
        runners = [compiled(model) for model in models]

        def work(i: int) -> None:
            for step in range(STEPS):
                runners[i](x_of(step)).square().sum().backward()

        in_threads(work)
    for model, reference in zip(models, references, strict=True):
        for step in range(STEPS):
            reference(x_of(step)).square().sum().backward()
        same_module(model, reference, rtol=1e-4, atol=1e-4)


def test_the_backward_may_run_on_another_thread() -> None:
    model = net()
    reference = copy.deepcopy(model)
    with on_ort(graphs=1, forwards=THREADS, backwards=THREADS):
        runner = compiled(model)
        losses = [runner(x_of(i)).square().sum() for i in range(THREADS)]
        for loss in reversed(losses):
            worker = threading.Thread(target=loss.backward)
            worker.start()
            worker.join(60)
            assert not worker.is_alive()
    for i in range(THREADS):
        reference(x_of(i)).square().sum().backward()
    same_module(model, reference)


def test_unused_results_on_several_threads() -> None:
    """Which gradients are None is decided by the run, not by what another thread does meanwhile."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.sin(), y.cos()

    with on_ort(graphs=1):
        step = compiled(function)
        step(x_of(0).requires_grad_(), x_of(1).requires_grad_())[0].sum().backward()

        def work(i: int) -> list[Any]:
            found = []
            for _ in range(STEPS):
                x, y = x_of(i).requires_grad_(), x_of(i + 1).requires_grad_()
                step(x, y)[i % 2].sum().backward()
                found.append((x.grad is None, y.grad is None))
            return found

        for i, found in enumerate(in_threads(work)):
            assert found == [(i % 2 == 1, i % 2 == 0)] * STEPS


@THREADS_CRASH
def test_what_runs_in_pytorch_inside_a_session_runs_on_several_threads() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return cube(x.sin()) * 2

    with on_ort(graphs=1, python_ops=BOTH):
        step = compiled(function)
        step(x_of(0).requires_grad_()).sum().backward()

        def work(i: int) -> list[torch.Tensor]:
            found = []
            for _ in range(STEPS):
                x = x_of(i).requires_grad_()
                step(x).sum().backward()
                found.append(x.grad)
            return found

        for i, found in enumerate(in_threads(work)):
            x = x_of(i).requires_grad_()
            function(x).sum().backward()
            same_tree(found, [x.grad] * STEPS)


def test_an_error_on_one_thread_leaves_the_others_alone() -> None:
    model = net()
    with on_ort(graphs=1):
        runner = compiled(model)
        runner(x_of(0)).sum().backward()

        def work(i: int) -> bool:
            for step in range(STEPS):
                if i == 0:
                    with pytest.raises(RuntimeError):
                        runner(torch.randn(5, 4))
                else:
                    torch.testing.assert_close(runner(x_of(step)), model(x_of(step)), rtol=1e-4, atol=1e-5)
            return True

        assert in_threads(work) == [True] * THREADS


@pytest.mark.cuda
def test_a_side_stream() -> None:
    model = net().cuda()
    reference = copy.deepcopy(model)
    stream = torch.cuda.Stream()
    with on_ort(graphs=1):
        runner = compiled(model)
        for i in range(STEPS):
            x = x_of(i).cuda()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = runner(x).square().sum()
            torch.cuda.current_stream().wait_stream(stream)
            loss.backward()
            reference(x).square().sum().backward()
    torch.cuda.synchronize()
    same_module(model, reference)
