"""Attention against eager, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from default_device import ON_CPU
from torch import randn
from torch.nn import functional as F
from torch_version import DOUBLE_LOGSUMEXP, TORCH

aten = torch.ops.aten
contrib = pytest.mark.parametrize("contrib", [True, False], ids=["fused", "plain"])
forward = aten._scaled_dot_product_flash_attention_for_cpu
backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


def _both(is_causal: bool = False, scale: float | None = None) -> Callable[..., list[torch.Tensor]]:
    def both(g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
        out, logsumexp = forward(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        return [out, logsumexp, *backward(g, q, k, v, out, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale)]

    return both


def _sample(batch: int, length: int, keys: int, *, heads: int = 4, shared: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    sizes = [(batch, heads, length, 8), (batch, heads, length, 8), (batch, shared, keys, 8), (batch, shared, keys, 8)]
    return [randn(size, dtype=dtype) for size in sizes]


@pytest.mark.cpu_only(reason="the operator of its attention")
@contrib
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", [4, 2, 1])
def test_attention(check: Callable, contrib: bool, is_causal: bool, shared: int) -> None:
    check(_both(is_causal), *_sample(2, 5, 5, shared=shared), also=(*_sample(3, 7, 7, shared=shared),), contrib=contrib)


@pytest.mark.cpu_only(reason="the operator of its attention")
@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_and_keys_of_unequal_number(check: Callable, is_causal: bool) -> None:
    check(_both(is_causal, scale=0.3), *_sample(2, 5, 9), also=(*_sample(2, 9, 5),))


@pytest.mark.cpu_only(reason="the operator of its attention")
@contrib
@pytest.mark.parametrize("length, blocks", [(127, 1), (128, 2), (193, 2), (512, 4), (1100, 5)])
@pytest.mark.parametrize("shared", [4, 1])
def test_blocks_of_rows(check: Callable, contrib: bool, length: int, blocks: int, shared: int) -> None:
    lowered = check(_both(True), *_sample(1, length, length, shared=shared), contrib=contrib)
    assert lowered.op_types.count("Softmax") == 2 * blocks
    assert lowered.op_types.count("Trilu") == blocks  # the backward's masks are the forward's


@pytest.mark.cpu_only(reason="the operator of its attention")
@contrib
@pytest.mark.parametrize("length, keys, blocks", [(512, 600, 1), (600, 600, 2), (900, 300, 2), (1025, 1100, 5), (600, 77, 1)])
@pytest.mark.parametrize("shared", [4, 1])
def test_blocks_of_rows_that_see_all_keys(check: Callable, contrib: bool, length: int, keys: int, blocks: int, shared: int) -> None:
    lowered = check(_both(), *_sample(1, length, keys, shared=shared), contrib=contrib)
    assert lowered.op_types.count("Softmax") == 2 * blocks


@pytest.mark.cpu_only(reason="the operator of its attention")
@contrib
@pytest.mark.parametrize("length, keys, blocks", [(600, 700, 2), (1025, 600, 3), (300, 301, 1)])
def test_blocks_of_causal_rows_and_keys_of_unequal_number(check: Callable, contrib: bool, length: int, keys: int, blocks: int) -> None:
    """All keys are multiplied with each block, fewer of them seen."""
    lowered = check(_both(True), *_sample(1, length, keys), also=(*_sample(1, 5, 9),), contrib=contrib)
    assert lowered.op_types.count("Softmax") == 2 * blocks


@pytest.mark.cpu_only(reason="the operator of its attention")
@contrib
@pytest.mark.parametrize("size", [(600, 500), (1, 1, 600, 500), (2, 4, 600, 500), (2, 1, 1, 500), (1, 500)], ids=str)
def test_masks_of_blocks_of_rows(check: Callable, contrib: bool, size: tuple[int, ...]) -> None:
    mask = randn(size)
    mask[..., 0, 1] = mask[..., -1, 3:] = -torch.inf
    if size[-2] > 1:
        mask[..., 1, :] = mask[..., 598, :] = -torch.inf  # rows without any key
    lowered = check(_both(), *_sample(2, 600, 500, shared=2), mask, contrib=contrib)
    assert lowered.op_types.count("Softmax") == 4


@pytest.mark.cpu_only(reason="the operator of its attention")
@contrib
@pytest.mark.parametrize("is_causal, masked, blocks", [(False, False, 2), (False, True, 2), (True, False, 4)])
def test_blocks_of_rows_of_an_unknown_number(check: Callable, contrib: bool, is_causal: bool, masked: bool, blocks: int) -> None:
    """Cut for the number at hand: 3 rows in four blocks leave one of them empty."""

    def both(g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
        return _both(is_causal)(g, q, k + q, v, mask)

    def sample(length: int) -> list[torch.Tensor]:
        return [*_sample(2, length, length), *([randn(2, 1, length, length)] if masked else [])]

    for other in (3, 700):
        lowered = check(both, *sample(600), also=tuple(sample(other)), contrib=contrib)
        assert lowered.op_types.count("Softmax") == 2 * blocks


@pytest.mark.cpu_only(reason="the operator of its attention")
def test_blocks_of_rows_in_double_precision(check: Callable) -> None:
    def gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return _both(True)(*tensors)[2:]

    check(gradients, *_sample(1, 128, 128, dtype=torch.float64))


@pytest.mark.cpu_only(reason="the operator of its attention")
def test_double_precision(check: Callable) -> None:
    def both(*tensors: torch.Tensor) -> list[torch.Tensor]:
        out, logsumexp, *gradients = _both(True)(*tensors)
        return [out, logsumexp if TORCH >= DOUBLE_LOGSUMEXP else logsumexp.float(), *gradients]

    check(both, *_sample(2, 5, 5, dtype=torch.float64))


@pytest.mark.cpu_only(reason="the operator of its attention")
@pytest.mark.parametrize("size", [(5, 5), (1, 1, 5, 5), (2, 1, 5, 5), (2, 4, 5, 5)], ids=str)
def test_masks(check: Callable, size: tuple[int, ...]) -> None:
    mask = randn(size)
    mask[..., 0, 1] = mask[..., 2, 3:] = -torch.inf
    mask[..., 1, :] = -torch.inf  # a row without any key: results and gradients of zero
    check(_both(), *_sample(2, 5, 5), mask)
    check(_both(), *_sample(2, 5, 5, shared=2), mask)


def test_the_least_number_beside_minus_infinity() -> None:
    """As where a mask of causality and one of padding are added, both of the least number. PyTorch's fused kernel for the CPU takes it for the
    largest score of such a row and loses the sum beside it, so that its gradients are off. That for CUDA gives such a row zeros: as in eager.
    """
    least = torch.finfo(torch.float32).min
    mask = torch.full((5, 5), least).triu(1)
    mask[:, :2] += least
    assert (mask[0] == torch.tensor([least, -torch.inf, least, least, least])).all()
    given = [tensor.requires_grad_() for tensor in _sample(2, 5, 5)[1:]]

    def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    fused = torch.compile(attention, backend="ort_training", fullgraph=True)
    wanted = written_out if ON_CPU else attention
    results = [(out := one(*given), *torch.autograd.grad(out.square().sum(), given)) for one in (wanted, fused)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.cpu_only(reason="the operator of its attention")
def test_gradients_through_the_table(check: Callable) -> None:
    """core_aten_decompositions() gives wrong gradients here: its log-sum-exp is something else."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
        return out, *pull(out.cos())

    lowered = check(attention, *_sample(2, 5, 5)[1:], also=(*_sample(3, 6, 6)[1:],))
    assert lowered.op_types.count("Softmax") == 2 and not {"Log", "ReduceMax"} & {*lowered.op_types}
