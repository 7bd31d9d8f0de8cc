"""Compiled optimizer steps, and the operators on lists of tensors that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort
from default_device import ON_CPU
from torch import nn

from ort_backend.lowering.tracing import foreach

OPERATORS = {str(operator): (operator, decomposition) for operator, decomposition in foreach.decompositions().items()}


def argument(kind: str) -> Any:
    """A value for an argument of that type; square, since one of the operators is a matrix product."""
    made = {"List[Tensor]": [torch.rand(3, 3) + 0.2, torch.rand(2, 2) + 0.2], "List[number]": [0.3, 0.7], "Tensor": torch.tensor(0.6), "number": 0.7}
    return made[kind]


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_each_tensor_gets_what_the_whole_list_gets(name: str) -> None:
    operator, decomposition = OPERATORS[name]
    rounding = 0 if ON_CPU else 1e-6  # CUDA's kernel for lists multiplies by the inverse of a divisor
    given = [argument(str(one.type)) for one in operator._schema.arguments if not one.has_default_value()]
    torch.testing.assert_close(decomposition(*given), list(operator(*given)), rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("name", ["add", "sub"])
def test_a_multiple_of_the_other_list(name: str) -> None:
    both = argument("List[Tensor]"), argument("List[Tensor]")
    function = getattr(torch, f"_foreach_{name}")
    with on_ort(graphs=1):
        torch.testing.assert_close(compiled(lambda x, y: function(x, y, alpha=0.5))(*both), function(*both, alpha=0.5))


OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "adamw": lambda p, foreach: torch.optim.AdamW(p, 0.01, foreach=foreach),
    "adam": lambda p, foreach: torch.optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1, foreach=foreach),
    "momentum": lambda p, foreach: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=foreach),
    "rmsprop": lambda p, foreach: torch.optim.RMSprop(p, 0.01, centered=True, foreach=foreach),
    "radam": lambda p, foreach: torch.optim.RAdam(p, foreach=foreach),
    "adagrad": lambda p, foreach: torch.optim.Adagrad(p, foreach=foreach),
    "adamax": lambda p, foreach: torch.optim.Adamax(p, foreach=foreach),
    "rprop": lambda p, foreach: torch.optim.Rprop(p, foreach=foreach),
}


def trained(name: str, *, foreach: bool, compile_it: bool) -> list[torch.Tensor]:
    """The parameters behind three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = OPTIMIZERS[name](model.parameters(), foreach)
    step = compiled(optimizer.step, fullgraph=False) if compile_it else optimizer.step
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        step()
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_compiled_optimizer(name: str, foreach: bool) -> None:
    with on_ort(graphs=range(1, 4)):
        found = trained(name, foreach=foreach, compile_it=True)
    torch.testing.assert_close(found, trained(name, foreach=foreach, compile_it=False))
