"""Tensors that a model makes from Python numbers are constants of the graph, whatever their dtype."""

from __future__ import annotations

import pytest
import torch

import ort_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("values", [[], [1, 0, 2], list(range(20))], ids=len)
def test_a_literal(dtype: torch.dtype, values: list[int]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        literal = torch.tensor(values, dtype=dtype)
        return torch.cat([x.to(dtype), literal]), x.square().sum()

    x = torch.tensor([3.0, 1.0], requires_grad=True)
    before = len(ort_backend.report().graphs)
    results = torch.compile(function, backend="ort_training", fullgraph=True)(x)
    results[1].backward()
    assert torch.equal(results[0], function(x)[0]) and results[0].dtype == dtype
    assert x.grad.tolist() == [6.0, 2.0]
    assert len(ort_backend.report().graphs) == before + 1
