"""Rotary embeddings that are written out: one node each, forward and backward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import DEVICE
from torch import Tensor, nn

from ort_backend import min_cut, regions
from ort_backend.lowering import simplify
from ort_backend.lowering.ops.rotary_embedding import KERNEL, ROTARY_EMBEDDING
from ort_backend.lowering.passes import rotary_embeddings
from ort_backend.target import OrtTarget


def angles(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(N, S, width) each, as transformers makes them."""
    frequencies = 1.0 / 100.0 ** (torch.arange(0, width, 2, device=positions.device).float() / width)
    freqs = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    both = torch.cat((freqs, freqs), dim=-1)
    return both.cos() * 1.5, both.sin() * 1.5


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


class Attention(nn.Module):
    """Queries and keys of a decoder, turned.

    Args:
        dim: In front of which the angles get a dimension for the heads: 1 or 2.
        turned: How much of each head is.
    """

    def __init__(self, dim: int = 1, turned: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.dim, self.turned = nn.Linear(12, 32), nn.Linear(12, 16), dim, turned

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (one.to(x.dtype).unsqueeze(self.dim) for one in angles(positions, self.turned))
        parts = [layer(x).view(*x.shape[:2], -1, 8) for layer in (self.q, self.k)]
        q, k = (self._embed(part if self.dim == 2 else part.transpose(1, 2), cos, sin) for part in parts)
        return (q @ k.repeat_interleave(2, 1).transpose(-1, -2) if self.dim == 1 else q.square() + k.repeat_interleave(2, 2)).tanh()

    def _embed(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, rest = x[..., : self.turned], x[..., self.turned :]
        x = x * cos + rotate_half(x) * sin
        return torch.cat((x, rest), -1) if rest.shape[-1] else x


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many embeddings and gradients of such each graph had. The kernel counts as fast wherever there is one."""
    found: list[int] = []
    original = rotary_embeddings.fuse_rotary_embeddings

    def fuse(graph: torch.fx.Graph, target: OrtTarget) -> int:
        assert KERNEL in target.contrib_ops
        found.append(original(graph, dataclasses.replace(target, training=False)))
        return found[-1]

    for module in (simplify, min_cut, regions):
        monkeypatch.setattr(module, "fuse_rotary_embeddings", fuse)
    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("turned", [8, 6])
def test_forward_and_backward(fused: list[int], dim: int, turned: int) -> None:
    same_as_eager(Attention(dim, turned), call(torch.randn(3, 5, 12, requires_grad=True), torch.arange(5)[None]))
    assert fused == [4]


def test_positions_of_each_sequence(fused: list[int]) -> None:
    same_as_eager(Attention(), call(torch.randn(2, 5, 12, requires_grad=True), torch.tensor([[0, 0, 1, 2, 3], [3, 4, 5, 6, 7]])))
    assert fused == [4]


def test_symbolic_sizes(fused: list[int]) -> None:
    calls = [call(torch.randn(n, s, 12, requires_grad=True), torch.arange(s)[None]) for n, s in ((3, 5), (2, 7), (4, 6))]
    same_as_eager(Attention(), *calls, repeat=1, graphs=2)
    assert fused == [4, 4]  # with fixed sizes first


def test_without_gradients(fused: list[int]) -> None:
    model, x, positions = Attention(), torch.randn(2, 5, 12), torch.arange(5)[None]
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="ort_training")(x, positions), model(x, positions), rtol=1e-4, atol=1e-5)
    assert fused == [2]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_result_keeps_its_strides(fused: list[int], grad: bool, transposed: bool) -> None:
    def turn(x: Tensor) -> Tensor:
        heads_first = x.transpose(1, 2) if transposed else x
        cos, sin = (one.unsqueeze(1) for one in angles(torch.arange(3)[None], 8))
        return heads_first * cos + rotate_half(heads_first) * sin

    x = torch.randn((2, 3, 4, 8) if transposed else (2, 4, 3, 8), requires_grad=grad)
    found, expected = torch.compile(turn, backend="ort_training")(x), turn(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride() and max(fused) > 0


def test_angles_that_differ_between_the_halves_are_left(fused: list[int]) -> None:
    class Unequal(nn.Module):
        def __init__(self, sin_too: bool) -> None:
            super().__init__()
            self.q, self.sin_too = nn.Linear(12, 16), sin_too

        def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
            q = self.q(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
            equal = torch.cat((freqs, freqs), -1)[None, None]
            other = torch.cat((freqs, freqs + 0.5), -1)[None, None]
            return q * equal.cos() + rotate_half(q) * (other if self.sin_too else equal + torch.arange(8)).sin()

    for sin_too in (True, False):
        same_as_eager(Unequal(sin_too), call(torch.randn(2, 5, 12), torch.rand(5, 4)))
    assert fused == [0, 0]


def test_other_turns_are_left(fused: list[int]) -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(12, 16)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            cos, sin = (one.unsqueeze(1) for one in angles(positions, 8))
            q = self.q(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
            other_way = q * cos + torch.cat((q[..., 4:], -q[..., :4]), -1) * sin
            of_another = q * cos + rotate_half(q + 1) * sin
            subtracted = torch.sub(q * cos, rotate_half(q) * sin)
            scaled = torch.add(q * cos, rotate_half(q) * sin, alpha=2)
            thirds = q * cos + torch.cat((-q[..., 3:], q[..., :3]), -1) * sin
            return torch.stack([other_way, of_another, subtracted, scaled, thirds])

    same_as_eager(Others(), call(torch.randn(2, 5, 12), torch.arange(5)[None]))
    assert fused == [0]


def test_bfloat16_in_autocast(fused: list[int]) -> None:
    model = Attention()
    own = copy.deepcopy(model)
    x, positions = torch.randn(2, 5, 12), torch.arange(5)[None]
    compiled = torch.compile(own, backend="ort_training")
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, found = model(x, positions), compiled(x, positions)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    for one in (expected, found):
        one.float().square().sum().backward()
    for parameter, other in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0.05, atol=0.05 * float(other.grad.abs().max()))
    assert fused == [4]


def test_the_operator_in_pytorch() -> None:
    x, freqs = torch.randn(2, 5, 3, 8), torch.rand(2, 5, 4)
    cos, sin = (torch.cat((one, one), -1).unsqueeze(2) for one in (freqs.cos(), freqs.sin()))
    torch.testing.assert_close(ROTARY_EMBEDDING(x, freqs.cos(), freqs.sin()), x * cos + rotate_half(x) * sin)
