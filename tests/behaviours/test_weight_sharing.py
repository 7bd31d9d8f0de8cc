"""A parameter used in several places gets the sum of its gradients, once."""

from __future__ import annotations

import copy

import torch
from behaviours.check import call, compiled, on_ort, same_as_eager, same_module
from default_device import seeded
from torch import nn
from torch.nn import functional as F

IDS = torch.randint(0, 11, (2, 5), generator=seeded(0))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.mix(self.embedding(ids)).tanh()).flatten(0, 1), ids.flatten())


def test_tied_embeddings() -> None:
    model = Tied()
    same_as_eager(model, call(IDS), graphs=1)
    assert model.head.weight is model.embedding.weight and len(list(model.parameters())) == 3


def test_tied_embeddings_through_an_optimizer() -> None:
    model = Tied()
    reference = copy.deepcopy(model)
    with on_ort(graphs=1, forwards=5):
        for runner, module in ((compiled(model), model), (reference, reference)):
            optimizer = torch.optim.AdamW(module.parameters(), 0.01, eps=1e-5)
            for _ in range(5):
                optimizer.zero_grad()
                runner(IDS).backward()
                optimizer.step()
    same_module(model, reference)
    assert model.head.weight is model.embedding.weight


def test_weights_tied_to_something_computed() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.base.tanh() * 2
            return F.linear(F.linear(x, weight).relu(), weight) + F.linear(x, self.base.t())

    same_as_eager(Computed(), call(torch.randn(3, 4)), graphs=1)


def test_a_layer_used_several_times() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.norm(self.cell(x)).tanh() + x
            return x

    same_as_eager(Recurrent(), call(torch.randn(3, 4, requires_grad=True)), graphs=1)


def test_one_module_under_two_names() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"one": shared, "two": shared})

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["two"](self.parts["one"](x).sin())

    same_as_eager(Wrapper(), call(torch.randn(3, 4)), graphs=1)


def test_a_weight_that_is_a_view_of_another() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.table.chunk(2)
            return F.linear(F.linear(x, first), second) + F.linear(x, self.table[2:6])

    same_as_eager(Views(), call(torch.randn(3, 4)), graphs=1)


def test_a_parameter_shared_by_two_compiled_modules() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    references = copy.deepcopy((first, second))
    x = torch.randn(3, 4)
    with on_ort(graphs=2, forwards=2):
        compiled(first)(compiled(second)(x).sin()).sum().backward()
    references[0](references[1](x).sin()).sum().backward()
    same_module(first, references[0])
    same_module(second, references[1])
