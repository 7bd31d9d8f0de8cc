"""Biases of PyTorch's fused attention: aligned as its kernels ask for, and not written down for all queries and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ort_backend.lowering.kernels import fused_attention
from ort_backend.lowering.kernels.fused_attention import ALIGNMENT, EFFICIENT, EFFICIENT_BACKWARD, IMPLEMENTATIONS, aligned
from ort_backend.lowering.passes.bare_biases import take_bare_biases
from ort_backend.lowering.splitting.eager_nodes import evaluation

aten = torch.ops.aten

SIZES = 2, 3, 6, 25  # batch, heads, queries, keys


def _tensors(keys: int = SIZES[3]) -> tuple[Tensor, Tensor]:
    return torch.randn(*SIZES[:3], 8), torch.randn(*SIZES[:2], keys, 8)


@pytest.mark.parametrize("shape", [SIZES, (2, 1, 6, 25), (1, 1, 6, 25), (2, 1, 1, 25), (6, 25), (25,), (2, 3, 6, 1), (6, 1), (2, 1, 6, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_begin_where_kernels_take_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key = _tensors()
    bias = torch.randn(shape).to(dtype)
    got = aligned(bias, query, key)
    assert got.shape == SIZES and torch.equal(got, bias[..., :25].expand(SIZES))
    assert all(step % ALIGNMENT == 0 for step in got.stride()[:-1])
    assert got.stride(-1) == 1 or shape[-1] == 1


def test_what_is_aligned_is_not_copied() -> None:
    query, key = _tensors(keys=24)
    for bias in (torch.randn(2, 1, 1, 24), torch.randn(2, 3, 6, 24), torch.randn(6, 32)):
        assert aligned(bias, query, key).data_ptr() == bias.data_ptr()


def test_as_eager_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strides that `F.scaled_dot_product_attention` hands over where it takes the memory efficient kernels (torch's `preprocess_mask`)."""
    query, key = _tensors()
    bias = torch.randn(2, 1, 6, 25)
    eager = F.pad(bias, (0, 7))[..., :25].expand(SIZES)
    assert aligned(bias, query, key).stride() == eager.stride()


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
    """As PyTorch decomposes attention with a mask."""
    bias = F.pad(mask, (0, 7))[..., : mask.shape[-1]].expand(*query.shape[:3], key.shape[2])
    out, sums, seed, offset = EFFICIENT(query, key, value, bias, True)
    return EFFICIENT_BACKWARD(out, query, key, value, bias, out, sums, seed, offset, 0.0, [True, True, True, False])[:3]


def _traced(mode: str, mask: Tensor) -> fx.GraphModule:
    query, key = _tensors()
    with torch.device("meta"):
        inputs = [torch.empty_like(one, device="meta") for one in (query, key, key, mask)]
    return make_fx(_attention, tracing_mode=mode)(*inputs)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("shape", [SIZES, (2, 1, 6, 25), (2, 1, 1, 25)])
def test_a_bias_is_taken_before_it_is_expanded(mode: str, shape: tuple[int, ...]) -> None:
    graph = _traced(mode, torch.randn(shape)).graph
    assert take_bare_biases(graph) == 2
    given = [node.args[3 if node.target is EFFICIENT else 4] for node in graph.nodes if node.target in (EFFICIENT, EFFICIENT_BACKWARD)]
    assert [one.target for one in given] == [aten.constant_pad_nd.default] * 2


def test_a_column_is_not_taken_for_rows() -> None:
    """One number for all keys: behind the padding stands none for the others."""

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        return EFFICIENT(query, key, value, F.pad(mask, (0, 7))[..., :1].expand(*query.shape[:3], key.shape[2]), True)

    query, key = (one.to("meta") for one in _tensors())
    graph = make_fx(function, tracing_mode="fake")(query, key, key, torch.empty(2, 1, 6, 1, device="meta")).graph
    take_bare_biases(graph)
    bias = next(node.args[3] for node in graph.nodes if node.target is EFFICIENT)
    assert bias.target is aten.expand.default


def test_both_nodes_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a session and, in the plain package, between two."""
    seen: list[Any] = []
    query, key = _tensors()
    bias = torch.randn(2, 1, 6, 25)
    for name in ("EFFICIENT", "EFFICIENT_BACKWARD"):
        monkeypatch.setattr(fused_attention, name, lambda *args, **_: seen.append(args))
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("query", "key", "bias")]
    forward = graph.call_function(EFFICIENT, (nodes[0], nodes[1], nodes[1], nodes[2], True))
    evaluation(forward, {node: i for i, node in enumerate(nodes)})([query, key, bias])
    IMPLEMENTATIONS[EFFICIENT_BACKWARD](query, query, key, key, bias, query, None, None, None, 0.0, [True] * 4)
    IMPLEMENTATIONS[EFFICIENT](query, key, key, None, True)
    assert seen[0][3].stride() == seen[1][4].stride() == (6 * 32, 0, 32, 1) and seen[2][3] is None
