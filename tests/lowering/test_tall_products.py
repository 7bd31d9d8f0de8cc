"""Gradients of large vocabularies: block by block of their rows, with eager's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import compiled
from default_device import ON_CPU, seeded
from torch import Tensor, nn
from torch.nn import functional as F

from ort_backend import joint, regions
from ort_backend.lowering.passes import tall_products

pytestmark = pytest.mark.skipif(not ON_CPU, reason="on the CPU")

WIDTH = 8


@pytest.fixture(name="divided")
def _divided(counted: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products each run of the pass divided, for which some thousand numbers are many."""
    monkeypatch.setattr(tall_products, "_LARGE", 1 << 12)
    return counted("divide_tall_products", tall_products.divide_tall_products, joint, regions)


def _check(vocabulary: int, *tokens: int, dynamic: bool | None = None, dtype: torch.dtype = torch.float32) -> None:
    numbers = torch.randn(vocabulary, WIDTH, generator=seeded(0), dtype=dtype)
    layer = nn.Linear(WIDTH, vocabulary, bias=False, dtype=dtype)  # whose sizes are static
    weight = layer.weight = nn.Parameter(numbers)
    run = compiled(lambda hidden: layer(hidden.tanh()), dynamic=dynamic)
    for count in tokens:
        hidden = torch.randn(count, WIDTH, generator=seeded(count), dtype=dtype)
        tangent = torch.randn(count, vocabulary, generator=seeded(1), dtype=dtype)
        (actual,) = torch.autograd.grad(run(hidden), weight, tangent)
        (expected,) = torch.autograd.grad(F.linear(hidden.tanh(), weight), weight, tangent)
        torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))
        assert actual.is_contiguous()


@pytest.mark.parametrize("vocabulary", [2048, 3 * 401], ids=["blocks of 512", "blocks of 401"])
def test_static(divided: list[int], vocabulary: int) -> None:
    _check(vocabulary, 256)
    assert sum(divided) == 1


def test_dynamic(divided: list[int]) -> None:
    _check(2048, 300, 280, 1100, dynamic=True)
    assert sum(divided) == 1


@pytest.mark.parametrize(("vocabulary", "tokens"), [(2039, 256), (2048, 128), (2048, 1280), (256, 256)], ids=["prime", "few", "many", "small"])
def test_others_stay(divided: list[int], vocabulary: int, tokens: int) -> None:
    _check(vocabulary, tokens)
    assert not sum(divided)


def test_double_precision_stays(divided: list[int]) -> None:
    _check(2048, 256, dtype=torch.float64)
    assert not sum(divided)


def test_with_the_embedding_of_the_same_weight(divided: list[int]) -> None:
    words = torch.randint(0, 2048, (256,), generator=seeded(2))

    def step(weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(F.embedding(words, weight).tanh(), weight), words.flip(0))

    own = (torch.randn(2048, WIDTH, generator=seeded(0)) / 4).requires_grad_()
    other = own.detach().clone().requires_grad_()
    compiled(step)(own).backward()
    step(other).backward()
    assert sum(divided) == 1
    torch.testing.assert_close(own.grad, other.grad)
