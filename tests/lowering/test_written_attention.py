"""Attention that is written out becomes one operator where it is long; what is something else stays what it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import ON_CPU, seeded
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ort_backend.lowering.passes.written_attention import fold_attention

Attention = Callable[[Tensor, Tensor, Tensor], Any]

N, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 10, 12, 8
LATER = torch.ones(QUERIES, KEYS).tril() == 0
PADDED = torch.zeros(N, 1, 1, KEYS).index_fill(3, torch.tensor([0, 5]), torch.finfo(torch.float32).min)
ALL_HIDDEN = LATER.index_fill(0, torch.tensor([3]), True)


def _softmax(q: Tensor, k: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2) / math.sqrt(WIDTH), dim=-1)


def _of_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * WIDTH**-0.5
    weights = weights + PADDED
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = nn.functional.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def _of_nano_gpt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(LATER[None, None], float("-inf"))
    return F.softmax(att, dim=-1) @ v


def _with_minus_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * 0.3) @ k.mT + torch.zeros(QUERIES, KEYS).masked_fill(LATER, -math.inf)).softmax(-1) @ v


def _with_other_methods(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.matmul(k.permute(0, 1, 3, 2)).mul(0.2).softmax(3).matmul(v)


def _by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.2
    return torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(dim=-1), v)


def _by_batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    mask = torch.zeros(N * HEADS, QUERIES, KEYS).masked_fill(LATER, -math.inf)
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) / 4 + mask, dim=2), v)


FOLDED = [_of_transformers, _of_nano_gpt, _with_minus_infinity, _with_other_methods, _by_einsum, _by_batches]


def _with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(_softmax(q, k), 0.5, True) @ v


def _with_probabilities_that_are_read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = _softmax(q, k)
    return probabilities @ v, probabilities


def _with_a_finite_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(LATER, -1e9).softmax(-1) @ v  # where all is hidden, eager's gradient of the scores is zero


def _with_a_scaled_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.mT + PADDED) * 0.5, -1) @ v


def _with_a_bias_that_learns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT + q.mean((0, 1, 3))[:, None].expand(QUERIES, KEYS), -1) @ v


def _over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT, -2) @ v


def _of_what_is_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1
    probabilities = _softmax(q, k)
    q.zero_()
    return probabilities @ v + q


def _with_scores_that_are_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[..., 0] = -1.0
    return scores.softmax(-1) @ v


def _with_wider_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _softmax(q, k) @ torch.cat([v, v], -1)


def _with_the_same_keys_for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _softmax(q, k[:, :1]) @ v[:, :1]


STAYS = [
    _with_dropout,
    _with_probabilities_that_are_read,
    _with_a_finite_mask,
    _with_a_scaled_mask,
    _with_a_bias_that_learns,
    _over_queries,
    _of_what_is_written_to,
    _with_scores_that_are_written_to,
    _with_wider_values,
    _with_the_same_keys_for_all_heads,
]


def _arguments(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(N, HEADS, one, WIDTH, generator=seeded(one), dtype=dtype).requires_grad_() for one in (QUERIES, KEYS, KEYS)]


def _compiled(function: Attention, *, dynamic: bool = False, few: int = 8) -> tuple[bool, Any]:
    """Whether attention is one operator in Dynamo's graph behind the pass, and what runs it."""
    found: list[bool] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        is_folded = fold_attention(gm, few) > 0
        assert is_folded == bool(gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention))
        assert not is_folded or not gm.graph.find_nodes(op="call_function", target=F.softmax)
        found.append(is_folded)
        return gm.forward

    torch._dynamo.reset()
    runner = torch.compile(function, backend=backend, dynamic=dynamic)
    torch.manual_seed(0)
    result = runner(*_arguments())
    return found[0], result


def _is_same(got: Any, want: Any) -> None:
    for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (got, want)), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-5, atol=1e-6)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", FOLDED)
def test_one_operator(function: Attention, dynamic: bool) -> None:
    is_folded, result = _compiled(function, dynamic=dynamic)
    assert is_folded
    _is_same(result, function(*_arguments()))


@pytest.mark.parametrize("function", FOLDED)
def test_short_attention_stays(function: Attention) -> None:
    assert not _compiled(function, few=QUERIES)[0]


@pytest.mark.parametrize("function", STAYS)
def test_what_is_something_else_stays(function: Attention) -> None:
    is_folded, result = _compiled(function)
    assert not is_folded
    torch.manual_seed(0)
    _is_same(result, function(*_arguments()))


@pytest.mark.parametrize("added", [False, True])
def test_a_query_that_sees_no_key_gets_what_eager_gives_it(added: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if added:
            return (q @ k.mT + torch.zeros(QUERIES, KEYS).masked_fill(ALL_HIDDEN, -math.inf)).softmax(-1) @ v
        return (q @ k.mT).masked_fill(ALL_HIDDEN, -math.inf).softmax(-1) @ v

    is_folded, result = _compiled(function)
    assert is_folded and result[:, :, 3].isnan().all()
    _is_same(result, function(*_arguments()))


@pytest.mark.parametrize("kind", ["gradients of gradients", "forward mode inside", "forward mode"])
def test_its_derivatives_of_all_kinds_stay(kind: str) -> None:
    """PyTorch's fused kernels have no second derivative, and none in forward mode."""
    q = torch.randn(1, 1, 300, 4, generator=seeded(0))

    def loss(q: Tensor) -> Tensor:
        return (((q @ q.mT).softmax(-1) @ q) ** 2).mean()

    def gradients(q: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (torch.func.grad(loss)(x) ** 2).sum())(q)

    function = {"gradients of gradients": gradients, "forward mode inside": lambda q: torch.func.jvp(loss, (q,), (q,))[1]}.get(kind, loss)
    runner = torch.compile(function, backend="ort_training")
    if kind == "forward mode":
        with torch.no_grad():
            got, want = (torch.func.jvp(one, (q,), (q,))[1] for one in (runner, function))
    else:
        got, want = runner(q), function(q)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


class Block(nn.Module):
    """A causal layer with the mask in a buffer, as nanoGPT's."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("later", torch.ones(length, length).tril()[None, None] == 0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 16)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * 0.25
        y = scores.masked_fill(self.later[:, :, : x.size(1), : x.size(1)], -math.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(x.shape))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_gradients_hold_and_no_probabilities_are_kept(dynamic: bool) -> None:
    length = 300
    x = torch.randn(2, length, 32, generator=seeded(0)).requires_grad_()
    ran = same_as_eager(Block(length), call(x), graphs=1, python_ops=None, dynamic=dynamic)
    if ON_CPU:
        assert ran.graphs[0].kept_bytes < 2 * 2 * length * length * 4
