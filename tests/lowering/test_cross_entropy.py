"""The backward of a cross entropy of logits: one operator, with eager's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from behaviours.check import single_session
from default_device import ON_CPU
from torch import randint, randn
from torch.nn import functional as F

import ort_backend
from ort_backend import joint, min_cut
from ort_backend.runtime import capabilities


@pytest.fixture(name="fused")
def _fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many pairs were fused, for each compiled graph."""
    counted: list[int] = []
    inherited = joint.fuse_cross_entropy

    def fuse(graph: Any) -> int:
        counted.append(inherited(graph))
        return counted[-1]

    monkeypatch.setattr(joint, "fuse_cross_entropy", fuse)
    torch._dynamo.reset()
    yield counted
    torch._dynamo.reset()


def _same_as_eager(
    loss: Callable[..., torch.Tensor], logits: torch.Tensor, target: torch.Tensor, *, dynamic: bool | None = None, error: float | None = None
) -> None:
    compiled = torch.compile(loss, backend="ort_training", dynamic=dynamic)
    gradients = []
    for function in (loss, compiled):
        x = logits.clone().requires_grad_()
        out = function(x, target)
        out.backward(torch.linspace(-1, 2, out.numel()).reshape(out.shape))
        gradients.append((out.detach(), x.grad))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=error, atol=error, equal_nan=True)


@single_session
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [(6, 5), (3, 5, 2, 4), (5,)], ids=["rows", "pictures", "one row"])
def test_it_is_fused(fused: list[int], reduction: str, weighted: bool, size: tuple[int, ...]) -> None:
    weight = torch.arange(1.0, 6.0) if weighted else None
    target = randint(0, 5, () if len(size) == 1 else (size[0], *size[2:]))
    _same_as_eager(lambda x, y: F.cross_entropy(x * 2, y, weight, reduction=reduction), randn(size), target)
    assert fused == [1]
    outside = ort_backend.report().graphs[-1].outside
    assert all(one.is_choice and not ON_CPU for one in outside)  # of a loss PyTorch's kernel for CUDA is one, ONNX Runtime's are many


@single_session
@pytest.mark.parametrize("ignored", [1, 4])
def test_ignored_rows_have_no_gradient(fused: list[int], ignored: int) -> None:
    target = randint(0, 5, (4,))
    target[:ignored] = 7
    _same_as_eager(lambda x, y: F.cross_entropy(x, y, ignore_index=7, reduction="sum"), randn(4, 5), target)
    _same_as_eager(lambda x, y: F.cross_entropy(x, y, ignore_index=7), randn(4, 5), target)
    assert fused == [1, 1]


@single_session
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("size", [(6, 5), (3, 5, 2, 4)], ids=["rows", "pictures"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_smoothed_labels(fused: list[int], reduction: str, size: tuple[int, ...], dynamic: bool) -> None:
    target = randint(0, 5, (size[0], *size[2:]))
    target[1] = 7

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x * 2, y, ignore_index=7, reduction=reduction, label_smoothing=0.1)

    _same_as_eager(loss, randn(size), target, dynamic=dynamic)
    assert fused == [1]
    assert "aten::_log_softmax_backward_data" not in {one.operator for one in ort_backend.report().graphs[-1].outside}


@single_session
def test_large_logits_go_through_no_kernel_of_pytorch_but_the_forwards(fused: list[int]) -> None:
    """A size at which PyTorch's kernel is the faster for the likelihood's gradient alone."""
    _same_as_eager(lambda x, y: F.cross_entropy(x * 2, y), randn(256, 1000), randint(0, 1000, (256,)))
    assert fused == [1]
    assert "aten::nll_loss_backward" not in {one.operator for one in ort_backend.report().graphs[-1].outside}


@single_session
def test_sizes_that_change(fused: list[int]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: F.cross_entropy(x * 2, y), backend="ort_training", dynamic=True)
    for rows in (4, 7):
        x, y = randn(rows, 5, requires_grad=True), randint(0, 5, (rows,))
        expected = torch.autograd.grad(F.cross_entropy(x * 2, y), x)
        torch.testing.assert_close(torch.autograd.grad(compiled(x, y), x), expected)
    assert fused == [1]


@single_session
@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y, x[0].detach().abs(), label_smoothing=0.1),
        lambda x, y: F.nll_loss(x.log_softmax(-1), y) + x.log_softmax(-1).square().mean(),
        lambda x, y: F.nll_loss(x.log_softmax(0), y),
    ],
    ids=["weighted label smoothing", "another reader", "another axis"],
)
def test_what_is_not_a_cross_entropy_alone_has_eagers_numbers(fused: list[int], loss: Callable[..., torch.Tensor]) -> None:
    _same_as_eager(loss, randn(5, 5), randint(0, 5, (5,)))
    assert len(fused) == 1


@pytest.mark.skipif(capabilities.has_training(), reason="about forward and backward in sessions of their own")
@pytest.mark.parametrize("is_behind_gelu", [False, True], ids=["", "gelu"])
@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_it_is_fused_between_sessions_but_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, expected: int, is_behind_gelu: bool
) -> None:
    counted: list[int] = []
    inherited = min_cut.fuse_cross_entropy
    monkeypatch.setattr(min_cut, "fuse_cross_entropy", lambda graph, **how: counted.append(inherited(graph, **how)))
    torch._dynamo.reset()
    error = 2e-2 if dtype is torch.bfloat16 else None

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(x @ x.mT) @ x if is_behind_gelu else x  # large enough for the backward to compute it again, behind the loss's gradient
        return F.cross_entropy(hidden.to(dtype), y, label_smoothing=0.1)

    rows = 512 if is_behind_gelu else 6
    _same_as_eager(step, 0.1 * randn(rows, 5), randint(0, 5, (rows,)), error=error)
    assert sum(counted) == expected
