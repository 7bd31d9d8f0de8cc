"""Gradients of Fourier transforms of real numbers become transforms back to real numbers: eager's numbers, and no complex transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled, same_tree
from default_device import ON_CPU, seeded
from torch import Tensor

from ort_backend.lowering import simplify
from ort_backend.lowering.passes import real_transforms

REAL: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "even": ((3, 8), torch.fft.rfft),
    "odd": ((3, 9), torch.fft.rfft),
    "long": ((2, 130), torch.fft.rfft),
    "orthonormal": ((3, 8), lambda x: torch.fft.rfft(x, norm="ortho")),
    "another_dimension": ((3, 8, 5), lambda x: torch.fft.rfft(x, dim=-2)),
    "planes": ((3, 6, 8), torch.fft.rfft2),
    "dimensions_in_another_order": ((4, 6, 5), lambda x: torch.fft.rfftn(x, dim=(2, 0))),
    "double": ((3, 8), lambda x: torch.fft.rfft(x.double())),
    "frames": ((2, 200), lambda x: torch.stft(x, 32, 8, window=torch.hann_window(32), return_complex=True)),
}


def _zeros(x: Tensor, step: int) -> Tensor:
    """Three numbers in five places, so many apart; zeros in the others."""
    whole = torch.complex(x, x).new_zeros(3, 5)
    whole[:, : 2 * step + 1 : step] = torch.complex(x, -2 * x)
    return whole


def _kept_complex(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.fft.ifft(_zeros(x, 1))
    return made.real, made.abs()


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "zeros_between": lambda x: torch.fft.ifft(_zeros(x, 2)).real,
    "forward": lambda x: torch.fft.fft(_zeros(x, 1)).real,
    "imaginary_parts": lambda x: torch.fft.ifft(_zeros(x, 1)).imag,
    "complex_numbers_are_read": _kept_complex,
    "too_many_zeros": lambda x: torch.fft.ifft(torch.nn.functional.pad(torch.complex(x, x), (0, 4))).real,
}


@pytest.fixture(name="rewritten")
def _rewritten(counted: Callable[..., list[int]]) -> list[int]:
    """How many gradients each run of the pass rewrote."""
    return counted("transform_back", real_transforms.transform_back, simplify)


def _step(size: tuple[int, ...], transform: Callable[[Tensor], Any], make: Callable[..., Any] = lambda function: function) -> list[Tensor]:
    x = torch.randn(size, generator=seeded(0)).requires_grad_()
    result = make(lambda x: transform(x) * (1 + 2j))(x)
    pairs = torch.view_as_real(result)
    (pairs * torch.arange(pairs.numel()).view(pairs.shape)).sum().backward()
    assert x.grad is not None
    return [result.detach(), x.grad]


@pytest.mark.parametrize("kind", REAL)
def test_gradients_of_real_numbers(rewritten: list[int], kind: str) -> None:
    actual = _step(*REAL[kind], compiled)
    expected = _step(*REAL[kind])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * float(expected[1].abs().max()))
    assert sum(rewritten) == ON_CPU


@pytest.mark.parametrize("kind", OTHERS)
def test_other_transforms_stay(rewritten: list[int], kind: str) -> None:
    x = torch.randn(3, 3, generator=seeded(0))
    same_tree(compiled(OTHERS[kind])(x), OTHERS[kind](x))
    assert sum(rewritten) == 0


def test_the_same_sum_that_a_program_writes(rewritten: list[int]) -> None:
    x = torch.randn(3, 3, generator=seeded(0))
    same_tree(compiled(lambda x: torch.fft.ifft(_zeros(x, 1)).real)(x), torch.fft.ifft(_zeros(x, 1)).real)
    assert sum(rewritten) == ON_CPU
