"""Complex tensors: inside a graph, at its border, and in what eager PyTorch does at the edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops.trained import check_training, needs_grad
from torch import nn
from torch_version import TORCH

import ort_backend

DYNAMIC = pytest.mark.parametrize("dynamic", [False, True])
EDGES = (0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 1e-30, 1e30)


def _complex(*size: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return needs_grad(*size, dtype=dtype)


def _grid() -> torch.Tensor:
    """Every pair of edges as a complex number."""
    edges = torch.tensor(EDGES)
    return torch.complex(*torch.meshgrid(edges, edges, indexing="ij"))


@DYNAMIC
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_arithmetic(dtype: torch.dtype, dynamic: bool) -> None:
    def each(z: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
        sums = z + w * 2j, z - x, x - z, -z
        return *sums, z * w, z * x, z / w, x / w, z / x, z.reciprocal(), torch.addcmul(z, w, z, value=1 + 2j), z.square(), z**-2, (z + 3).sqrt()

    def given(*size: int) -> list[torch.Tensor]:
        real = torch.float32 if dtype == torch.complex64 else torch.float64
        return [_complex(*size, dtype=dtype), _complex(*size, dtype=dtype), needs_grad(size[-1], dtype=real)]

    torch.manual_seed(0)
    check_training(each, *given(2, 3), dynamic=dynamic, others=[given(4, 5)] if dynamic else [], rtol=1e-3)


@DYNAMIC
def test_parts(dynamic: bool) -> None:
    def each(z: torch.Tensor, x: torch.Tensor, pairs: torch.Tensor) -> Any:
        made = torch.complex(x, x.flip(0)) + torch.view_as_complex(pairs) + torch.polar(x.abs(), x)
        return z.real * 2, z.imag * 3, z.abs(), z.angle(), torch.view_as_real(z * made), z.conj().resolve_conj() * made, z.sgn(), (z.conj() * z).imag

    others = [(_complex(6, 5), needs_grad(6, 5), needs_grad(6, 5, 2))] if dynamic else []
    check_training(each, _complex(3, 4), needs_grad(3, 4), needs_grad(3, 4, 2), dynamic=dynamic, others=others)


@DYNAMIC
def test_elements_elsewhere(dynamic: bool) -> None:
    def each(z: torch.Tensor, w: torch.Tensor) -> Any:
        put = z.clone()
        put[:, 1] = w[:, 0] * 1j
        return (
            *(z.T.reshape(-1), z[:, 1:], z[0], torch.cat([z, w]), torch.stack([z, w.conj()]), z.unsqueeze(-1).expand(-1, -1, 2), z.roll(1, 0)),
            *(z[torch.tensor([1, 0, 1])], put, torch.where(z.real > 0, z, w), z.flip(1), z.sum(0), z.mean(), z.cumsum(1), z.diagonal()),
            *(nn.functional.pad(z, (1, 1)), z.masked_fill(w.real > 0, 1 - 1j), z.index_add(0, torch.tensor([0, 0]), w[:2])),
        )

    check_training(each, _complex(3, 5), _complex(3, 5), dynamic=dynamic)


@DYNAMIC
def test_matrix_products(dynamic: bool) -> None:
    def each(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> Any:
        batches = torch.stack([a, a * 1j]) @ torch.stack([b, b])
        return a @ b, a @ x.to(a.dtype), torch.addmm(bias, a, b, alpha=2j), batches, torch.einsum("ij,jk->ik", a.conj(), b), a @ b[:, 0]

    others = [(_complex(5, 8), _complex(8, 9), needs_grad(8, 6), _complex(9))] if dynamic else []
    check_training(each, _complex(3, 4), _complex(4, 5), needs_grad(4, 7), _complex(5), dynamic=dynamic, others=others)


def test_mixed_dtypes() -> None:
    def each(z: torch.Tensor, x: torch.Tensor, n: torch.Tensor) -> Any:
        return z + x, z * n, n * 2j, z.to(torch.complex128), x.to(torch.complex64) * z, (z * n).real.to(torch.int32), torch.full_like(z, 1 + 2j) * n

    check_training(each, _complex(3), needs_grad(3, dtype=torch.float64), torch.tensor([1, -2, 3]), rtol=1e-5)


def test_comparisons() -> None:
    z = torch.tensor([0, 1 + 1j, 1, 1j, complex(math.nan, 1), complex(1, math.inf)])
    w = torch.tensor([0, 1 - 1j, 1, 1j, complex(math.nan, 1), complex(1, math.inf)])
    check_training(lambda z, w: (z == w, z != w, z == 1, z.isnan(), z.isinf(), z.isfinite(), z.logical_not(), z.bool()), z, w)


def test_edges() -> None:
    z = _grid()
    check_training(lambda z: (z.real, z.imag, -z, z.conj(), torch.where(z.real > 0, z, -z)), z)
    finite = z[torch.isfinite(torch.view_as_real(z)).all(-1)]
    check_training(lambda z: (z.abs(), z.sgn(), z.angle()), finite)


def test_a_real_factor_leaves_infinities_alone() -> None:
    compiled = torch.compile(lambda z: z * 2, backend="ort_training")
    assert compiled(torch.tensor([complex(0, math.inf)])).item() == complex(0, math.inf)  # eager multiplies with 2 + 0i: NaN


def test_angle_of_real_numbers() -> None:
    check_training(lambda x: x.angle(), torch.tensor(EDGES))
    check_training(lambda x: x.angle(), torch.tensor([1, 0, -3]))


@DYNAMIC
def test_parameters_results_and_gradients_are_complex(dynamic: bool) -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
            self.register_buffer("seen", torch.zeros((), dtype=torch.complex64))

        def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.seen += z.detach().sum()
            return (z @ self.weight).conj(), z.T

    torch.manual_seed(0)
    eager, compiled = Rotated(), Rotated()
    compiled.load_state_dict(eager.state_dict())
    torch._dynamo.reset()
    ort_backend.graph_report.clear()
    run = torch.compile(compiled, backend="ort_training", fullgraph=True, dynamic=dynamic)
    for rows in (3, 6) if dynamic else (3,):
        z = torch.randn(rows, 4, dtype=torch.complex64)
        mine, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
        for out, other in zip(run(mine), eager(theirs), strict=True):
            torch.testing.assert_close(out, other)
            out.abs().sum().backward(retain_graph=True)
            other.abs().sum().backward(retain_graph=True)
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(compiled.weight.grad, eager.weight.grad)
    torch.testing.assert_close(compiled.seen, eager.seen)
    assert not [one for graph in ort_backend.report().graphs for one in graph.outside]


def test_an_argument_with_a_pending_conjugation() -> None:
    z = torch.randn(3, 4, dtype=torch.complex64).conj()
    compiled = torch.compile(lambda z: z * 2 + z.mT.sum(), backend="ort_training")
    torch.testing.assert_close(compiled(z), z * 2 + z.mT.sum())


def test_beside_an_operator_that_stays_with_pytorch() -> None:
    product = ["aten::prod.dim_int"] if TORCH < (2, 12) else []  # in that torch's formula of the gradient
    check_training(lambda z: (z * 2).cumprod(0).conj() * z, _complex(3, 4), outside=["aten::cumprod", *product])


def test_within_a_checkpoint() -> None:
    def block(z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda z: ((z @ weight) * z.conj()).abs(), z, use_reentrant=False)

    check_training(block, _complex(4, 4), _complex(4, 4))


@DYNAMIC
def test_results_lie_in_memory_as_eager_ones(dynamic: bool) -> None:
    """A transform's has the transformed dimension innermost."""

    def step(z: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.fft.fft(z, dim=1), torch.stft(x, 16, return_complex=True), (z * 2j).mT, z.permute(2, 0, 1) + 1j

    given = (_complex(5, 6, 7), torch.randn(100))
    results, expected = torch.compile(step, backend="ort_training", fullgraph=True, dynamic=dynamic)(*given), step(*given)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, check_stride=True)
