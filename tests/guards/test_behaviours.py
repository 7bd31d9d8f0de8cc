"""How many graphs common habits of users take: with a backend that only records, and with the real one, compared with eager."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_version import GUARDS_PARAMETERS, NEEDS_BACKEND, TORCH

from ort_backend import guards
from ort_backend.guards import records

Compile = Callable[..., Callable[..., Any]]


@pytest.fixture(params=["recording", pytest.param("ort_training", marks=NEEDS_BACKEND)])
def compiled(request: pytest.FixtureRequest, backend: Callable[..., Any]) -> Compile:
    if request.param == "recording":
        return lambda function, **settings: torch.compile(function, backend=backend, **settings)
    pytest.importorskip("onnxruntime")
    return lambda function, **settings: torch.compile(function, backend="ort_training", **settings)


def kinds() -> list[str | None]:
    """The causes so far; None is a first compile."""
    return [record.cause.kind if record.cause else None for record in records.all()]


class Net(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.second = torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 2)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.first(x)))) * self.factor


def pair() -> tuple[Net, Net]:
    torch.manual_seed(0)
    model = Net()
    return model, copy.deepcopy(model)


def same_step(f: Callable[..., Any], model: Net, eager: Net, x: torch.Tensor) -> None:
    """One forward and backward of both, with equal outputs and gradients, `None` where eager has `None`."""
    model.zero_grad(), eager.zero_grad()
    out, expected = f(x), eager(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    if expected.requires_grad:
        out.sum().backward(), expected.sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def optional(x: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, c: torch.Tensor | None) -> torch.Tensor:
    for part in (a, b, c):
        if part is not None:
            x = x + part
    return x * 2


def test_patterns_of_none(compiled: Compile) -> None:
    f, y = compiled(optional), torch.ones(3)
    patterns = [tuple(y.clone() if number >> place & 1 else None for place in range(3)) for number in range(8)]
    for pattern in (*patterns, *reversed(patterns)):
        torch.testing.assert_close(f(y, *pattern), optional(y, *pattern))
    assert len(records.all()) == 8  # one per pattern, and none for a pattern that comes back
    assert set(kinds()[1:]) == {"type"}


def test_number_of_arguments(compiled: Compile) -> None:
    def add(*xs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return sum((*xs, *named.values())) * 2

    f = compiled(add)
    for _ in range(2):
        for arguments in ((torch.ones(2),), (torch.ones(2), torch.ones(2).clone())):
            torch.testing.assert_close(f(*arguments), add(*arguments))
        torch.testing.assert_close(f(torch.ones(2), y=torch.ones(2)), add(torch.ones(2), y=torch.ones(2)))
    assert len(records.all()) == 3
    assert set(kinds()[1:]) <= {"length", "dict keys"}


def test_attribute_set_after_the_compile(compiled: Compile) -> None:
    model, eager = pair()
    f = compiled(model)
    for factor in (2.0, 3.0, 2.0):
        model.factor = eager.factor = factor
        same_step(f, model, eager, torch.ones(3, 4))
    assert kinds() in ([None, "python value"], [None, "python value", "python value"])


def test_requires_grad_of_an_input(compiled: Compile) -> None:
    model, _ = pair()
    f = compiled(model)
    for toggle in (False, True, False, True):
        x = torch.ones(3, 4, requires_grad=toggle)
        f(x).sum().backward()
        assert (x.grad is not None) == toggle
    assert kinds() == [None, "requires_grad"]


def test_a_counter_beside_an_input_that_wants_its_gradient_in_some_calls(compiled: Compile) -> None:
    model, _ = pair()
    f = compiled(model, dynamic=False)
    for call in range(6):
        model.factor = float(call)
        f(torch.ones(3, 4, requires_grad=call % 3 > 0)).sum().backward()
    assert [record.cause.source if record.cause else None for record in records.all()] == [None, "x.requires_grad", *["self.factor"] * 4]
    assert [(cause.kind, cause.count) for cause in guards.report().causes] == [("python value", 4), ("requires_grad", 1)]


def test_a_value_between_two_graphs_has_no_name_to_give_advice_with(compiled: Compile) -> None:
    @torch._dynamo.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x.mean()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x).sum(0) + outside(x)

    f = compiled(function, dynamic=False)
    for size in (3, 4, 5, 6):
        f(torch.ones(size, size))
    (cause,) = [cause for cause in guards.report().causes if "___stack" in cause.source]
    assert cause.remedy.code == "" and cause.remedy.text.startswith("___stack0 is Dynamo's name for what the calling line had computed where")


def test_freeze_and_unfreeze(compiled: Compile) -> None:
    model, eager = pair()
    f = compiled(model)
    for frozen in (False, True, False, True):
        for module in (model, eager):
            module.first.weight.requires_grad_(not frozen)
        same_step(f, model, eager, torch.ones(3, 4))
    assert kinds() == ([None, "requires_grad"] if TORCH >= GUARDS_PARAMETERS else [None])


def test_partly_frozen_and_unused(compiled: Compile) -> None:
    model, eager = pair()
    for module in (model, eager):
        module.first.requires_grad_(False)
        module.unused = torch.nn.Linear(4, 4)
    f = compiled(model)
    for _ in range(3):
        same_step(f, model, eager, torch.randn(3, 4))
    assert kinds() == [None]


def test_train_and_eval_by_turns(compiled: Compile) -> None:
    model = Net(dropout=0.5)
    f = compiled(model)
    for step in range(6):
        model.train(step % 2 == 0)
        f(torch.ones(3, 4))
    assert kinds() == [None, "training flag"]


def test_state_dict_and_replaced_parameters(compiled: Compile) -> None:
    model, eager = pair()
    f = compiled(model)
    x = torch.ones(3, 4)
    same_step(f, model, eager, x)
    state = {name: value * 2 for name, value in model.state_dict().items()}
    for module in (model, eager):
        module.load_state_dict(state)
    same_step(f, model, eager, x)
    for module in (model, eager):
        module.first.weight.data = torch.full((8, 4), 0.5)
    same_step(f, model, eager, x)
    assert kinds() == [None]
    for module in (model, eager):
        module.to(torch.float64)
    same_step(f, model, eager, x.double())
    assert kinds() == [None, "dtype"]


def test_random_batch(compiled: Compile) -> None:
    model, eager = pair()
    f = compiled(model)
    sizes = [random.Random(0).randint(1, 100) for _ in range(12)]
    for size in (*sizes, 1, 2, 100):
        same_step(f, model, eager, torch.randn(size, 4))
    assert len(records.all()) <= 3 and set(kinds()[1:]) <= {"shape", "shape condition"}


def test_random_batch_and_sequence(compiled: Compile) -> None:
    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm, self.linear = torch.nn.Embedding(11, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self.norm(self.embedding(input_ids))
            attention = torch.softmax(self.linear(hidden) @ hidden.transpose(1, 2), -1)
            return (attention @ hidden).mean(1)

    model = Encoder()
    f, draw = compiled(model), random.Random(1)
    for _ in range(10):
        batch = {"input_ids": torch.randint(0, 11, (draw.randint(2, 9), draw.randint(10, 40)))}
        torch.testing.assert_close(f(batch["input_ids"]), model(batch["input_ids"]), rtol=1e-4, atol=1e-5)
    assert len(records.all()) <= 3
    assert {record.cause.passed_as for record in records.all() if record.cause} <= {'batch["input_ids"].size(0)', 'batch["input_ids"].size(1)'}


def test_dynamic(compiled: Compile) -> None:
    f = compiled(lambda x: x * 2 + 1, dynamic=True)
    for shape in ((2, 3), (3, 4), (5, 2)):
        torch.testing.assert_close(f(torch.ones(shape)), torch.full(shape, 3.0))
    assert kinds() == [None]
    for shape in ((2, 3, 4), (3, 4, 5)):
        f(torch.ones(shape))
    assert kinds() == [None, "rank"]


def test_one_then_more(compiled: Compile) -> None:
    model, eager = pair()
    f = compiled(model)
    for size in (1, 5, 6, 1, 7):
        same_step(f, model, eager, torch.randn(size, 4))
    assert kinds() == [None, "shape"]
