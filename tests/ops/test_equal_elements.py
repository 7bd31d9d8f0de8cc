"""Which of several equal elements an operator takes: those that eager PyTorch takes, and so the gradient goes there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch_version import TORCH, TRACES_OTHER_QUANTILES

import ort_backend

_SELECTIONS = {
    "topk": (lambda x: torch.topk(x, 3), "aten::topk"),
    "topk, smallest, of columns": (lambda x: torch.topk(x, 3, dim=0, largest=False), "aten::topk"),
    "topk, in any order": (lambda x: torch.topk(x, 3, sorted=False), "aten::topk"),
    "kthvalue": (lambda x: torch.kthvalue(x, 2), "aten::kthvalue"),
    "sort": (torch.sort, "aten::sort"),
    "sort, descending": (lambda x: torch.sort(x, descending=True), "aten::sort"),
    "median": (lambda x: torch.median(x, dim=-1), None),
    "quantile": (lambda x: (x.quantile(0.3, dim=-1), x.argsort(stable=True)), "aten::sort"),
}


@pytest.mark.parametrize("shape", [(4, 7), (8, 64), (3, 2000)], ids=str)
@pytest.mark.parametrize("name", _SELECTIONS)
def test_takes_those_that_eager_takes(name: str, shape: tuple[int, ...]) -> None:
    if name == "quantile" and TORCH >= TRACES_OTHER_QUANTILES:
        pytest.skip("eager PyTorch computes it in another way than any backend gets it")
    select, kernel = _SELECTIONS[name]
    compiled = torch.compile(lambda x: tuple(select(x)), backend="ort_training", dynamic=False)
    for different in (1, 2, 5):
        data = torch.randint(0, different, shape).float()
        results, found = (_results_and_gradient(one, data) for one in (select, compiled))
        for result, other in zip(results, found, strict=True):
            torch.testing.assert_close(other, result)
    run_by_pytorch = {one.operator for graph in ort_backend.report().graphs for one in graph.outside}
    assert kernel is None or kernel in run_by_pytorch


@pytest.mark.parametrize("stable", [False, True])
def test_a_stable_sort_needs_no_kernel_of_pytorch(stable: bool) -> None:
    compiled = torch.compile(lambda x: x.sort(stable=stable), backend="ort_training", options={"kernels": "onnxruntime"})
    data = torch.randint(0, 3, (4, 50)).float()
    values, positions = compiled(data)
    expected = data.sort(stable=True)
    assert torch.equal(values, expected.values)
    assert not stable or torch.equal(positions, expected.indices)


def _results_and_gradient(select: Callable[[Tensor], tuple[Tensor, Tensor]], data: Tensor) -> list[Tensor]:
    x = data.clone().requires_grad_()
    values, positions = select(x)
    (values * torch.arange(values.numel()).reshape(values.shape)).sum().backward()
    assert x.grad is not None
    return [values.detach(), positions, x.grad]
