"""Forward and backward with every size symbolic, run with those of the trace and with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.trained import check_training, needs_grad

# Function, size of the trace, other size.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "split": (lambda t: t.split(3, 1), (5, 7), (6, 7)),
    "split evenly": (lambda t: t.split(t.shape[1] // 2, 1), (5, 8), (6, 12)),
    "chunk": (lambda t: t.chunk(3, 1), (5, 9), (6, 12)),
    "diagonal": (lambda t: (t.diagonal(), t.diagonal(1), t.diagonal(-2)), (5, 7), (8, 6)),
    "diagonal of matrices": (lambda t: t.diagonal(1, -2, -1), (5, 7, 6), (4, 6, 8)),
    "diag_embed": (lambda t: (t.diag_embed(), t.diag_embed(-2, 0, 2)), (5, 7), (8, 6)),
    "diagonal_scatter": (lambda t: t.diagonal_scatter(t.diagonal(1, 1, 2) * 2, 1, 1, 2), (5, 7, 8), (8, 6, 7)),
    "trace": (lambda t: t.diagonal(0, 1, 2).sum(-1), (5, 7, 7), (8, 6, 6)),
    "pixel_shuffle": (lambda t: F.pixel_shuffle(t, 2), (5, 12, 3, 7), (6, 8, 4, 9)),
    "pixel_unshuffle": (lambda t: F.pixel_unshuffle(t, 2), (5, 3, 6, 8), (6, 4, 10, 14)),
    "reflect": (lambda t: F.pad(t, (1, 2, 2, 1), mode="reflect"), (5, 3, 6, 8), (6, 4, 7, 9)),
    "replicate": (lambda t: F.pad(t, (1, 2, 0, 1), mode="replicate"), (5, 3, 6, 8), (6, 4, 7, 9)),
    "replicate and cut": (lambda t: F.pad(t, (-1, 2, 2, -3), mode="replicate"), (5, 3, 6, 8), (6, 4, 7, 9)),
    "circular": (lambda t: F.pad(t, (1, 2, 2, 1), mode="circular"), (5, 3, 6, 8), (6, 4, 7, 9)),
    "median": (lambda t: (t.median(1).values, t.median()), (5, 7), (6, 8)),
    "nanmedian": (lambda t: (t.nanmedian(1).values, t.nanmedian(0, keepdim=True).values, t.nanmedian()), (5, 7), (6, 8)),
    "activations by size": (
        lambda t: (
            F.leaky_relu(t, 1 / t.shape[0]),
            F.leaky_relu(t, t.shape[0]),
            F.hardshrink(t, 1 / t.shape[0]),
            F.threshold(t, 1 / t.shape[0], t.shape[0]),
        ),
        (5, 7),
        (6, 8),
    ),
}
# Function, and the operators that PyTorch runs, as their lowerings compute with the number.
_SETTINGS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "elu": (lambda t: F.elu(t, t.shape[0] / 4), ["aten::elu", "aten::elu_backward"]),
    "softplus": (lambda t: F.softplus(t, t.shape[0] / 4), ["aten::softplus", "aten::softplus_backward"]),
    "threshold of softplus": (lambda t: F.softplus(t, 1, t.shape[0] / 8), ["aten::softplus", "aten::softplus_backward"]),
    "softshrink": (lambda t: F.softshrink(t, t.shape[0] / 8), ["aten::softshrink"]),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_one_tensor(name: str) -> None:
    function, size, other = _FUNCTIONS[name]
    check_training(function, needs_grad(*size), dynamic=True, others=[(needs_grad(*other),)])
    check_training(function, needs_grad(*size))


@pytest.mark.parametrize("name", _SETTINGS)
def test_a_setting_made_of_a_size(name: str) -> None:
    function, outside = _SETTINGS[name]
    check_training(lambda t: function(t.sin()) * 2, needs_grad(5, 7), dynamic=True, others=[(needs_grad(6, 8),)], outside=outside)


def test_medians_among_nan() -> None:
    x = torch.randn(4, 7)
    x[0, 2], x[1, :], x[2, :6] = float("nan"), float("nan"), float("nan")
    check_training(lambda x: (x.nanmedian(1).values, x.median(1), x.nanmedian(), x.nanmedian(0).values), x)
    check_training(lambda x: x.nanmedian(1), x[2:])
    check_training(lambda x: x.nanmedian(1).values, torch.randint(0, 100, (4, 7)))
    check_training(lambda x: x.nanmedian(), torch.tensor(3.0))


@pytest.mark.parametrize("offset", [0, 2, -2, 9, -9])
def test_diagonals_far_from_the_middle(offset: int) -> None:
    outside = ["aten::diagonal_backward"] if abs(offset) == 9 else []  # nothing but zeros
    check_training(lambda t: t.diagonal(offset), needs_grad(5, 7), outside=outside)
    check_training(lambda t: t.diag_embed(offset), needs_grad(3, 4))


@pytest.mark.parametrize("size", [(8, 3, 5), (4, 3, 5, 8, 2, 3)])
def test_pixel_shuffle_of_other_ranks(size: tuple[int, ...]) -> None:
    check_training(lambda t: F.pixel_shuffle(t, 2), needs_grad(*size[:-3], 8, 2, 3))
    check_training(lambda t: F.pixel_unshuffle(t, 2), torch.randint(0, 9, (*size[:-3], 3, 4, 6)))
