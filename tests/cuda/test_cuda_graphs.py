"""CUDA graphs: sessions that run over the same memory at every call. On the CPU there is nothing to capture, but the memory can be seen."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ort_backend
from ort_backend import compiler, target_choice
from ort_backend.runtime import capabilities
from ort_backend.runtime.captured_run import CapturedRun

CAPTURED = {"cuda_graphs": True}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU's sessions run as captured ones would; gets the name of a session whenever a run is captured anew."""
    taken: list[str] = []
    original = CapturedRun._bind

    def bind(run: CapturedRun, tensors: Any) -> None:
        taken.append(run._session.name.rpartition(".")[2])
        original(run, tensors)

    monkeypatch.setattr(target_choice, "_can_capture", lambda provider: True)
    monkeypatch.setattr(CapturedRun, "_bind", bind)
    return taken


def _pair() -> tuple[nn.Module, nn.Module, Callable[..., Any]]:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    own = copy.deepcopy(eager)
    return eager, own, torch.compile(own, backend="ort_training", options=CAPTURED)


def _same_gradients(own: nn.Module, eager: nn.Module) -> None:
    for parameter, expected in zip(own.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_a_training_loop_settles(captures: list[str]) -> None:
    eager, own, compiled = _pair()
    optimizers = [torch.optim.AdamW(one.parameters()) for one in (own, eager)]
    after = []
    for step in range(6):
        x = torch.randn(3, 8)
        for module, optimizer in zip((compiled, eager), optimizers, strict=True):
            torch.manual_seed(step)
            module(x).square().mean().backward()
            optimizer.step()
        _same_gradients(own, eager)
        for optimizer in optimizers:
            optimizer.zero_grad()
        after.append(len(captures))
    assert after[1:] == [4] * 5, captures  # forward and backward, and both again when the second batch lay elsewhere
    graph = ort_backend.report().graphs[-1]
    assert graph.captured_sessions == graph.sessions == 2


def test_pending_forwards_keep_what_they_saved(captures: list[str]) -> None:
    eager, own, compiled = _pair()
    batches = [torch.randn(3, 8) for _ in range(3)]
    for _ in range(3):
        for module in (compiled, eager):
            torch.manual_seed(1)
            losses = [module(x).square().mean() for x in batches]
            for loss in reversed(losses):
                loss.backward()
        _same_gradients(own, eager)
        own.zero_grad()
        eager.zero_grad()
    settled = len(captures)
    losses = [compiled(x).square().mean() for x in batches]
    for loss in losses:
        loss.backward()
    assert len(captures) == settled


def test_results_and_gradients_that_are_kept_stay_as_they_were(captures: list[str]) -> None:
    eager, own, compiled = _pair()
    own.eval(), eager.eval()
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(4):
        x = torch.randn(3, 8)
        kept.append((compiled(x), eager(x)))
        for result in kept[-1]:
            result.sum().backward()  # gradients add up: those of the first step are held when the second comes
        _same_gradients(own, eager)
    for result, expected in kept:
        torch.testing.assert_close(result, expected)


def test_parameters_that_move_are_read_where_they_are(captures: list[str]) -> None:
    eager, own, compiled = _pair()
    own.eval(), eager.eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))
        for module in (own, eager):
            module[0].weight.data = module[0].weight.data.clone() * 2
        torch.testing.assert_close(compiled(x), eager(x))
        own[0].weight.add_(1)  # in place: no new capture
        eager[0].weight.add_(1)
        before = len(captures)
        torch.testing.assert_close(compiled(x), eager(x))
        assert len(captures) == before


def test_inputs_that_are_not_contiguous_and_masks(captures: list[str]) -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, x.exp() * 2, x.sin()).cumsum(0)

    compiled = torch.compile(masked, backend="ort_training", options=CAPTURED)
    for _ in range(3):
        x, mask = torch.randn(6, 4).t(), torch.rand(6, 4).t() > 0.5
        torch.testing.assert_close(compiled(x, mask), masked(x, mask))
    assert captures


def test_sizes_that_change_are_not_captured(captures: list[str]) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    compiled = torch.compile(module, backend="ort_training", options=CAPTURED, dynamic=True)
    for size in (3, 5, 7):
        x = torch.randn(size, 8)
        torch.testing.assert_close(compiled(x), module(x))
    assert not captures


def test_arguments_whose_size_changes_are_not_captured(captures: list[str]) -> None:
    """Though no result has such a size."""

    def gram(x: Tensor) -> Tensor:
        return (x.t() @ x).relu()

    compiled = torch.compile(gram, backend="ort_training", options=CAPTURED)
    for size in (7, 5, 3):
        x = torch.randn(size, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), gram(x))
    assert not captures


def test_a_run_that_cannot_be_captured_runs_plainly(captures: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As where a kernel waits for the device, which only shows when it is tried."""

    def failing(run: CapturedRun, tensors: Any) -> None:
        bind(run, tensors)
        run._names = (["no such input"], run._names[1])

    bind = CapturedRun._bind
    monkeypatch.setattr(CapturedRun, "_bind", failing)
    eager, own, compiled = _pair()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            x = torch.randn(3, 8)
            for module in (compiled, eager):
                torch.manual_seed(step)
                module(x).square().mean().backward()
            _same_gradients(own, eager)
    assert sorted(set(captures)) == ["backward", "forward"] and len(captures) == 2
    assert caplog.text.count("runs without a CUDA graph") == 2, caplog.text


def test_on_the_cpu_the_option_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    target_choice._warned.clear()
    module, x = nn.Linear(8, 4), torch.randn(3, 8)
    with caplog.at_level(logging.WARNING):
        result = torch.compile(module, backend="ort_training", mode="reduce-overhead")(x)
    torch.testing.assert_close(result, module(x))
    assert "the CPUExecutionProvider has none to capture" in caplog.text
    graph = ort_backend.report().graphs[-1]
    assert graph.captured_sessions == 0
    assert graph.sessions == (1 if capabilities.has_training() else 2)


@pytest.mark.parametrize("value", ["1", True])
def test_the_providers_own_option_is_an_error_that_names_ours(value: object) -> None:
    options = {"provider_options": {"enable_cuda_graph": value}}
    with pytest.raises(Exception, match="cuda_graphs"):
        torch.compile(nn.Linear(2, 2), backend="ort_training", options=options)(torch.randn(3, 2))


def test_many_sessions_are_warned_of(captures: list[str], caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(6):
            product = (x @ x) @ (x + x.T)
            x = torch.linalg.matrix_exp(nn.functional.layer_norm(product, (8,)).softmax(-1) @ product)  # which stays in PyTorch
        return x

    compiler._warned.clear()
    with caplog.at_level(logging.WARNING, "ort_backend"):
        torch.compile(function, backend="ort_training", options=CAPTURED)(torch.rand(8, 8))
    (warning,) = [record.message for record in caplog.records if record.message.startswith("cuda_graphs:")]
    assert "sessions" in warning and "aten::linalg_matrix_exp" in warning
