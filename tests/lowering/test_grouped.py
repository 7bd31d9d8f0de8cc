"""Grouped matrix products against eager: groups of every length, none among them, and rows behind the last group."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  registers its operators
from torch import randn

from ort_backend.lowering import registry

aten = torch.ops.aten
operators = torch.ops.transformers
has_backward = pytest.mark.skipif(not hasattr(operators, "grouped_mm_fallback_backward"), reason="this transformers has no such operator")
ENDS = [[3, 3, 7], [0, 4, 6], [7, 7, 7], [0, 0, 0], [2, 5, 5]]


@has_backward
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_of_transformers(check: Callable, ends: list[int], dtype: torch.dtype) -> None:
    offs, weight = torch.tensor(ends, dtype=dtype), randn(3, 4, 5)
    also = (randn(9, 4), weight, torch.tensor([1, 8, 9], dtype=dtype))
    check(lambda x, w, o: operators.grouped_mm_fallback(x, w, o), randn(7, 4), weight, offs, also=also)
    also = (*also, randn(9, 5))
    check(lambda x, w, o, g: operators.grouped_mm_fallback_backward(x, w, o, g), randn(7, 4), weight, offs, randn(7, 5), also=also)


@has_backward
def test_of_one_group(check: Callable) -> None:
    inputs = (randn(7, 4), randn(1, 4, 5), torch.tensor([7]), randn(7, 5))
    check(lambda x, w, o, g: (operators.grouped_mm_fallback(x, w, o), *operators.grouped_mm_fallback_backward(x, w, o, g)), *inputs)


@pytest.mark.parametrize("ends", [[16, 16, 48], [0, 16, 48], [8, 24, 48]], ids=str)
def test_of_pytorch(check: Callable, ends: list[int]) -> None:
    """Its kernel takes bfloat16 and multiples of 8."""
    offs = torch.tensor(ends, dtype=torch.int32)

    def rows(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return aten._grouped_mm(x.bfloat16(), w.bfloat16().transpose(1, 2), o).float()

    def columns(g: torch.Tensor, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return aten._grouped_mm(g.bfloat16().t(), x.bfloat16(), o).float()

    check(rows, randn(48, 8), randn(3, 16, 8), offs, rtol=2e-2, atol=2e-2)
    check(columns, randn(48, 16), randn(48, 8), offs, rtol=2e-2, atol=5e-2)


@has_backward
def test_an_operator_of_a_package_is_found_by_name() -> None:
    for name, lowerings in registry.registered_by_name().items():
        package, _, operator = name.partition("::")
        schema = getattr(getattr(torch.ops, package), operator).default._schema
        for lowering in lowerings:
            assert list(inspect.signature(lowering.function).parameters)[1:] == [argument.name for argument in schema.arguments]
