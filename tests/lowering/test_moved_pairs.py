"""What only moves complex numbers between transforms does so with pairs: eager's numbers, gradients and shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import compiled
from default_device import ON_CPU, seeded
from torch import Tensor, fft

from ort_backend import joint, regions
from ort_backend.lowering.passes import moved_pairs

pytestmark = pytest.mark.skipif(not ON_CPU, reason="pairs are moved on the CPU")

SHAPE = (2, 3, 72, 70)


def _filled(spectrum: Tensor) -> Tensor:
    """The low frequencies, put into zeros as in Fourier neural operators."""
    whole = torch.zeros_like(spectrum)
    whole[:, :, :12, :9] = spectrum[:, :, :12, :9]
    whole[:, :, -12:, :9] = spectrum[:, :, -12:, :9] * 0.5
    return whole


def _weighted(spectrum: Tensor) -> Tensor:
    weights = torch.linspace(1, 2, spectrum.shape[-1])
    return weights * (spectrum * 2 - spectrum.flip(-2)) / weights.square()


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda spectrum: fft.ifftshift(fft.fftshift(spectrum, dim=-2) * 2, dim=(-2,)),
    "roll": lambda spectrum: spectrum.roll((1, -5), (0, -1)),
    "parts_into_zeros": _filled,
    "zeros_around": lambda spectrum: torch.nn.functional.pad(spectrum[..., 2:-2, :-1], (0, 1, 2, 2)),
    "sums": lambda spectrum: -spectrum + torch.add(spectrum, spectrum.flip((0, 2)), alpha=3),
    "products_with_real_numbers": _weighted,
    "a_single_real_number": lambda spectrum: spectrum * torch.tensor(0.5) * spectrum.real.max(),
    "one_of_many": lambda spectrum: spectrum.transpose(0, -2)[-1].unsqueeze(-3).permute(-2, 0, 1, -1) + spectrum,
    "squeezed": lambda spectrum: spectrum[:, :1].squeeze(-3)[:, None] - spectrum,
}


def _step(move: Callable[[Tensor], Tensor], make: Callable[..., Any] = lambda function: function, **options: Any) -> list[Tensor]:
    def between(x: Tensor) -> Tensor:
        return fft.irfft2(move(fft.rfft2(x)), s=x.shape[-2:])

    function = make(between, **options)
    results = []
    for _ in range(2):
        x = torch.randn(SHAPE, generator=seeded(0)).requires_grad_()
        result = function(x)
        (result * torch.arange(result.numel()).view(result.shape)).mean().backward()
        assert x.grad is not None
        results += [result.detach(), x.grad]
    return results


@pytest.fixture(name="moved")
def _moved(counted: Callable[..., list[int]]) -> list[int]:
    """How many operators each run of the pass rewrote."""
    return counted("move_pairs", moved_pairs.move_pairs, joint, regions)


@pytest.mark.parametrize("dynamic", [False, True], ids=["known_sizes", "symbolic_sizes"])
@pytest.mark.parametrize("name", MOVES)
def test_moves_between_transforms(moved: list[int], name: str, dynamic: bool) -> None:
    actual = _step(MOVES[name], compiled, dynamic=dynamic)
    expected = _step(MOVES[name])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
        assert one.stride() == other.stride()
    assert sum(moved) >= 1


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "parts_are_read": lambda spectrum: (spectrum.roll(2, -1) * 0.01).exp(),
    "parts_are_made": lambda spectrum: torch.polar(spectrum.abs(), spectrum.abs()).roll(2, -1),
    "a_complex_factor": lambda spectrum: spectrum * 2j,
    "zeros_and_a_number": lambda spectrum: torch.nn.functional.pad(spectrum[..., :-1], (0, 1), value=2.0),
    "conjugates": lambda spectrum: spectrum.conj().resolve_conj(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    actual, expected = _step(OTHERS[name], compiled), _step(OTHERS[name])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_not_with_kernels_of_onnxruntime(moved: list[int]) -> None:
    _step(MOVES["roll"], compiled, options={"kernels": "onnxruntime"})
    assert not any(moved)


def test_views_of_arguments_share_their_memory(moved: list[int]) -> None:
    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[1:], fft.ifft(x.roll(1, 0)[1:] * 2)

    x = torch.complex(torch.randn(301, 80, generator=seeded(0)), torch.ones(301, 80))
    view, transformed = compiled(parts)(x)
    torch.testing.assert_close(transformed, parts(x)[1], rtol=1e-4, atol=1e-5)
    assert view.data_ptr() == x[1:].data_ptr()
    assert sum(moved) == 3


def test_results_of_another_order_in_memory() -> None:
    def turned(x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = fft.fft2(x)
        return spectrum.transpose(-1, -2), spectrum.transpose(-1, -2).roll(1, 0)

    x = torch.randn(3, 72, 70, dtype=torch.complex64, generator=seeded(0))
    for one, other in zip(compiled(turned)(x), turned(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
        assert one.stride() == other.stride()


@pytest.mark.parametrize(("dtype", "moves"), [(torch.float32, False), (torch.float64, True)], ids=["mixed", "double"])
def test_double_precision(moved: list[int], dtype: torch.dtype, moves: bool) -> None:
    def weighted(x: Tensor, weights: Tensor) -> Tensor:
        return fft.ifft((fft.fft(x).flip(-1) * 2) * weights)

    x = torch.randn(300, 80, dtype=dtype, generator=seeded(0)).requires_grad_()
    weights = torch.randn(80, dtype=torch.float64, generator=seeded(1))
    actual, expected = compiled(weighted)(x, weights), weighted(x, weights)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert any(moved) == moves


@pytest.mark.parametrize("trained", [False, True])
def test_sum_weighted_with_a_symbolic_number(trained: bool) -> None:
    def function(x: Tensor, y: Tensor, weight: int) -> Tensor:
        return torch.add(x, y, alpha=weight)

    call = torch.compile(function, backend="ort_training", dynamic=True, fullgraph=True)
    for weight in (2, 3):
        x, y = (torch.randn(4, 6, dtype=torch.complex64, generator=seeded(seed)).requires_grad_(trained) for seed in (0, 1))
        results = [one(x, y, weight) for one in (function, call)]
        torch.testing.assert_close(results[1], results[0])
        if trained:
            gradients = [torch.autograd.grad(one.abs().sum(), (x, y)) for one in results]
            torch.testing.assert_close(gradients[1], gradients[0])
