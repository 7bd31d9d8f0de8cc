"""Compiled models are copied, pickled, saved and loaded, and train on."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort, same_module, same_tree
from default_device import seeded
from torch import nn

X = torch.randn(4, 3, generator=seeded(0))


class Net(nn.Module):
    """Can be pickled: a class at the top of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()


def train(runner: Any, module: nn.Module, steps: int = 2) -> torch.Tensor:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = runner(X).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="ort_training", fullgraph=True)
    return model


def test_a_model_compiled_in_place_trains() -> None:
    model = Net()
    reference = copy.deepcopy(model)
    with on_ort(graphs=1, forwards=2):
        same_tree(train(_in_place(model), model), train(reference, reference))
        same_module(model, reference)


@pytest.mark.parametrize("ran_before", [True, False])
def test_a_deep_copy_is_independent(ran_before: bool) -> None:
    model = Net()
    runner = compiled(model)
    with on_ort(graphs=1):
        if ran_before:
            train(runner, model)
        twin = copy.deepcopy(runner)
        own = twin._orig_mod
        assert own is not model
        reference, kept = copy.deepcopy(own), copy.deepcopy(model)
        same_tree(train(twin, own), train(reference, reference))
        same_module(own, reference)
        same_tree(dict(model.state_dict()), dict(kept.state_dict()))


@pytest.mark.parametrize("ran_before", [True, False])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_model_compiled_in_place_is_copied_and_trains_on(copier: Any, ran_before: bool) -> None:
    model = _in_place(Net())
    with on_ort(graphs=range(1, 3)):
        if ran_before:
            train(model, model)
        loaded = copier(model)
        reference = Net()
        reference.load_state_dict(model.state_dict())
        same_tree(train(_in_place(loaded), loaded), train(reference, reference))
        same_module(loaded, reference)


def test_a_compiled_module_is_saved_whole() -> None:
    model = Net()
    with on_ort(graphs=1):
        runner = compiled(model)
        train(runner, model)
        memory = io.BytesIO()
        torch.save(runner._orig_mod, memory)
        memory.seek(0)
        loaded = torch.load(memory, weights_only=False)
        expected = copy.deepcopy(model)
        same_tree(train(compiled(loaded), loaded), train(expected, expected))
        same_module(loaded, expected)


def test_a_state_dict_goes_back_and_forth() -> None:
    model, other = Net(), Net()
    with on_ort(graphs=1):
        runner = compiled(model)
        train(runner, model)
        memory = io.BytesIO()
        torch.save(runner.state_dict(), memory)
        memory.seek(0)
        state = torch.load(memory)
        compiled_other = compiled(other)
        compiled_other.load_state_dict(state)
        same_tree(dict(other.state_dict()), dict(model.state_dict()))
        same_tree(train(compiled_other, other), train(runner, model))
        same_module(other, model)


def test_an_optimizer_state_is_resumed() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(runner: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        runner(X).square().mean().backward()
        optimizer.step()

    with on_ort(graphs=1, forwards=3):
        runner = compiled(model)
        step(runner, optimizer)
        checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step(runner, optimizer)
        resumed = Net()
        resumed.load_state_dict(checkpoint[0])
        again = torch.optim.AdamW(resumed.parameters(), 0.01)
        again.load_state_dict(checkpoint[1])
        step(compiled(resumed), again)
    same_module(resumed, model)
