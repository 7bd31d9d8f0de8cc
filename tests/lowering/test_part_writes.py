"""Writes to parts of parts of a tensor, and with steps: one call, eager's numbers, and nobody else's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import WHOLE_GRAPHS
from ops.trained import check_training, needs_grad
from torch_version import NEWER_TRACES, TORCH

import ort_backend
from ort_backend.lowering.kernels import part_writes
from ort_backend.lowering.passes import part_writes as joining

SIZE = (4, 64, 256)


def _calls() -> int:
    return sum(one.count for one in ort_backend.report().graphs[-1].outside if one.operator == "ort_training::write_parts")


def _interleaved(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[..., ::2] = part
    y[..., 1::2] = x[..., 1::2] * 2
    return y


def _padded(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, 1:-1, 2:130] = part[:, 2:]
    y[1, 3] = part[0, 0, :1]
    y[-1, :, 5] = 1
    y[0, ::3, -7:] = part[0, :22, :7].to(torch.float64)
    return y


def _read_between(x: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    y[:, ::2] = 3
    z = y * 3
    y[:, 1::2, ::2] += part[:, ::2]
    y[2] *= z[1]
    return y, z


def _to_an_argument(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    buffer = x.detach().clone()
    buffer[:, :, ::2] = part
    return buffer * x


def _through_views(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    y = x * 3
    y.transpose(1, 2)[:, ::2, 1:] = part.transpose(1, 2)[:, :, 1:]
    y.view(-1, 256)[3:9, 1::2] = part[0, 3:9]
    return y


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_LARGER", joining.LARGE)


@pytest.mark.cpu_only(reason="the call")
@pytest.mark.parametrize(
    ("function", "calls"),
    [(_interleaved, 1), (_padded, 2), (_read_between, 5), (_to_an_argument, 1), (_through_views, 4)],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_training(function: Callable[..., torch.Tensor], calls: int) -> None:
    check_training(function, needs_grad(*SIZE), needs_grad(4, 64, 128), outside=["ort_training::write_parts"])
    assert _calls() == calls or (_calls() and not WHOLE_GRAPHS) or (_calls() > calls and TORCH >= NEWER_TRACES)  # of one half, some are left out


@pytest.mark.cpu_only(reason="the call")
def test_what_is_written_to_is_left_as_it_was() -> None:
    x, part = torch.randn(SIZE), torch.randn(4, 64, 128)
    before = x.clone()

    def write(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[..., ::2] = part
        return y

    found = torch.compile(write, backend="ort_training")(x, part)
    assert torch.equal(found, write(x, part)) and torch.equal(x, before) and _calls() == 1


def test_an_argument_that_is_written_to() -> None:
    def write(buffer: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        buffer[:, 1:, ::2] = part[:, 1:]
        return buffer.sum()

    buffer, part = torch.randn(SIZE), torch.randn(4, 64, 128)
    other = buffer.clone()
    assert torch.allclose(torch.compile(write, backend="ort_training")(buffer, part), write(other, part), rtol=1e-4)
    assert torch.equal(buffer, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    def write(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 2:, ::2] = part[:, 2:]
        return y

    x, part = torch.randn(SIZE).to(dtype), torch.randn(4, 64, 128).to(dtype)
    assert torch.equal(torch.compile(write, backend="ort_training")(x, part), write(x, part))


@pytest.mark.cpu_only(reason="the call")
def test_changing_sizes() -> None:
    compiled = torch.compile(_interleaved, backend="ort_training")
    for rows in (64, 96, 70):
        x, part = torch.randn(4, rows, 256), torch.randn(4, rows, 128)
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(part, 1)
        assert torch.equal(compiled(x, part), _interleaved(x, part))
    assert _calls() == 1


def test_onnxruntime_alone_where_that_is_asked_for() -> None:
    check_training(_interleaved, needs_grad(*SIZE), needs_grad(4, 64, 128), options={"kernels": "onnxruntime"})
    assert _calls() == 0


def test_numbers_of_views() -> None:
    view = part_writes.View
    assert part_writes.flat([[view(1, 0, 9, 2)], [view(0, 3, 0, 0), view(0, 1, 5, 1)]]) == [1, 1, 0, 9, 2, 2, 0, 3, 0, 0, 0, 1, 5, 1]
