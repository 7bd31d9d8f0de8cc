"""Masks of attention that a graph computes out of its sizes, with eager's numbers without them. On CUDA they stay."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from default_device import ON_CPU
from torch import nn, randn
from torch.nn import functional as F

from ort_backend import min_cut, regions
from ort_backend.lowering import simplify
from ort_backend.lowering.passes import known_masks

LENGTH = 12


@pytest.fixture(name="dropped")
def _dropped(counted: Callable[..., list[int]]) -> Iterator[list[int]]:
    """From how many nodes each run of the pass took a mask."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "erase_node")
        yield counted("drop_known_masks", known_masks.drop_known_masks, simplify, regions, min_cut)
    torch._dynamo.reset()


Mask = Callable[[torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.register_buffer("past", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 1.5, k, v, attn_mask=self.mask(q))


def _sample(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [randn(2, 3, length, 16, dtype=dtype) for _ in range(3)]


def _same_as_eager(function: Any, inputs: list[torch.Tensor], compiled: Any = None, tolerance: float = 1e-5) -> None:
    if compiled is None:
        compiled = torch.compile(function, backend="ort_training", fullgraph=True)
    results = []
    for one in (function, compiled):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        out = one(*leaves)
        out.backward(torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=10 * tolerance, atol=tolerance)


def _numbers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(x.shape[2])
    return numbers[:, None], numbers[None, :]


def _causal(x: torch.Tensor) -> torch.Tensor:
    rows, columns = _numbers(x)
    return columns <= rows


def _for_each(x: torch.Tensor) -> torch.Tensor:
    return _causal(x)[None, None].expand(x.shape[0], 1, -1, -1)


def _smallest_number(x: torch.Tensor) -> torch.Tensor:
    return torch.full((x.shape[2], x.shape[2]), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)


def _window(x: torch.Tensor) -> torch.Tensor:
    rows, columns = _numbers(x)
    return (columns <= rows) & (columns > rows - 3)


def _next_too(x: torch.Tensor) -> torch.Tensor:
    rows, columns = _numbers(x)
    return columns <= rows + 1


def _distances(x: torch.Tensor) -> torch.Tensor:
    rows, columns = _numbers(x)
    return torch.where(columns <= rows, (columns - rows).to(x.dtype), -torch.inf)


def _penalty(x: torch.Tensor) -> torch.Tensor:
    return torch.full((x.shape[2], x.shape[2]), -2.0, dtype=x.dtype).triu(1)


def _first_key(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[2])[None, :] <= 0  # one row for all queries


KNOWN = [_causal, _for_each, _smallest_number]
OTHERS = [_window, _next_too, _distances, _penalty, _first_key]


@pytest.mark.parametrize("mask", KNOWN)
def test_causal_masks_are_taken_out(dropped: list[int], mask: Mask) -> None:
    _same_as_eager(Attention(mask), _sample())
    assert sum(dropped) == 2 * ON_CPU  # forward and backward
    with torch.no_grad():
        inputs = _sample()
        compiled = torch.compile(Attention(mask), backend="ort_training", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), Attention(mask)(*inputs), rtol=1e-4, atol=1e-5)
    assert sum(dropped) == 3 * ON_CPU


@pytest.mark.parametrize("mask", OTHERS)
def test_other_masks_stay(dropped: list[int], mask: Mask) -> None:
    _same_as_eager(Attention(mask), _sample())
    assert sum(dropped) == 0


def test_a_mask_that_hides_nothing(dropped: list[int]) -> None:
    _same_as_eager(Attention(lambda x: torch.ones(x.shape[2], x.shape[2], dtype=torch.bool)), _sample())
    assert sum(dropped) == 2 * ON_CPU


def test_one_query_sees_one_key(dropped: list[int]) -> None:
    """Its causal mask hides nothing."""
    _same_as_eager(Attention(_causal), _sample(1))
    assert sum(dropped) == 2 * ON_CPU


def test_more_keys_than_queries(dropped: list[int]) -> None:
    """Causal counts from the first of both, a mask that lets the last query see the last key does not."""
    q, (k, v) = randn(2, 3, 5, 16), (randn(2, 3, 9, 16) for _ in range(2))
    _same_as_eager(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(5, 9, dtype=torch.bool).tril(4)), [q, k, v])
    assert sum(dropped) == 0
    _same_as_eager(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(5, 9, dtype=torch.bool).tril()), [q, k, v])
    assert sum(dropped) == 2 * ON_CPU


def test_masks_that_depend_on_inputs_stay(dropped: list[int]) -> None:
    """A buffer may change, and so may the tokens that a mask is made of."""
    model = Attention(_causal)
    model.mask = lambda x: model.past
    _same_as_eager(model, _sample())
    _same_as_eager(Attention(lambda x: _causal(x) & (x[:1, :1, :, 0] < 5)), _sample())
    assert sum(dropped) == 0


def test_drawn_masks_stay(dropped: list[int]) -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=_causal(q) & (torch.rand(LENGTH, LENGTH) < 2))

    _same_as_eager(function, _sample())
    assert sum(dropped) == 0


def test_changing_sizes_keep_their_mask(dropped: list[int]) -> None:
    model = Attention(_causal)
    compiled = torch.compile(model, backend="ort_training", fullgraph=True, dynamic=True)
    for length in (6, 9, 5):
        _same_as_eager(model, _sample(length), compiled)
    assert sum(dropped) == 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-7), (torch.bfloat16, 0.03)], ids=str)
def test_other_dtypes(dropped: list[int], dtype: torch.dtype, tolerance: float) -> None:
    _same_as_eager(Attention(_causal), _sample(dtype=dtype), tolerance=tolerance)
    assert sum(dropped) == 2 * ON_CPU


def test_what_else_reads_a_mask_still_does(dropped: list[int]) -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = _causal(q)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + mask.sum(-1, keepdim=True)

    _same_as_eager(function, _sample())
    assert sum(dropped) == 2 * ON_CPU


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decoders_of_hugging_face(dropped: list[int], name: str) -> None:
    """They compute their mask out of the numbers of positions."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=130, n_embd=64, n_layer=2, n_head=1, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, use_cache=False, **sizes))
    tokens = torch.randint(0, 50, (2, 130))
    compiled = torch.compile(model, backend="ort_training")
    results = []
    for one in (model, compiled):
        model.zero_grad()
        loss = one(input_ids=tokens, labels=tokens).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)
    assert sum(dropped) == 4 * ON_CPU


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("length", [LENGTH, 600])
def test_scores_that_are_not_scaled_up_keep_their_mask(dropped: list[int], length: int, scale: float) -> None:
    """PyTorch's kernel, which long attention runs by, makes NaN of the infinities that it masks with."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        past = torch.ones(length, length, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=past, scale=scale)

    _same_as_eager(attention, [tensor[:1, :1] for tensor in _sample(length)])
    assert set(dropped) == {0}


def test_nothing_of_a_mask_is_kept_while_the_next_is_computed() -> None:
    alive: list[int] = []
    values = weakref.WeakSet[torch.Tensor]()

    def counted(value: torch.Tensor) -> torch.Tensor:
        made = value + 1
        values.add(made)
        alive.append(len(values))
        return made

    graph = torch.fx.Graph()
    node = graph.call_function(torch.zeros, (2, 2))
    for _ in range(5):
        node = graph.call_function(counted, (node,))
    assert known_masks._computed(list(graph.nodes)).tolist() == [[5.0, 5.0], [5.0, 5.0]]
    assert max(alive) == 2


def test_attention_of_symbolic_sizes_keeps_a_mask_of_known_ones(dropped: list[int]) -> None:
    """One mask for every length: the queries' last dimension but one is symbolic."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.full((1, LENGTH), -torch.inf).triu(LENGTH // 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)

    compiled = torch.compile(attention, backend="ort_training", fullgraph=True, dynamic=True)
    for length in (5, 7):
        queries = _sample(length)[0]
        _same_as_eager(attention, [queries, *_sample()[1:]], compiled)
    assert set(dropped) == {0}
