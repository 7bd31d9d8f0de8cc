"""Gradients that are a few elements among zeros: how they are made, with eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled, same_gradients, same_tree, single_session, twin
from default_device import seeded

import ort_backend
from ort_backend import joint
from ort_backend.lowering.passes import zero_scatters

pytestmark = [single_session, pytest.mark.cpu_only(reason="the pass is for the CPU")]

LARGE = torch.randn(8, 1024, 40, generator=seeded(0))

FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "max": lambda x: (x * 2).max(2).values,
    "max_in_the_middle": lambda x: (x * 2).view(8, 1024, 4, 10).max(-2).values,
    "topk": lambda x: (x * 2).topk(3, -1).values,
    "sort": lambda x: (x * 2).sort(-1).values,
    "gather": lambda x: (x * 2).gather(2, (x[:, :, :3].abs() * 9).long().clamp(max=39)),
}


@pytest.fixture(name="rewritten")
def _rewritten(counted: Callable[..., list[int]]) -> list[int]:
    """How many nodes each run of the pass rewrote."""
    return counted("put_into_zeros", zero_scatters.put_into_zeros, joint)


def _check(step: Callable[[torch.Tensor], Any], function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    one, other = twin(x).requires_grad_(), twin(x).requires_grad_()
    results = step(one), function(other)
    same_tree(*results)
    for result in results:
        (result * torch.arange(result.shape[-1])).sum().backward()
    same_gradients(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_large_gradients(rewritten: list[int], kind: str, dtype: torch.dtype) -> None:
    x = LARGE.to(dtype) if dtype is not torch.bfloat16 else LARGE.argsort(2).to(dtype)  # no two alike
    _check(compiled(FUNCTIONS[kind]), FUNCTIONS[kind], x)
    if dtype is torch.float32:
        assert rewritten == [1]
        assert "ort_training::put_into_zeros" in {one.operator for one in ort_backend.report().graphs[-1].outside}


def test_small_ones_stay_on_onnx_runtime(rewritten: list[int]) -> None:
    _check(compiled(FUNCTIONS["max"]), FUNCTIONS["max"], LARGE[:, :8])
    assert rewritten == [0] and not ort_backend.report().graphs[-1].outside


def test_sizes_that_change(rewritten: list[int]) -> None:
    step = compiled(FUNCTIONS["topk"], dynamic=None)
    for rows in (1024, 1000, 900):
        _check(step, FUNCTIONS["topk"], LARGE[:, :rows])
    assert rewritten == [1, 1]


def test_zeros_that_something_else_reads_stay(rewritten: list[int]) -> None:
    index = LARGE[:, :, :3].argsort(2)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = x.new_zeros(8, 1024, 40)
        return zeros.scatter(2, index, x[:, :, :3] * 2), zeros + 1

    with torch.no_grad():
        same_tree(compiled(function)(LARGE), function(LARGE))
    assert rewritten == [0]


def test_what_is_put_where_no_gradient_is_wanted(rewritten: list[int]) -> None:
    index = LARGE[:, :, :3].argsort(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(8, 1024, 40).scatter(2, index, x * 2)  # of which it takes the first three

    with torch.no_grad():
        same_tree(compiled(function)(LARGE), function(LARGE))
    assert rewritten == [1]
