"""Arguments whose channels or columns lie side by side enter a graph as they lie, not as a copy that PyTorch lays out first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import ON_CPU
from ops.harness import lower, trace
from torch import Tensor, nn

from ort_backend.lowering.memory_order import entering_order

_EMPTY = {
    "channels last": (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
    "voxels": (torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), (0, 2, 3, 4, 1)),
    "transposed": (torch.empty(4, 3).t(), (1, 0)),
    "matrices": (torch.empty(2, 4, 3).mT, (0, 2, 1)),
    "complex": (torch.empty(4, 3, dtype=torch.complex64).t(), None),
    "integers": (torch.empty(4, 3, dtype=torch.int64).t(), None),
    "heads": (torch.empty(2, 5, 4, 3).transpose(1, 2), None),
    "reversed": (torch.empty(2, 3, 4).permute(2, 1, 0), None),
    "with gaps": (torch.empty(8, 3)[::2].t(), None),
    "expanded": (torch.empty(3, 1).expand(3, 4), None),
    "contiguous": (torch.empty(3, 4), None),
    "a column": (torch.empty(1, 4).t(), None),
    "a size": (4, None),
}


@pytest.mark.parametrize("name", _EMPTY)
def test_the_order(name: str) -> None:
    argument, expected = _EMPTY[name]
    assert entering_order(argument) == (expected if ON_CPU else None)


@pytest.mark.skipif(not ON_CPU, reason="on a GPU PyTorch lays arguments out")
@pytest.mark.parametrize(
    ("function", "nodes"),
    [
        (lambda x, w: x @ w.t(), ["MatMul"]),
        (lambda x, w: torch.addmm(x.sum(0), x.t(), w), ["ReduceSum", "Gemm"]),
        (lambda x, w: w.t() * 2, ["Mul"]),
        (lambda x, w: w * 2, ["Transpose", "Mul"]),
    ],
    ids=["of what it is", "in a product", "transposed again", "as it is"],
)
def test_a_transpose_is_taken_in(function: Callable[[Tensor, Tensor], Tensor], nodes: list[str]) -> None:
    graph = lower(trace(function, [torch.randn(6, 4), torch.randn(4, 6).t()])).model.graph
    assert [node.op_type for node in graph if node.op_type != "Constant"] == nodes


class _Picture(nn.Module):
    """Convolutions, and products of matrices that lie by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, picture: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
        hidden = self.norm(self.second(self.first(picture).relu()))
        return self.last(hidden.mean((2, 3))) @ columns, hidden, picture * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_and_what_it_is_given(dtype: torch.dtype, dynamic: bool) -> None:
    torch.manual_seed(0)
    model: Any = _Picture().to(dtype=dtype, memory_format=torch.channels_last)
    model.last.weight = nn.Parameter(model.last.weight.detach().t().contiguous().t())
    calls = [
        call(
            torch.randn(n, 4, 6, n + 3).to(dtype=dtype, memory_format=torch.channels_last).requires_grad_(),
            torch.randn(7, 5).to(dtype).t().requires_grad_(),
        )
        for n in (3, 5)
    ]
    same_as_eager(model, *calls, dynamic=dynamic, python_ops=None, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_few_bits(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).to(dtype)
    of_bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    same_as_eager(lambda x: (x.float() * 2, x.view(of_bits)), call(x), train=False, python_ops=None, rtol=0, atol=0)


@pytest.mark.parametrize("size", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4, 4)])
def test_without_elements(size: tuple[int, ...]) -> None:
    calls = [call(torch.randn(*one).to(memory_format=torch.channels_last).requires_grad_()) for one in ((2, 3, 4, 4), size)]
    same_as_eager(lambda x: (x * 2, x.sum((2, 3))), *calls, dynamic=True, python_ops=None)


def test_other_strides_than_those_of_the_trace() -> None:
    """Guards of Dynamo's see to the strides; with symbolic ones what comes may lie in another order."""
    x = torch.randn(4, 6)
    calls = [call(one.clone().t().requires_grad_() if i % 2 else one.t().contiguous().requires_grad_()) for i, one in enumerate((x, x[:3], x[:2]))]
    same_as_eager(lambda x: (x.sin(), x @ x.t()), *calls, dynamic=True, python_ops=None)


def test_a_negated_view() -> None:
    def negated() -> Tensor:
        pairs = torch.view_as_complex(torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0)))
        return torch._neg_view(pairs.real.contiguous()).t()

    same_as_eager(lambda x: (x * 2, x.sum(0)), call(negated()), train=False, python_ops=None)
