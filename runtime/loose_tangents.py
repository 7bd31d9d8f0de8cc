"""Tangents that may come with every size 1, as what they are added to has their shape: one zero for those that autograd has no gradient for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch


@dataclasses.dataclass(frozen=True)
class Zero:
    """A zero of so many dimensions, each of size 1."""

    dimensions: int
    dtype: torch.dtype
    device: torch.device


def zeros_for(tangents: Mapping[int, torch.Tensor]) -> dict[int, Zero]:
    """For each loose tangent, a fake tensor by its place, the zero that stands for it."""
    return {i: Zero(fake.dim(), fake.dtype, fake.device) for i, fake in tangents.items()}


def made(zeros: Mapping[int, Zero]) -> dict[int, torch.Tensor]:
    """The tensors. Not to be made while AOTAutograd traces, under whose fake mode they would be fake."""
    return {i: torch.zeros((1,) * zero.dimensions, dtype=zero.dtype, device=zero.device) for i, zero in zeros.items()}
