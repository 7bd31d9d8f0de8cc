"""`torch._check` of numbers that follow from values holds in the graph; Dynamo's guards see to all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort, same_tree

from ort_backend.errors import SessionError

CAPTURES = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


def exactly_four(x: torch.Tensor) -> torch.Tensor:
    places = x.nonzero()
    torch._check(places.size(0) == 4)
    return places + 3


def parts(x: torch.Tensor) -> torch.Tensor:
    first, second = x[:2, 0].long().tolist()
    torch._check(first + second == x.shape[0])
    torch._check(first * 2 > second, lambda: "the first part is too small")
    one, other = x.split([first, second])
    return one.sum() + (other * other).sum()


def rows(first: float, second: float) -> torch.Tensor:
    return torch.tensor([[first, 1.0], [second, 2.0], [0.5, 3.0], [0.0, 4.0], [0.0, 5.0]])


CHECKED: dict[str, tuple[Callable[..., Any], torch.Tensor, torch.Tensor, str]] = {
    "size": (exactly_four, torch.tensor([0, 1, 3, 4, 2, 0, 0]), torch.tensor([0, 1, 3, 4, 2, 1, 0]), "Runtime assertion failed"),
    "sum": (parts, rows(3, 2), rows(3, 1), "Runtime assertion failed|Split"),  # without training kernels the session that splits is first
    "of the user's": (parts, rows(3, 2), rows(1, 4), "the first part is too small"),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CHECKED)
def test_a_check_holds_in_the_graph(name: str, train: bool) -> None:
    function, good, bad, message = CHECKED[name]
    good, bad = (one.clone().requires_grad_(train and one.is_floating_point()) for one in (good, bad))
    with torch._dynamo.config.patch(CAPTURES), on_ort(graphs=1, idle=True) as ran:
        step = compiled(function)
        for _ in range(2):
            same_tree(step(good), function(good))
            with pytest.raises((RuntimeError, SessionError), match=message):
                step(bad)
        if good.requires_grad:
            got, want = (torch.autograd.grad(one(good), good)[0] for one in (step, function))
            torch.testing.assert_close(got, want)
    assert all("check" not in one.operator for one in ran.graphs[0].outside)


def test_a_strict_graph_has_no_checks() -> None:
    with torch._dynamo.config.patch(CAPTURES), on_ort(graphs=1):
        step = compiled(exactly_four, options={"strict": True})
        assert step(torch.tensor([0, 1, 3, 4, 2, 0, 0])).shape == (4, 1)
