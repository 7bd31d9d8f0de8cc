"""Fourier transforms: lengths that are one product and several, norms, any dimensions, static and symbolic; whole models' uses of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.trained import check_training, needs_grad
from torch_version import TORCH

import ort_backend

DYNAMIC = pytest.mark.parametrize("dynamic", [False, True])
NORMS = pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])


def _complex(*size: int) -> torch.Tensor:
    return needs_grad(*size, dtype=torch.complex64)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 67, 130, 4100])
def test_lengths(length: int) -> None:
    def each(x: torch.Tensor, z: torch.Tensor) -> Any:
        return (
            torch.fft.rfft(x),
            torch.fft.fft(z),
            torch.fft.ifft(z),
            torch.fft.irfft(z[..., : length // 2 + 1], n=length),
            torch.fft.hfft(z, n=length),
        )

    check_training(each, needs_grad(2, length), _complex(2, length), rtol=1e-4, atol=2e-4)


@NORMS
@DYNAMIC
def test_norms(norm: str, dynamic: bool) -> None:
    def each(x: torch.Tensor, z: torch.Tensor) -> Any:
        return torch.fft.rfft(x, norm=norm), torch.fft.fft(z, norm=norm), torch.fft.ifft(z, norm=norm), torch.fft.irfft(z, norm=norm)

    others = [(needs_grad(3, 9), _complex(3, 6))] if dynamic else []
    check_training(each, needs_grad(2, 6), _complex(2, 5), dynamic=dynamic, others=others)


@DYNAMIC
@pytest.mark.parametrize("dims", [(1,), (-2,), (3, 1), (0, 2)])
def test_dimensions(dims: tuple[int, ...], dynamic: bool) -> None:
    def each(x: torch.Tensor, z: torch.Tensor) -> Any:
        half = torch.fft.rfftn(x, dim=dims)
        return half, torch.fft.fftn(z, dim=dims), torch.fft.ifftn(z, dim=dims), torch.fft.irfftn(half, s=[x.shape[d] for d in dims], dim=dims)

    others = [(needs_grad(7, 8, 6, 9), _complex(7, 8, 6, 9))] if dynamic else []
    check_training(each, needs_grad(5, 6, 7, 8), _complex(5, 6, 7, 8), dynamic=dynamic, others=others)


def test_long_dimensions_that_are_not_the_last() -> None:
    check_training(lambda x, z: (torch.fft.rfft(x, dim=1), torch.fft.irfft(z, n=150, dim=0)), needs_grad(2, 132, 3), _complex(76, 2), atol=1e-4)


def test_a_half_whose_own_conjugates_are_not_real() -> None:
    z = _complex(2, 5)
    check_training(lambda z: (torch.fft.irfft(z, n=8), torch.fft.irfft(z, n=9)), z)
    check_training(lambda z: torch.fft.irfft(z, n=128), _complex(2, 65), atol=1e-4)


def test_float64() -> None:
    x = needs_grad(2, 100, dtype=torch.float64)
    check_training(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 1j, n=100), x, rtol=1e-12, atol=1e-12)
    check_training(lambda x: torch.fft.fft(x), x, dynamic=True, rtol=1e-12, atol=1e-12)


def test_no_rows() -> None:
    compiled = torch.compile(lambda x: (torch.fft.rfft(x) * 2).abs(), backend="ort_training", dynamic=True)
    torch.testing.assert_close(compiled(torch.ones(3, 6)), torch.fft.rfft(torch.ones(3, 6)).abs() * 2)
    assert compiled(torch.ones(0, 6)).shape == (0, 4)  # which MKL, in eager PyTorch, refuses


def test_no_matrices() -> None:
    """MKL, in eager PyTorch before 2.15, refuses these, too."""
    for function in (torch.fft.fft2, torch.fft.rfft2, lambda x: torch.fft.fft(x, 7, 2)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, function=function: function(x).abs(), backend="ort_training")
        assert compiled(torch.ones(2, 0, 3, 4)).shape == function(torch.ones(2, 1, 3, 4))[:, :0].shape


def test_a_large_prime_number_stays_with_pytorch() -> None:
    check_training(lambda x: torch.fft.fft(x), needs_grad(2, 1031), outside=["aten::_fft_c2c", "aten::_fft_r2c"], atol=1e-3)


def test_large_transforms_run_where_they_are_faster() -> None:
    def outside(**options: Any) -> set[str]:
        torch._dynamo.reset()
        x = torch.randn(64, 2048)
        compiled = torch.compile(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2), backend="ort_training", options=options)
        torch.testing.assert_close(compiled(x), x * 2, rtol=1e-4, atol=1e-4)
        return {one.operator for one in ort_backend.report().graphs[-1].outside if "fft" in one.operator}

    assert outside() == {"aten::_fft_r2c", "aten::_fft_c2r"}
    assert outside(kernels="onnxruntime") == set()


# -- as models use them


@DYNAMIC
def test_token_mixing(dynamic: bool) -> None:
    others = [(needs_grad(3, 9, 16),)] if dynamic else []
    check_training(lambda x: torch.fft.fftn(x, dim=(1, 2)).real, needs_grad(2, 12, 16), dynamic=dynamic, others=others, atol=1e-4)


@DYNAMIC
def test_autocorrelation(dynamic: bool) -> None:
    def correlated(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(q, dim=1) * torch.conj(torch.fft.rfft(k, dim=1)), n=q.shape[1], dim=1)

    others = [(needs_grad(3, 9, 4), needs_grad(3, 9, 4))] if dynamic else []
    check_training(correlated, needs_grad(2, 12, 4), needs_grad(2, 12, 4), dynamic=dynamic, others=others)


@DYNAMIC
def test_spectral_convolution(dynamic: bool) -> None:
    def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x)
        modes = torch.einsum("bixy,ioxy->boxy", spectrum[..., :4, :4], weight)
        out = torch.zeros(x.shape[0], weight.shape[1], *spectrum.shape[2:], dtype=spectrum.dtype)
        out[..., :4, :4] = modes
        return torch.fft.irfft2(out, s=x.shape[-2:])

    others = [(needs_grad(3, 3, 10, 14), _complex(3, 5, 4, 4))] if dynamic else []
    check_training(convolved, needs_grad(2, 3, 12, 16), _complex(3, 5, 4, 4), dynamic=dynamic, others=others)


def test_loss_on_spectrograms() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(32)
        mine, theirs = (torch.stft(one, 32, 8, window=window, return_complex=True).abs() for one in (x, y))
        return (mine - theirs).square().mean() + (mine.clamp(min=1e-3).log() - theirs.clamp(min=1e-3).log()).abs().mean()

    outside = ["aten::hann_window"] if TORCH < (2, 12) else []  # which that torch does not decompose
    check_training(loss, needs_grad(2, 256), torch.randn(2, 256), outside=outside)
