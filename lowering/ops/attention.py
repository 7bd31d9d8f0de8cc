"""Scaled dot product attention as PyTorch traces it on CPU: one operator forward, one backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.kernels.attention_blocks import Cuts, add_seen, cut, cuts_of, joined, known_cuts, seen
from ort_backend.lowering.microsoft import microsoft, typed
from ort_backend.lowering.ops.ordering import behind
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, bool is_causal, Tensor? attn_mask, float? scale, bool bounded, int[] ends) -> Tensor[]"
)
_library.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor[] probabilities, Tensor? attn_mask, float? scale, "
    "int[] ends) -> (Tensor, Tensor, Tensor)"
)
ATTENTION = torch.ops.ort_training.attention.default
ATTENTION_BACKWARD = torch.ops.ort_training.attention_backward.default

# exp(-80) / 1000 is still a normal number in float32.
_BOUND = 80.0

_FUSED = ("com.microsoft::FusedMatMul",)


def _product(op: Any, a: ir.Value, b: ir.Value, *, fused: bool, trans_a: int = 0, trans_b: int = 0, alpha: float = 1.0) -> ir.Value:
    """alpha a b, each transposed in the last two dimensions if asked for."""
    rows, columns = a.shape[3 if trans_a else 2], b.shape[2 if trans_b else 3]  # type: ignore[index]
    like = ir.Value(type=a.type, shape=ir.Shape([*a.shape[:2], rows, columns]))  # type: ignore[index]
    if fused:
        return microsoft(op, "FusedMatMul", a, b, like=like, transA=trans_a, transB=trans_b, alpha=alpha)
    swapped = [0, 1, 3, 2]
    a = op.Transpose(a, perm=swapped) if trans_a else a
    b = op.Transpose(b, perm=swapped) if trans_b else b
    product = op.MatMul(a, b)
    return typed(product if alpha == 1 else op.Mul(product, alpha), like.dtype, like.shape)


def _with_heads(op: Any, tensor: ir.Value, like: ir.Value) -> ir.Value:
    """(N, heads, rows, width) with as many heads as `like`.

    Where several heads of queries share one of keys, their rows stand one below the other: no key and no value is repeated.
    """
    heads, width = like.shape[1], tensor.shape[3]  # type: ignore[index]
    if tensor.shape[1] == heads:  # type: ignore[index]
        return tensor
    if not isinstance(heads, int):
        raise Unsupported("an unknown number of heads")
    size = int64s(op, [0, heads, -1, width]) if isinstance(width, int) else op.Concat(int64s(op, [0, heads, -1]), op.Shape(tensor, start=3), axis=0)
    return typed(op.Reshape(tensor, size), tensor.dtype, [tensor.shape[0], heads, None, width])  # type: ignore[index]


@dataclasses.dataclass(frozen=True)
class _Block:
    """Queries and what they attend to.

    Attributes:
        first: The number of the first query, int64: (1,).
        query: (N, H, rows, width)
        key: (N, H or a part of them, S, width), no further than the last query where that is all it sees.
        value: Likewise.
        mask: What is added to the scores: (N or 1, H or 1, rows or 1, S).
        alive: See `_alive_rows`.
    """

    first: ir.Value
    query: ir.Value
    key: ir.Value
    value: ir.Value
    mask: ir.Value | None
    alive: ir.Value | None


def _blocks(op: Any, query: ir.Value, key: ir.Value, value: ir.Value, attn_mask: ir.Value | None, cuts: Cuts | None) -> list[_Block]:
    queries = cut(op, query, cuts)
    masks: list[ir.Value] | list[None] = [None] * len(queries)
    alives: list[ir.Value] | list[None] = masks
    if attn_mask is not None:
        is_cut = attn_mask.shape[-2] != 1  # type: ignore[index]
        masks, alives = (cut(op, one, cuts) if is_cut else [one] * len(queries) for one in _alive_rows(op, attn_mask))
    firsts = [int64s(op, [0]), *(cuts.at[:-1] if cuts is not None else ())]
    return [_Block(*one) for one in zip(firsts, queries, seen(op, key, cuts), seen(op, value, cuts), masks, alives, strict=True)]


def _scores(op: Any, block: _Block, is_causal: bool, scale: float, fused: bool) -> ir.Value:
    """(N, H, L, S): scale query key^T + mask"""
    query, key = block.query, block.key
    scores = _with_heads(op, _product(op, _with_heads(op, query, key), key, fused=fused, trans_b=1, alpha=scale), query)
    if block.mask is not None:
        if block.mask.dtype == ir.DataType.BOOL:
            raise Unsupported("a boolean mask")  # PyTorch makes it a floating-point one before
        scores = op.Add(scores, block.mask)
    if is_causal:
        scores = op.Add(scores, _causal_mask(op, block))
    return typed(scores, query.dtype, [*query.shape[:3], key.shape[2]])  # type: ignore[index]


_MASKS = "ort_training.causal_masks"


def _causal_mask(op: Any, block: _Block) -> ir.Value:
    """(rows, S): -inf right of the diagonal, else 0.

    One for all blocks of these sizes: ONNX Runtime computes it as it loads the graph, and keeps it.
    """
    query, key = block.query, block.key
    rows, keys = query.shape[2], key.shape[2]  # type: ignore[index]
    if not isinstance(rows, int) or not isinstance(keys, int):
        return _above_diagonal(op, op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0), block)
    made = op.builder.graph.meta.setdefault(_MASKS, {})
    place = (query.dtype, rows, keys, block.first.name)  # a constant, of which there is one
    if place not in made or made[place].producer().graph is None:  # rolled back
        made[place] = _above_diagonal(op, int64s(op, [rows, keys]), block)
    mask: ir.Value = made[place]
    return mask


def _above_diagonal(op: Any, size: ir.Value, block: _Block) -> ir.Value:
    above = op.Expand(constant(op, -np.inf, block.query.dtype), size)  # type: ignore[arg-type]
    return op.Trilu(above, op.Add(_scalar(op, block.first), constant(op, 1, ir.DataType.INT64)), upper=1)


def _scalar(op: Any, number: ir.Value) -> ir.Value:
    return op.Squeeze(number, int64s(op, [0]))


def _alive_rows(op: Any, attn_mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(mask without rows of -inf, 1 for each row that leaves a key to attend to): where none is left, PyTorch's results and gradients are 0."""
    dtype = attn_mask.dtype
    assert dtype is not None
    nothing, least = constant(op, -np.inf, dtype), constant(op, float(np.finfo(dtype.numpy()).min), dtype)
    alive = op.Greater(op.ReduceMax(attn_mask, int64s(op, [-1]), keepdims=1), nothing)
    # The other rows keep their -inf, which is less than the least number that a mask may have beside it.
    return op.Max(attn_mask, op.Where(alive, nothing, least)), op.Cast(alive, to=dtype)


def _where_alive(op: Any, alive: ir.Value | None, tensor: ir.Value) -> ir.Value:
    # A product: Where takes ten times as long.
    return tensor if alive is None else typed(op.Mul(tensor, alive), tensor.dtype, tensor.shape)


def _scale(query: ir.Value, scale: float | ir.Value | None) -> float:
    if scale is None:
        width = query.shape[-1]  # type: ignore[index]
        if not isinstance(width, int):
            raise Unsupported("heads of unknown width")
        return 1 / math.sqrt(width)
    if isinstance(scale, ir.Value):
        raise Unsupported("a scale that is not a constant")
    return float(scale)


def _softmax(op: Any, scores: ir.Value, *, bounded: bool = False, first: ir.Value | None = None) -> ir.Value:
    """Along the last dimension.

    Args:
        op: The builder.
        scores: (..., L, S), -inf right of the diagonal where they are `bounded`.
        first: The number of the first row, where they are `bounded`: (1,).
        bounded: Raises what lies more than 80 below a row's largest score, where its exponential would be no normal number, and sets the result right
            of the diagonal to 0: the same but for 2e-35. Some processors take a hundred times as long for a result too small to be a normal number.
    """
    if bounded:
        assert first is not None
        bound, relative = (constant(op, number, scores.dtype) for number in (_BOUND, 1e-6))  # type: ignore[arg-type]
        largest = op.ReduceMax(scores, int64s(op, [-1]), keepdims=1)
        # Beyond 1e9 the next number in float32 is further away than 80.
        lowest = op.Sub(largest, op.Max(bound, op.Mul(op.Abs(largest), relative)))
        probabilities = op.Softmax(op.Max(scores, lowest), axis=-1)
        return typed(op.Trilu(probabilities, _scalar(op, first), upper=0), scores.dtype, scores.shape)
    return typed(op.Softmax(scores, axis=-1), scores.dtype, scores.shape)


def _log_sum_exp(op: Any, scores: ir.Value, probabilities: ir.Value) -> ir.Value:
    """(N, H, L, 1), from the largest score and its probability, which is one by the number of keys at least: a tenth of ReduceLogSumExp's time."""
    last = int64s(op, [-1])
    return op.Sub(op.ReduceMax(scores, last, keepdims=1), op.Log(op.ReduceMax(probabilities, last, keepdims=1)))


def _output(op: Any, probabilities: ir.Value, block: _Block, fused: bool) -> ir.Value:
    out = _with_heads(op, _product(op, _with_heads(op, probabilities, block.value), block.value, fused=fused), block.query)
    return _where_alive(op, block.alive, out)


def _forward(op: Any, query: ir.Value, key: ir.Value, value: ir.Value, dropout_p: float, is_causal: bool, mask: Any, scale: Any, fused: bool) -> Any:
    if dropout_p:
        raise Unsupported("dropout inside attention")
    if fused and query.dtype == ir.DataType.DOUBLE:
        raise Unsupported("FusedMatMul has a float32 scale")
    cuts = cuts_of(op, query, key, is_causal and mask is None)
    outs, sums = [], []
    for block in _blocks(op, query, key, value, mask, cuts):
        scores = _scores(op, block, is_causal, _scale(query, scale), fused)
        probabilities = _softmax(op, scores)
        outs.append(_output(op, probabilities, block, fused))
        sums.append(_where_alive(op, block.alive, _log_sum_exp(op, scores, probabilities)))  # read where the backward is not ours
    return joined(op, outs), op.Squeeze(joined(op, sums), int64s(op, [-1]))


def _backward(
    op: Any,
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    dropout_p: float,
    is_causal: bool,
    mask: Any,
    scale: Any,
    fused: bool,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The probabilities are computed again: `passes.probabilities` decides where they are kept."""
    if dropout_p:
        raise Unsupported("dropout inside attention")
    if fused and query.dtype == ir.DataType.DOUBLE:
        raise Unsupported("FusedMatMul has a float32 scale")
    cuts = cuts_of(op, query, key, is_causal and mask is None)
    key, value = _later(op, grad_out, key, value, cuts)
    blocks = _blocks(op, query, key, value, mask, cuts)
    return _gradients(op, grad_out, blocks, None, is_causal, _scale(query, scale), fused, cuts)


def _later(op: Any, grad_out: ir.Value, key: ir.Value, value: ir.Value, cuts: Cuts | None) -> tuple[ir.Value, ir.Value]:
    """Key and value, out of whose rows ONNX Runtime makes those of the blocks again: it would keep the forward's."""
    if cuts is None:
        return key, value
    return typed(behind(op, key, grad_out), key.dtype, key.shape), typed(behind(op, value, grad_out), value.dtype, value.shape)


def _gradients(
    op: Any,
    grad_out: ir.Value,
    blocks: list[_Block],
    kept: Sequence[ir.Value] | None,
    is_causal: bool,
    factor: float,
    fused: bool,
    cuts: Cuts | None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(gradients of query, key, value), block after block, the last, which is causal attention's largest, first.

    Args:
        kept: The probabilities of each block; None: computed again, those of one at a time.
    """
    grad_query, grad_key, grad_value = list[ir.Value](), None, None
    for i, (block, grad) in reversed(list(enumerate(zip(blocks, cut(op, grad_out, cuts), strict=True)))):
        probabilities = _softmax(op, _scores(op, block, is_causal, factor, fused)) if kept is None else kept[i]
        by_query, by_key, by_value = _gradients_of_block(op, grad, block, probabilities, factor, fused)
        grad_query.insert(0, by_query)
        grad_key, grad_value = add_seen(op, grad_key, by_key, cuts), add_seen(op, grad_value, by_value, cuts)
    assert grad_key is not None and grad_value is not None
    return joined(op, grad_query), grad_key, grad_value


def _gradients_of_block(
    op: Any, grad_out: ir.Value, block: _Block, probabilities: ir.Value, factor: float, fused: bool
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(gradients of query, key, value)"""
    query, key = block.query, block.key
    grad_out = _with_heads(op, _where_alive(op, block.alive, grad_out), key)
    grad_value = _product(op, _with_heads(op, probabilities, key), grad_out, fused=fused, trans_a=1)
    grad_probabilities = _with_heads(op, _product(op, grad_out, block.value, fused=fused, trans_b=1), query)
    if fused:
        grad_scores = microsoft(op, "SoftmaxGrad_13", grad_probabilities, probabilities, like=probabilities, axis=-1)
    else:
        through = op.Mul(grad_probabilities, probabilities)
        grad_scores = op.Sub(through, op.Mul(probabilities, op.ReduceSum(through, int64s(op, [-1]), keepdims=1)))
    grad_scores = _with_heads(op, typed(grad_scores, probabilities.dtype, probabilities.shape), key)
    grad_query = _with_heads(op, _product(op, grad_scores, key, fused=fused, alpha=factor), query)
    grad_key = _product(op, grad_scores, _with_heads(op, query, key), fused=fused, trans_a=1, alpha=factor)
    return grad_query, grad_key, grad_value


@register(aten._scaled_dot_product_flash_attention_for_cpu.default, requires=_FUSED)
def flash_attention_fused(op, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False, *,
    Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)
    """
    return _forward(op, query, key, value, dropout_p, is_causal, attn_mask, scale, True)


@register(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(op, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False, *,
    Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)
    """
    return _forward(op, query, key, value, dropout_p, is_causal, attn_mask, scale, False)


@register(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, requires=(*_FUSED, "com.microsoft::SoftmaxGrad_13"))
def flash_attention_backward_fused(op, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    """_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out,
    Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor, Tensor, Tensor)
    """
    return _backward(op, grad_out, query, key, value, dropout_p, is_causal, attn_mask, scale, True)


@register(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(op, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    """_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out,
    Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor, Tensor, Tensor)
    """
    return _backward(op, grad_out, query, key, value, dropout_p, is_causal, attn_mask, scale, False)


@torch.library.register_fake("ort_training::attention", lib=_library)
def _(query: Any, key: Any, value: Any, is_causal: Any, attn_mask: Any, scale: Any, bounded: Any, ends: Any) -> list[torch.Tensor]:
    rows = np.diff(ends, prepend=0).tolist() if ends else [query.shape[-2]]
    keys = ends or [key.shape[-2]]
    probabilities = [query.new_empty((*query.shape[:-2], *size)) for size in zip(rows, keys)]
    return [query.new_empty((*query.shape[:-1], value.shape[-1])), *probabilities]


@torch.library.register_fake("ort_training::attention_backward", lib=_library)
def _(grad_out: Any, query: Any, key: Any, value: Any, probabilities: Any, attn_mask: Any, scale: Any, ends: Any) -> tuple[torch.Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in (query, key, value))


@register(ATTENTION, requires=_FUSED)
def attention(op, query, key, value, is_causal, attn_mask, scale, bounded, ends):
    """ort_training::attention(Tensor query, Tensor key, Tensor value, bool is_causal, Tensor? attn_mask, float? scale, bool bounded,
    int[] ends) -> Tensor[]: the result, and the probabilities of each block of rows

    `passes.probabilities` writes it. `bounded` (see `_softmax`) and `ends` (see `attention_blocks.causal_ends`) are for causal attention without
    another mask.
    """
    blocks = _blocks(op, query, key, value, attn_mask, known_cuts(op, ends, cuts_keys=True))
    scores = [_scores(op, one, is_causal, _scale(query, scale), True) for one in blocks]
    probabilities = [_softmax(op, one, bounded=bounded, first=block.first) for one, block in zip(scores, blocks)]
    outs = [_output(op, one, block, True) for one, block in zip(probabilities, blocks)]
    return [joined(op, outs), *probabilities]


@register(ATTENTION_BACKWARD, requires=(*_FUSED, "com.microsoft::SoftmaxGrad_13"))
def attention_backward(op, grad_out, query, key, value, probabilities, attn_mask, scale, ends):
    """ort_training::attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor[] probabilities, Tensor? attn_mask,
    float? scale, int[] ends) -> (Tensor, Tensor, Tensor)

    `passes.probabilities` writes it.
    """
    cuts = known_cuts(op, ends, cuts_keys=True)
    key, value = _later(op, grad_out, key, value, cuts)
    blocks = _blocks(op, query, key, value, attn_mask, cuts)
    return _gradients(op, grad_out, blocks, probabilities, False, _scale(query, scale), True, cuts)
