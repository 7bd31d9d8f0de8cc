"""Losses against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from default_device import ON_CPU
from torch import randint, randn
from torch.nn import functional as F
from torch_version import MORE_IS_SYMBOLIC, TORCH

import ort_backend
from ort_backend.runtime import capabilities

aten = torch.ops.aten
reductions = pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])


@reductions
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [((7, 5), (3, 5)), ((2, 5, 3, 4), (3, 5, 3, 4))], ids=["rows", "pictures"])
def test_negative_log_likelihood(check: Callable, reduction: int, weighted: bool, sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def sample(size: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        target = randint(0, 5, (size[0], *size[2:]))
        target[1] = -100
        x = randn(size)
        x[1, 0] = -torch.inf  # an ignored row must not turn into nan
        return torch.tensor(2.3), randn(target.shape if reduction == 0 else ()), x, target, *([torch.arange(1.0, 6.0)] if weighted else [])

    forward, backward = (aten.nll_loss_forward, aten.nll_loss_backward) if len(sizes[0]) == 2 else (aten.nll_loss2d_forward, aten.nll_loss2d_backward)

    def both(
        total: torch.Tensor, g: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        result, total_weight = forward(x, target, weight, reduction, -100)
        found = (result, total_weight, backward(g, x, target, weight, reduction, -100, total))
        return found if ON_CPU or reduction else found[::2]  # without a reduction CUDA's kernel does not write the total weight

    check(both, *sample(sizes[0]), also=sample(sizes[1]))


@reductions
def test_negative_log_likelihood_of_one_row(check: Callable, reduction: int) -> None:
    def both(g: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *aten.nll_loss_forward(x, target, None, reduction, -100), aten.nll_loss_backward(
            g, x, target, None, reduction, -100, torch.tensor(1.0)
        )

    check(both, randn(()), randn(5), torch.tensor(2))


def test_everything_ignored(check: Callable) -> None:
    target = torch.full((4,), -100)
    check(lambda x, t: aten.nll_loss_forward(x, t, None, 1, -100), randn(4, 5), target)
    check(lambda g, x, t: aten.nll_loss_backward(g, x, t, None, 1, -100, torch.tensor(0.0)), randn(()), randn(4, 5), target)


@reductions
def test_what_is_ignored_is_a_size(check: Callable, reduction: int) -> None:
    def loss(x: torch.Tensor, target: torch.Tensor, g: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ignored = x.shape[1]
        out, pull = torch.func.vjp(lambda x: F.cross_entropy(x, target, ignore_index=ignored, reduction=("none", "mean", "sum")[reduction]), x)
        backward = aten.nll_loss_backward(g, x, target, None, reduction, ignored, total)
        return out, *pull(out.cos()), *aten.nll_loss_forward(x, target, None, reduction, ignored), backward

    def sample(rows: int, classes: int) -> tuple[torch.Tensor, ...]:
        target = torch.tensor([classes, *range(1, rows)])
        return randn(rows, classes), target, randn(rows if reduction == 0 else ()), torch.tensor(2.3)

    check(loss, *sample(4, 5), also=sample(3, 7))


@pytest.mark.parametrize("dim", [2, 4])
def test_cross_entropy_needs_no_dense_gradient_of_the_likelihood(check: Callable, dim: int) -> None:
    def loss(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(lambda x: F.cross_entropy(x, target, label_smoothing=0.0), x)
        return out, *pull(out.cos())

    size = (4, 5) if dim == 2 else (4, 5, 3, 3)
    target = randint(0, 5, (4, *size[2:]))
    target[0] = -100
    lowered = check(loss, randn(size), target, also=(randn(2, *size[1:]), target[:2]))
    assert lowered.op_types.count("ScatterElements") == 1 and "ConstantOfShape" not in lowered.op_types


def test_a_gradient_of_known_weight_crashes_nothing(check: Callable) -> None:
    """1 / 2 times a cast of bools: ONNX Runtime's DivMulFusion crashes there."""

    def gradient(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.nll_loss_backward(torch.ones(()), x, target, None, 1, -100, torch.tensor(2.0))

    check(gradient, randn(4, 5), randint(0, 5, (4,)))


def _of_probabilities(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, y.softmax(-1))


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
        F.soft_margin_loss,
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        _of_probabilities,
        lambda x, y: F.cross_entropy(x, y.argmax(-1), label_smoothing=0.1),
        lambda x, y: F.cosine_embedding_loss(x, y, y[:, 0].sign()),
        lambda x, y: F.poisson_nll_loss(x, y),
        lambda x, y: F.margin_ranking_loss(x[:, 0], y[:, 0], y[:, 1].sign()),
    ],
)
def test_losses_that_are_decomposed(check: Callable, loss: Callable) -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(lambda x: loss(x, y), x)
        return out, *pull(torch.ones_like(out))

    is_symbolic = loss is not _of_probabilities or TORCH >= MORE_IS_SYMBOLIC
    check(both, randn(4, 5), torch.rand(4, 5), also=(randn(3, 5), torch.rand(3, 5)) if is_symbolic else None)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (3, 1)], ids=str)
def test_margins_of_several_labels(reduction: str, shape: tuple[int, ...]) -> None:
    """Labels end at the first -1, and what stands behind it does not count. Compiled, as PyTorch's decomposition is above the operator's trace."""
    width, rows = shape[-1], shape[0] if len(shape) > 1 else 1
    counts = torch.arange(rows) % (width + 1)
    labels = torch.stack([torch.cat([torch.randperm(width)[:n], torch.tensor([-1]), randint(-1, width, (width,))])[:width] for n in counts.tolist()])
    eager = randn(shape, requires_grad=True)
    own = eager.detach().clone().requires_grad_()

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.multilabel_margin_loss(x, target, reduction=reduction)

    results = [loss(eager, labels.view(shape)), torch.compile(loss, backend="ort_training")(own, labels.view(shape))]
    torch.testing.assert_close(*results)
    for result in results:
        result.sum().backward()
    torch.testing.assert_close(own.grad, eager.grad)


@pytest.mark.parametrize("rows, chosen", [(64, []), (1024, ["aten::binary_cross_entropy_with_logits"])])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", [{}, {"weight": torch.arange(1.0, 33.0), "pos_weight": torch.arange(32.0) / 8}], ids=["plain", "weighted"])
def test_binary_cross_entropy(rows: int, chosen: list[str], reduction: str, weights: dict[str, torch.Tensor]) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(x, y, reduction=reduction, **weights)

    logits, target = randn(rows, 32) * 30, randint(0, 2, (rows, 32)).float()
    torch._dynamo.reset()
    found = []
    for function in (loss, torch.compile(loss, backend="ort_training")):
        x = logits.clone().requires_grad_()
        out = function(x, target)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), x)))
    torch.testing.assert_close(found[1], found[0])
    if ON_CPU and capabilities.has_training():
        assert [one.operator for one in ort_backend.report().graphs[-1].outside] == chosen
