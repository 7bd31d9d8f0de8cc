"""`torch.autograd.graph.saved_tensors_hooks` around a compiled module: what is saved for the backward is packed as copies, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from behaviours.check import WHOLE_GRAPHS, Both, compiled, on_ort
from behaviours.test_memory_and_lifetime import alive
from default_device import seeded
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from ort_backend.runtime.training_graph import TrainingGraph

X = torch.randn(6, 8, generator=seeded(0))


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))


@contextlib.contextmanager
def _on_disk(folder: Path) -> Any:
    count = iter(range(1000))

    def pack(tensor: Tensor) -> Path:
        path = folder / str(next(count))
        torch.save(tensor, path)
        return path

    with saved_tensors_hooks(pack, torch.load):
        yield


@pytest.mark.parametrize("pending", [1, 3])
def test_offloading(tmp_path: Path, pending: int) -> None:
    """Every forward has a mask of its own; the backwards come in the opposite order."""
    with on_ort(graphs=1, forwards=pending):

        def do(runner: Any, module: nn.Module) -> Any:
            torch.manual_seed(1)
            with _on_disk(tmp_path):
                losses = [runner(X).square().mean() for _ in range(pending)]
            drawn = torch.rand(2)
            for loss in reversed(losses):
                loss.backward()
            return [*losses, drawn, torch.rand(2)]

        Both(_net()).step(do)


def test_offloading_where_the_forward_writes_to_buffers(tmp_path: Path) -> None:
    with on_ort(graphs=1, forwards=1):

        def do(runner: Any, module: nn.Module) -> Any:
            with _on_disk(tmp_path):
                loss = runner(X).square().mean()
            loss.backward()
            return loss

        Both(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), spectral_norm(nn.Linear(4, 4)))).step(do)


def test_hooks_that_keep_the_tensors() -> None:
    with on_ort(graphs=1, forwards=1, backwards=1):

        def do(runner: Any, module: nn.Module) -> Any:
            torch.manual_seed(1)
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                loss = runner(X).square().mean()
            loss.backward()
            return loss

        Both(_net()).step(do)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_compiled_module(reentrant: bool) -> None:
    with on_ort(backwards=2):

        def do(runner: Any, module: nn.Module) -> Any:
            torch.manual_seed(1)
            x = X.clone().requires_grad_()
            first = checkpoint(runner, x, use_reentrant=reentrant)
            second = checkpoint(runner, x * 2, use_reentrant=reentrant)
            (first * second).sum().backward()
            return first, second, x.grad

        Both(_net()).step(do)


def test_checkpoints_of_sizes_that_compile_again() -> None:
    """The second size compiles a graph for all sizes: it is what runs again for the first one's backward, too."""

    def do(runner: Any, module: nn.Module) -> Any:
        torch.manual_seed(1)
        inputs = [X[:size].clone().requires_grad_() for size in (3, 5)]
        first, second = (checkpoint(runner, x, use_reentrant=False) for x in inputs)
        (first.sum() + second.square().sum()).backward()
        return first, second, [x.grad for x in inputs]

    with on_ort(graphs=2):
        both = Both(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.4), nn.Linear(4, 4)))
        both.step(do)
        both.step(do)


def test_what_the_loss_does_not_reach_behind_a_checkpoint() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x).sin(), self.second(x).cos()

    def do(runner: Any, module: nn.Module) -> Any:
        module.zero_grad()
        checkpoint(runner, X, use_reentrant=False)[0].sum().backward()
        assert module.second.weight.grad is None
        return module.first.weight.grad

    with on_ort(graphs=1):
        Both(Heads()).step(do)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_compiled_module_that_writes_to_buffers(reentrant: bool) -> None:
    """The averages count the second forward as well, as in eager PyTorch."""
    with on_ort(backwards=2):

        def do(runner: Any, module: nn.Module) -> Any:
            x = X.clone().requires_grad_()
            first = checkpoint(runner, x, use_reentrant=reentrant)
            (first * checkpoint(runner, x * 2, use_reentrant=reentrant)).sum().backward()
            return first, x.grad, module[1].num_batches_tracked.clone()

        module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.GELU(), spectral_norm(nn.Linear(4, 4)))
        Both(module).step(do)


@pytest.mark.skipif(not WHOLE_GRAPHS, reason="else autograd itself keeps what waits")
def test_what_hooks_keep_goes_with_the_result() -> None:
    before = {id(one) for one in alive(TrainingGraph)}
    with on_ort(graphs=1, forwards=2, idle=True):
        runner = compiled(_net())
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            results = [runner(X), runner(X)]
        (graph,) = [one for one in alive(TrainingGraph) if id(one) not in before]
        assert len(graph._runs) == 2 and all(run.state is not None for run in graph._runs.values())
        results.clear()
        assert len(graph._runs) == 0


@pytest.mark.skipif(not WHOLE_GRAPHS, reason="else autograd itself keeps what waits")
@pytest.mark.parametrize("pack", [lambda tensor: tensor.clone(), lambda tensor: None], ids=["copied", "dropped"])
def test_what_waits_is_small_and_goes_with_the_result(pack: Callable[[Tensor], Any]) -> None:
    before = {id(one) for one in alive(TrainingGraph)}
    with on_ort(graphs=1, forwards=2, idle=True):
        runner = compiled(_net())
        with saved_tensors_hooks(pack, lambda packed: packed):
            results = [runner(X), runner(X)]
        (graph,) = [one for one in alive(TrainingGraph) if id(one) not in before]
        assert len(graph._runs) == 2
        for run in graph._runs.values():
            assert run.state is None and len(run.args) == 7  # six parameters and the input; not the mask
        del results[0]
        assert len(graph._runs) == 1
        results.clear()
        assert len(graph._runs) == 0


def test_an_error_in_a_hook_leaves_nothing() -> None:
    def fail(tensor: Tensor) -> None:
        raise ValueError("a hook of the user's")

    before = {id(one) for one in alive(TrainingGraph)}
    with on_ort(graphs=1, idle=True):
        runner = compiled(_net())
        with saved_tensors_hooks(fail, fail), pytest.raises(ValueError, match="a hook of the user's"):
            runner(X)
        assert all(len(graph._runs) == 0 for graph in alive(TrainingGraph) if id(graph) not in before)


def test_hooks_that_copy_what_is_saved_for_views() -> None:
    """None of the results comes from autograd's node itself."""

    def views(x: Tensor) -> tuple[Tensor, Tensor]:
        middle = x.sin()
        return middle.unsqueeze(0), middle.view(-1)

    gradients = []
    for side in (compiled, lambda function: function):
        torch._dynamo.reset()
        x = torch.linspace(0, 1, 12).reshape(3, 4).requires_grad_()
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda packed: packed):
            results = side(views)(x)
        gradients.append(torch.autograd.grad(results[1].sum() + results[0].sum(), x))
    torch.testing.assert_close(*gradients)
