"""Attention that keeps its probabilities for the backward: where, and with eager's numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import randn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ort_backend
from ort_backend import joint
from ort_backend.lowering import registry
from ort_backend.lowering.kernels import dense_products
from ort_backend.lowering.kernels.attention_choice import few_probabilities
from ort_backend.lowering.ops import attention as ops
from ort_backend.lowering.passes import probabilities
from ort_backend.runtime import capabilities

pytestmark = [
    pytest.mark.skipif(not capabilities.has_training(), reason="one session for forward and backward needs onnxruntime-training"),
    pytest.mark.cpu_only(reason="the attention of PyTorch's CPU kernels, of which ONNX Runtime keeps the probabilities"),
]

Function = Callable[..., torch.Tensor]


@dataclasses.dataclass
class Seen:
    """What the pass did with each graph.

    Attributes:
        pairs: How many pairs there were.
        ops: How often each ONNX operator stands in the last graph.
    """

    pairs: list[int]
    ops: Counter[str]


@pytest.fixture(autouse=True)
def _by_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor on which PyTorch's kernel runs no attention of these sizes: it is ONNX Runtime's that is looked at."""
    monkeypatch.setattr(dense_products, "mkl_is_at_home", lambda: False)
    monkeypatch.setattr(dense_products, "mkl_is_slow", lambda: True)


@pytest.fixture(name="seen")
def _seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    seen = Seen([], Counter())
    keep, finish = joint.keep_probabilities, joint.GraphLowering.finish

    def counted(graph: Any, target: Any) -> int:
        seen.pairs.append(keep(graph, target))
        return seen.pairs[-1]

    def looked_at(lowering: Any) -> Any:
        lowered = finish(lowering)
        seen.ops = Counter(node.op_type for node in lowered.model.graph)
        return lowered

    monkeypatch.setattr(joint, "keep_probabilities", counted)
    monkeypatch.setattr(joint.GraphLowering, "finish", looked_at)
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield seen
    torch._dynamo.reset()


@pytest.fixture(params=[False, True], ids=["", "bounded"])
def bounded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether causal scores are bounded from below, whatever the processor."""
    monkeypatch.setattr(probabilities, "bounds_scores", lambda target: request.param)
    return bool(request.param)


def _sample(length: int = 6, keys: int | None = None, *, heads: int = 4, shared: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    keys = length if keys is None else keys
    return [randn(2, heads, length, 16, dtype=dtype), randn(2, shared, keys, 16, dtype=dtype), randn(2, shared, keys, 16, dtype=dtype)]


def _same_as_eager(function: Function, inputs: list[torch.Tensor], *, call: Any = None, weight: torch.Tensor | None = None) -> Any:
    """The compiled function, whose result and gradients are eager's."""
    compiled = torch.compile(function, backend="ort_training", fullgraph=True) if call is None else call
    results = []
    for one in (function, compiled):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        out = one(*leaves)
        out.backward(torch.linspace(-1, 2, out.numel()).reshape(out.shape))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert ort_backend.report().graphs[-1].python_ops == 0
    return compiled


def _attention(is_causal: bool, scale: float | None = None, mask: torch.Tensor | None = None, gqa: bool = False) -> Function:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 1.5, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)

    return attention


@pytest.mark.parametrize("is_causal, scale", [(False, None), (True, None), (True, 0.3)])
@pytest.mark.parametrize("shared", [4, 2, 1])
def test_one_softmax_serves_both(seen: Seen, bounded: bool, is_causal: bool, scale: float | None, shared: int) -> None:
    _same_as_eager(_attention(is_causal, scale, gqa=shared < 4), _sample(shared=shared))
    assert seen.pairs == [1]
    assert seen.ops["Softmax"] == 1 and seen.ops["FusedMatMul"] == 6
    assert seen.ops["ReduceMax"] == (1 if bounded and is_causal else 0)


@pytest.mark.parametrize("length, blocks", [(127, 1), (128, 2), (129, 2), (512, 4)])
@pytest.mark.parametrize("shared", [4, 2, 1])
def test_blocks_of_rows_keep_their_keys_only(
    seen: Seen, bounded: bool, monkeypatch: pytest.MonkeyPatch, length: int, blocks: int, shared: int
) -> None:
    monkeypatch.setattr(probabilities, "few_probabilities", lambda *sizes: True)
    q, k, v = _sample(length, shared=shared)
    _same_as_eager(_attention(True, gqa=shared < 4), [q, k, v])
    assert seen.pairs == [1]
    assert seen.ops["Softmax"] == blocks and seen.ops["FusedMatMul"] == 6 * blocks
    ends = [0, *(length * (i + 1) // blocks for i in range(blocks))]
    elements = q.numel() + 2 * 4 * sum((end - start) * end for start, end in zip(ends, ends[1:]))
    assert ort_backend.report().graphs[-1].kept_bytes == 4 * elements  # keys and values are inputs of the graph, and nobody keeps parts of them


def test_a_mask_or_keys_of_another_number_are_one_block(seen: Seen) -> None:
    _same_as_eager(_attention(True), _sample(129, 128))
    _same_as_eager(_attention(False, mask=torch.zeros(128, 128).fill_diagonal_(-torch.inf)), _sample(128))
    _same_as_eager(_attention(False), _sample(128))
    assert seen.pairs == [0, 0, 0] and seen.ops["Softmax"] == 2


@pytest.mark.parametrize("length, keys", [(6, 9), (9, 6)])
def test_queries_and_keys_of_unequal_number(seen: Seen, bounded: bool, length: int, keys: int) -> None:
    _same_as_eager(_attention(True), _sample(length, keys))
    assert seen.pairs == [1]


@pytest.mark.parametrize("size", [(6, 6), (2, 1, 6, 6), (2, 4, 6, 6)], ids=str)
def test_masks(seen: Seen, bounded: bool, size: tuple[int, ...]) -> None:
    mask = randn(size)
    mask[..., 0, 1] = mask[..., 2, 3:] = -torch.inf
    mask[..., 1, :] = -torch.inf  # a row without any key: results and gradients of zero
    _same_as_eager(_attention(False, mask=mask), _sample())
    assert seen.pairs == [1] and seen.ops["Softmax"] == 1 and seen.ops["Trilu"] == 0


def test_changing_sizes(seen: Seen, bounded: bool) -> None:
    function = _attention(True)
    compiled = torch.compile(function, backend="ort_training", fullgraph=True)
    for length in (6, 9, 5):
        _same_as_eager(function, _sample(length), call=compiled)
    assert seen.pairs == [1, 1]  # 6, and any length


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e4, -1e4, 1e10, -1e10, 3e37])
def test_scores_out_of_the_ordinary(seen: Seen, bounded: bool, value: float) -> None:
    """The results; gradients of such scores are differences of roundings."""
    q, k, v = _sample()
    k[0, 0, 0, 3] = value  # which each query sees: behind a mask, -inf is added to it
    out = torch.compile(_attention(True), backend="ort_training")(q.requires_grad_(), k, v)
    # PyTorch's kernel returns 0 for a first row of nothing but NaN.
    torch.testing.assert_close(out[:, :, 1:], _attention(True)(q, k, v)[:, :, 1:], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert seen.pairs == [1]


def test_bounded_probabilities_are_zero_behind_the_diagonal(seen: Seen, bounded: bool) -> None:
    q, k, v = _sample()
    v[:, :, 3:] = 1e38
    out = torch.compile(_attention(True), backend="ort_training")(q.requires_grad_(), k, v)
    torch.testing.assert_close(out[:, :, :3], _attention(True)(q, k, v)[:, :, :3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "inputs",
    [_sample(40), _sample(dtype=torch.float64)],
    ids=["long", "float64"],
)
def test_where_they_are_computed_again(seen: Seen, inputs: list[torch.Tensor]) -> None:
    _same_as_eager(_attention(True), inputs)
    assert seen.pairs == [0] and seen.ops["Softmax"] == 2


def test_a_memory_budget_keeps_none(seen: Seen) -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        _same_as_eager(_attention(True), _sample())
    assert seen.pairs == [0]


def test_sums_of_rows_that_are_read_stay(seen: Seen) -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return out + sums.detach().unsqueeze(-1)

    _same_as_eager(function, _sample())
    assert seen.pairs == [0]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_checkpoint_keeps_none(seen: Seen, scaled: bool) -> None:
    """Of queries, keys and values that the checkpoint computes, or gets."""

    def body(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (q * 2, k * 2, v * 2) if scaled else (q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).cos()

    inputs = _sample()
    _same_as_eager(lambda q, k, v: checkpoint(body, q, k, v, use_reentrant=False), inputs)
    assert seen.pairs == [0]
    # PyTorch's partitioner keeps at most the result and its sums of rows beside the arguments, which are inputs of the graph.
    assert ort_backend.report().graphs[-1].kept_bytes <= inputs[0].nbytes + inputs[0].nbytes // 16


def test_two_layers(seen: Seen, bounded: bool) -> None:
    attention = _attention(True)
    _same_as_eager(lambda q, k, v: attention(attention(q, k, v), k, v), _sample())
    assert seen.pairs == [2] and seen.ops["Softmax"] == 2


def test_one_kernel_for_all(seen: Seen) -> None:
    function = _attention(True)
    compiled = torch.compile(function, backend="ort_training", options={"strict": True, "kernels": "onnxruntime"})
    _same_as_eager(function, _sample(), call=compiled)
    assert seen.pairs == [1]


def test_a_users_lowering_comes_first(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    monkeypatch.setitem(registry._table, attention, list(registry.registered()[attention]))
    called = []

    @registry.register(attention, requires=("com.microsoft::FusedMatMul", "com.microsoft::Gelu"))
    def lowering(op: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return ops.flash_attention_fused(op, *args, **kwargs)

    _same_as_eager(_attention(True), _sample())
    assert seen.pairs == [0] and called == [1]


@pytest.mark.parametrize(
    "length, keys, width, kept",
    [(256, 256, 64, True), (256, 257, 64, False), (64, 64, 32, True), (128, 128, 32, False), (512, 512, 128, True), (513, 512, 128, False)],
)
def test_how_many_are_few(length: int, keys: int, width: int, kept: bool) -> None:
    assert few_probabilities(length, keys, width) == kept


@pytest.mark.parametrize("mkl", [False, True])
def test_scores_are_bounded_on_processors_of_intels(mkl: bool) -> None:
    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), mkl=mkl)
    assert probabilities.bounds_scores(target) == mkl
