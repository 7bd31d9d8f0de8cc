"""Parts and joins of tensors with a few numbers in a row are taken column by column."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import call, same_as_eager
from ops.harness import check, lower, trace

# What copies a row at a time.
_SLOW = {"Slice", "Split", "Pad", "Concat"}
LARGE, OTHER = (16, 256, 4), (5, 300, 4)


def halves(x: torch.Tensor) -> torch.Tensor:
    return x[..., :2] * x[..., 2:]


def columns(x: torch.Tensor) -> torch.Tensor:
    a, b, c, d = x.unbind(-1)
    return a * x[..., -1] + b * c - d


def corners(x: torch.Tensor) -> torch.Tensor:
    centre, size = x.split([2, 2], -1)
    return torch.cat([centre - size / 2, centre + size / 2], -1)


def every_second(x: torch.Tensor) -> torch.Tensor:
    return x[..., ::2] + x[..., 1::2]


def last_three(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., 1:], x[..., :1].sin()], -1)


FUNCTIONS = [halves, columns, corners, every_second, last_three]


def _with_gradient(function: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(function, x)
        return out, *pull(out.cos())

    return both


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_equals_eager(function: Callable[..., torch.Tensor], dynamic: bool) -> None:
    check(_with_gradient(function), torch.randn(LARGE), dynamic=dynamic, other=[torch.randn(OTHER)] if dynamic else None)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_goes_through_columns(function: Callable[..., torch.Tensor]) -> None:
    graph = lower(trace(function, [torch.randn(LARGE)])).model.graph
    assert any(node.op_type == "Gather" for node in graph)
    along_rows = [node for node in graph if node.op_type in _SLOW and node.attributes.get_int("axis", 0) not in (0, None)]
    assert not along_rows and not any(node.op_type in ("Slice", "Pad") for node in graph)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (1, 4)], ids=str)
def test_few_rows_stay_as_they_are(function: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
    graph = check(_with_gradient(function), torch.randn(shape)).model.graph
    assert all(node.op_type != "Transpose" for node in graph) or function is every_second


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.uint8], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, LARGE).to(dtype)
    check(lambda x: (x[..., 1], x[..., 1:3], torch.cat([x[..., 2:], x[..., :2]], -1), *x.unbind(-1)), x)


def test_joins_of_several_dtypes() -> None:
    check(lambda a, b: torch.cat([a, b], -1), torch.randn(4096, 2), torch.randint(0, 9, (4096, 3)))


def test_interleaved_rows_are_taken_as_cells() -> None:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * 0.6 - odd * 0.8, even * 0.8 + odd * 0.6], -1).flatten(-2)

    found = check(_with_gradient(rotated), torch.randn(8, 16, 64))
    assert not any(node.op_type == "Slice" for node in found.model.graph)
    check(_with_gradient(rotated), torch.randn(8, 16, 64), dynamic=True, other=[torch.randn(4, 24, 64)])
    check(_with_gradient(lambda x: x[..., 1:61:3] + x[..., 2:62:3]), torch.randn(8, 16, 64))  # no whole cells


def test_a_training_step_on_onnx_runtime_alone() -> None:
    def loss(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        overlap = (torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])).clamp(0)
        return (overlap[..., 0] * overlap[..., 1] - corners(boxes)[..., 3]).square().mean()

    same_as_eager(loss, call(torch.randn(LARGE, requires_grad=True), torch.randn(LARGE)), graphs=1)
