"""Simulated quantisation: the straight-through gradient, fixed and learned grids."""

from __future__ import annotations

import pytest
import torch
from ops.trained import check_training

T = torch.tensor
CHANNELS = (T([0.1, 0.2, 0.3, 0.4]), T([0, 1, 2, 3], dtype=torch.int32))


def _values() -> torch.Tensor:
    """Values inside and outside of the grid, and halfway between its numbers."""
    x = torch.rand(4, 6) * 4 - 2
    x[0] = T([0.25, 0.75, -0.25, 10.0, -10.0, 0.0])
    x[1] = torch.linspace(-1.2, 1.2, 6)
    return x.requires_grad_()


def test_a_grid_of_numbers() -> None:
    check_training(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7), _values())


@pytest.mark.parametrize("enabled", [0, 1])
def test_a_grid_of_tensors(enabled: int) -> None:
    quantize = torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    check_training(lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s, z, -8, 7), _values(), T(0.1), T(3, dtype=torch.int32))
    check_training(lambda x, s, z, e: quantize(x, s, z, e, -8, 7), _values().detach(), T([0.1]), T([3], dtype=torch.int32), T([enabled]))


@pytest.mark.parametrize("axis", [0, -1])
def test_a_grid_per_channel(axis: int) -> None:
    x = _values().detach()
    x = (x if axis == 0 else x.t().contiguous()).requires_grad_()
    axis = axis % 2
    check_training(lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, axis, -8, 7), x, *CHANNELS)


def test_nan_becomes_the_lowest_number() -> None:
    x = _values().detach()
    x[1, 1] = float("nan")
    check_training(lambda x: torch.ops.aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, -8, 7), x)


@pytest.mark.parametrize("zero_point", [0.0, 0.5, 1.5, 2.5, -1.5, -20.0])
def test_a_learned_grid(zero_point: float) -> None:
    quantize = lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7, 0.5)  # noqa: E731
    check_training(quantize, _values(), T([0.1]).requires_grad_(), T([zero_point]).requires_grad_())


def test_a_learned_grid_per_channel() -> None:
    quantize = lambda x, s, z: torch._fake_quantize_learnable_per_channel_affine(x, s, z, 0, -8, 7, 0.5)  # noqa: E731
    check_training(quantize, _values(), T([0.1, 0.2, 0.3, 0.4]).requires_grad_(), T([0.0, 1.5, 2.5, -20.0]).requires_grad_())
