"""Large selections by masks: by the bits of the elements, with eager's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from behaviours.check import call, compiled, same_as_eager, same_gradients, same_tree, twin
from default_device import seeded
from torch.nn import functional as F

import ort_backend
from ort_backend.lowering.kernels.selections import IMPLEMENTATIONS, INTO, LARGE

pytestmark = pytest.mark.cpu_only(reason="for processors")

aten = torch.ops.aten

SHAPES = {"one_part": (LARGE,), "parts": (3, 700, 512), "small": (40, 5)}
NUMBERS: list[Any] = [0.0, -0.0, 2, True, math.inf, math.nan, torch.tensor(1.5, dtype=torch.float64), torch.tensor(3)]


# In half precision, where a sum or a softmax is rounded at other places.
ROUGHLY: dict[str, Any] = {"rtol": 0.1, "atol": 0.02}


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 7, dtype=dtype)


def _same(given: torch.Tensor, expected: torch.Tensor) -> None:
    """With the bits of the same numbers, zeros' signs among them."""
    assert given.dtype is expected.dtype and torch.equal(given.isnan(), expected.isnan())
    for one in (torch.nan_to_num, torch.signbit):
        assert torch.equal(one(given), one(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", SHAPES)
def test_the_kernels_select_what_pytorch_selects(size: str, dtype: torch.dtype) -> None:
    one, other = (torch.randn(SHAPES[size], generator=seeded(i)).to(dtype) for i in range(2))
    for tensor in (one, other.flip(0)):  # where the other holds something else
        tensor.view(-1)[:4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    mask = torch.rand(SHAPES[size], generator=seeded(2)) > 0.5
    pairs = [
        (one, other),
        (one, other[:1]),
        (2.5, torch.tensor(-1.0)),
        (torch.tensor(3.0), 0.0),
        (one.to(torch.float64), other),
        *((one, n) for n in NUMBERS),
        *((n, one) for n in NUMBERS),
    ]
    if one.dim() > 1:
        pairs.append((one.transpose(0, 1).contiguous().transpose(0, 1), other))
    for yes, no in pairs:
        expected = torch.where(mask, yes, no)
        where = IMPLEMENTATIONS[aten.where.self]
        _same(where(mask, yes, no), expected)
        _same(INTO[where](_empty, mask, yes, no), expected)
    for value in NUMBERS:
        for chosen in (mask, mask[:1]):
            fill = IMPLEMENTATIONS[aten.masked_fill.Scalar]
            _same(fill(one, chosen, value), one.masked_fill(chosen, value))
            _same(INTO[fill](_empty, one, chosen, value), one.masked_fill(chosen, value))


def _assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x * y
    result[y < 0] = 0
    result[x < 0] = y.mean()
    return result


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "where": lambda x, y: torch.where(x > 0, x * y, y.exp()),
    "number": lambda x, y: torch.where(x > 0, x.sqrt(), -1.0) + torch.where(y > 0.5, 2.0, y),
    "masked_fill": lambda x, y: (x * y).masked_fill(y < 0, 3.0),
    "divergence": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="none") * x,
    "step": lambda x, y: torch.heaviside(x.detach(), y.detach()) * x + y,
    "assigned": _assigned,
    "clamped": lambda x, y: x.clamp(-1, 1) * torch.maximum(x, y),
}


def _selects() -> bool:
    """Whether the last graph has selections that PyTorch runs."""
    return any(one.operator.startswith(("aten::where", "aten::masked_fill")) for one in ort_backend.report().graphs[-1].outside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_large_selections_in_a_graph(kind: str, dtype: torch.dtype) -> None:
    x, y = (torch.randn(8, 256, 128, generator=seeded(i)).to(dtype).requires_grad_() for i in range(2))
    same_as_eager(FUNCTIONS[kind], call(x, y), graphs=1, **(ROUGHLY if dtype is torch.bfloat16 else {}))
    assert _selects()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_numbers_assigned_by_masks(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole, rows = x.clone(), x.clone()
        whole[mask], rows[mask[0]] = 1, number
        return whole, rows

    x = (torch.randn(5, 5, generator=seeded(0)) * 2).to(dtype)
    same_as_eager(function, call(x, torch.rand(5, 5, generator=seeded(1)) > 0.5, x[0, 0]), graphs=1)


def test_small_ones_and_broadcast_masks_stay_on_onnx_runtime() -> None:
    x, y = (torch.randn(8, 256, 128, generator=seeded(i), requires_grad=True) for i in range(2))
    for function in (lambda x, y: (x[:1] * y[:1]).masked_fill(y[:1] < 0, 3.0), lambda x, y: (x * y).masked_fill(y[:, :1, :1] < 0, 3.0)):
        same_as_eager(function, call(x, y), graphs=1)
        assert not _selects()


def test_sizes_that_change() -> None:
    step, results = compiled(FUNCTIONS["masked_fill"], dynamic=None), []
    for rows in (256, 300, 240):
        x, y = (torch.randn(8, rows, 160, generator=seeded(i)) for i in range(2))
        for function in (step, FUNCTIONS["masked_fill"]):
            one, other = twin(x).requires_grad_(), twin(y).requires_grad_()
            results.append((function(one, other), one))
            results[-1][0].square().sum().backward()
        same_tree(results[-2][0], results[-1][0])
        same_gradients(results[-2][1], results[-1][1])
    assert _selects()
