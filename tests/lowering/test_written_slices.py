"""Slices written over, in large tensors: eager's numbers, and what is written to is no copy of the whole, nor anybody else's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort
from ops.trained import check_training, needs_grad

SIZE = (2, 128, 512)
SLICES: dict[str, tuple[int, int, int, str]] = {  # axis, bounds, and what writes them
    "few_rows": (1, 8, 12, "ScatterElements"),
    "many_rows": (1, 8, 72, "ScatterND"),
    "most_rows": (1, 1, 127, "Concat"),
    "a_column": (2, 5, 6, "ScatterElements"),
    "columns_in_blocks": (2, 64, 192, "ScatterND"),
    "odd_columns": (2, 5, 200, "Concat"),
    "to_the_end": (1, -4, 2**63 - 1, "ScatterElements"),
    "images": (0, 1, 2, "ScatterND"),
}


@pytest.mark.cpu_only(reason="how they are written")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("kind", SLICES)
def test_slices(kind: str, dtype: torch.dtype, lower: Callable[..., Any]) -> None:
    axis, start, end, writes = SLICES[kind]
    x, part = torch.randn(SIZE).to(dtype), torch.randn(SIZE).to(dtype).transpose(0, axis)[start:end].transpose(0, axis).contiguous()
    lowered = lower(lambda x, part: torch.slice_scatter(x, part, axis, start, end), (x, part))
    assert [one for one in lowered.op_types if one in ("ScatterElements", "ScatterND", "Concat")] == [writes]
    assert torch.equal(lowered(x, part)[0], torch.slice_scatter(x, part, axis, start, end))


def test_small_tensors_are_put_together(lower: Callable[..., Any]) -> None:
    x, part = torch.randn(2, 64, 8), torch.randn(2, 1, 8)
    assert "Concat" in lower(lambda x, part: torch.slice_scatter(x, part, 1, 2, 3), (x, part)).op_types


@pytest.mark.cpu_only(reason="how they are written")
def test_selections(lower: Callable[..., Any]) -> None:
    x, part = torch.randn(SIZE), torch.randn(2, 512)
    lowered = lower(lambda x, part: torch.select_scatter(x, part, 1, -2), (x, part))
    assert "Concat" not in lowered.op_types
    assert torch.equal(lowered(x, part)[0], torch.select_scatter(x, part, 1, -2))


def _filled(part: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(SIZE)
    for i in range(4):
        x[:, 4 * i : 4 * i + 4, i : 64 + i] = part[..., :64] * (i + 1)
    x[:, 40:100] = part[:, :1]
    x[1, 3] = part[0, 0]
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_filled_part_by_part(dtype: torch.dtype) -> None:
    options = {"kernels": "onnxruntime"}
    check_training(lambda part: _filled(part).to(dtype) * 2, needs_grad(2, 4, 512), options=options)
    check_training(lambda x: torch.slice_scatter(x * 2, x[:, :2], 1, 5, 7), needs_grad(*SIZE, dtype=dtype), options=options)


def test_what_others_hold_stays_as_it_is() -> None:
    def written(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return torch.slice_scatter(x, part, 1, 8, 12)

    x, part, gradient = needs_grad(*SIZE), needs_grad(2, 4, 512), torch.randn(SIZE)
    before = x.detach().clone(), gradient.clone()
    with on_ort(graphs=1):
        runner = compiled(written)
        for _ in range(2):
            result = runner(x, part)
            got = torch.autograd.grad(result, (x, part), gradient)
    assert torch.equal(x, before[0]) and torch.equal(gradient, before[1])
    assert torch.equal(result, written(x, part))
    assert all(map(torch.equal, got, torch.autograd.grad(written(x, part), (x, part), gradient)))


def _between(x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    y = x * 2
    y[start:end] = 5
    y[:, start:end] *= 3
    y[1::2, start:end].copy_(y[:1, start:end])
    return y * x


@pytest.mark.parametrize("dynamic", [False, True])
def test_bounds_with_nothing_between_them(dynamic: bool) -> None:
    """As in Python: nothing is written. Put together, what lies in front of the start and behind the end would overlap."""
    with on_ort(graphs=range(1, 6)):
        runner = compiled(_between, dynamic=dynamic)
        for start, end in ((3, 1), (-2, 0), (9, 4), (-9, -8), (1, 3)):
            x, other = needs_grad(6, 5), needs_grad(6, 5)
            other.data.copy_(x)
            gradients = []
            for function, leaf in ((runner, x), (_between, other)):
                result = function(leaf, start, end)
                gradients.append((result.detach(), *torch.autograd.grad(result.sum(), leaf)))
            for got, expected in zip(*gradients, strict=True):
                torch.testing.assert_close(got, expected)
