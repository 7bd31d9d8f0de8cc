"""Real models train on ONNX Runtime as they do in eager PyTorch: losses, gradients, buffers and random state, step by step."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from behaviours.check import WHOLE_GRAPHS
from default_device import ON_CPU, random_state
from models import MODELS, loss_of

import ort_backend

STEPS = 10
# PyTorch's fused kernels on a GPU, for which ONNX Runtime has no backward. They draw what they drop, and draws keep their order.
ATTENTION = {f"aten::_scaled_dot_product_{kind}_attention{end}" for kind in ("flash", "efficient", "cudnn") for end in ("", "_backward")}
BY_PYTORCH = set() if ON_CPU else {*ATTENTION, "aten::native_dropout"}


@pytest.fixture(autouse=True)
def _trace_rnns() -> Iterator[None]:
    """Dynamo leaves nn.LSTM to eager PyTorch unless it is told to trace it."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


# Without training kernels the zoo has one of each kind.
@pytest.mark.parametrize("name", MODELS if WHOLE_GRAPHS else ("cnn", "lstm", "gpt2", "vit"))
def test_ten_adamw_steps_equal_eager(name: str) -> None:
    model, batch = MODELS[name]()
    model = model.to(torch.get_default_device())
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ort_training")
    # A gradient that is zero but for rounding (an attention key's bias) is scaled up by Adam until eps stops it.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (model, eager)]
    before = len(ort_backend.report().graphs)
    for step in range(STEPS):
        torch.manual_seed(step)
        inputs = batch()
        losses = []
        for module, optimizer in ((compiled, optimizers[0]), (eager, optimizers[1])):
            torch.manual_seed(step)
            optimizer.zero_grad()
            losses.append(loss_of(module(**inputs)))
            losses[-1].backward()
            state = random_state()
            if module is compiled:
                compiled_state = state
        assert torch.equal(compiled_state, state), f"step {step}: the random state differs"
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)
        _assert_same_gradients(model, eager, step)
        _assert_same_buffers(model, eager, step)
        for optimizer in optimizers:
            optimizer.step()
    _assert_ran_on_onnx_runtime(before)


def _assert_same_gradients(model: torch.nn.Module, eager: torch.nn.Module, step: int) -> None:
    close = 1e-4 * (1 + step)  # rounding moves the two apart with each of Adam's steps
    for (label, parameter), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), f"step {step}, {label}"
        if expected.grad is not None:
            atol = close * expected.grad.abs().max().item() + 1e-6
            torch.testing.assert_close(
                parameter.grad, expected.grad, rtol=close, atol=atol, msg=lambda text, label=label: f"step {step}, {label}: {text}"
            )


def _assert_same_buffers(model: torch.nn.Module, eager: torch.nn.Module, step: int) -> None:
    for (label, buffer), expected in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-4, atol=1e-5, msg=lambda text, label=label: f"step {step}, {label}: {text}")


def _assert_ran_on_onnx_runtime(before: int) -> None:
    graphs = [graph for graph in ort_backend.report().graphs[before:] if graph.kind == "training"]
    print(ort_backend.report())
    assert graphs, "nothing was compiled"
    assert sum(graph.counts.forward for graph in graphs) >= STEPS
    assert sum(graph.counts.backward for graph in graphs) >= STEPS
    assert [one for graph in graphs for one in graph.outside if not one.is_choice and one.operator not in BY_PYTORCH] == []
