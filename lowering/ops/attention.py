"""Scaled dot product attention as PyTorch traces it on CPU: one operator forward, one backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.attention_choice import causal_blocks
from ort_backend.lowering.constants import constant, int64s
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


def _blocks_of_rows(op: Any, tensor: ir.Value, ends: Sequence[int]) -> list[ir.Value]:
    """(N, H, rows, width) cut in front of each of `ends`, none of which means one block."""
    if not ends:
        return [tensor]
    sizes = np.diff(ends, prepend=0).tolist()
    parts = op.Split(tensor, int64s(op, sizes), axis=2, _outputs=len(ends))
    return [typed(part, tensor.dtype, [*tensor.shape[:2], size, tensor.shape[3]]) for part, size in zip(parts, sizes)]  # type: ignore[index]


def _rows_up_to(op: Any, tensor: ir.Value, ends: Sequence[int]) -> list[ir.Value]:
    """The rows of (N, H, rows, width) in front of each of `ends`: what the queries of each block of a causal attention see."""
    if not ends:
        return [tensor]
    starts, axes = int64s(op, [0]), int64s(op, [2])
    parts = [op.Slice(tensor, starts, int64s(op, [end]), axes) for end in ends[:-1]]
    shapes = [[*tensor.shape[:2], end, tensor.shape[3]] for end in ends]  # type: ignore[index]
    return [*(typed(part, tensor.dtype, shape) for part, shape in zip(parts, shapes)), tensor]


def _joined(op: Any, parts: list[ir.Value]) -> ir.Value:
    """The inverse of `_blocks_of_rows`."""
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=2)


def _sum_of_rows(op: Any, parts: list[ir.Value], ends: Sequence[int]) -> ir.Value:
    """The sum of what has the sizes of `_rows_up_to`, its missing rows 0."""
    total, later = parts[-1], list[ir.Value]()
    for i in reversed(range(1, len(parts))):
        total, rest = op.Split(total, int64s(op, [ends[i - 1], ends[i] - ends[i - 1]]), axis=2, _outputs=2)
        later.insert(0, rest)
        total = op.Add(total, parts[i - 1])
    return _joined(op, [total, *later])


@dataclasses.dataclass(frozen=True)
class _Block:
    """Queries and what they attend to.

    Attributes:
        first: The number of the first query.
        query: (N, H, rows, width)
        key: (N, H or a part of them, S, width), causal attention's no further than the last query.
        value: Likewise.
    """

    first: int
    query: ir.Value
    key: ir.Value
    value: ir.Value


def _blocks(op: Any, query: ir.Value, key: ir.Value, value: ir.Value, ends: Sequence[int]) -> list[_Block]:
    parts = _blocks_of_rows(op, query, ends), _rows_up_to(op, key, ends), _rows_up_to(op, value, ends)
    return [_Block(*one) for one in zip([0, *ends[:-1]], *parts, strict=True)]


def _ends(query: ir.Value, key: ir.Value, is_causal: bool, attn_mask: ir.Value | None) -> list[int]:
    return causal_blocks(query.shape[2], key.shape[2]) if is_causal and attn_mask is None else []  # type: ignore[index]


def _scores(
    op: Any, query: ir.Value, key: ir.Value, is_causal: bool, attn_mask: ir.Value | None, scale: float, fused: bool, first: int = 0
) -> ir.Value:
    """(N, H, L, S): scale query key^T + mask, `first` the number of the first row."""
    scores = _with_heads(op, _product(op, _with_heads(op, query, key), key, fused=fused, trans_b=1, alpha=scale), query)
    if attn_mask is not None:
        if attn_mask.dtype == ir.DataType.BOOL:
            raise Unsupported("a boolean mask")  # PyTorch makes it a floating-point one before
        scores = op.Add(scores, attn_mask)
    if is_causal:
        size = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
        above = op.Expand(constant(op, -np.inf, query.dtype), size)  # type: ignore[arg-type]
        above = op.Trilu(above, constant(op, 1 + first, ir.DataType.INT64), upper=1)
        scores = op.Add(scores, above)
    return typed(scores, query.dtype, [*query.shape[:3], key.shape[2]])  # type: ignore[index]


def _alive_rows(op: Any, attn_mask: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """(mask without rows of -inf, 1 for each row that leaves a key to attend to): where none is left, PyTorch's results and gradients are 0."""
    if attn_mask is None:
        return None, None
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


def _softmax(op: Any, scores: ir.Value, *, bounded: bool = False, first: int = 0) -> ir.Value:
    """Along the last dimension.

    Args:
        op: The builder.
        scores: (..., L, S), -inf right of the diagonal where they are `bounded`.
        first: The number of the first row.
        bounded: Raises what lies more than 80 below a row's largest score, where its exponential would be no normal number, and sets the result right
            of the diagonal to 0: the same but for 2e-35. Some processors take a hundred times as long for a result too small to be a normal number.
    """
    if bounded:
        bound, relative = (constant(op, number, scores.dtype) for number in (_BOUND, 1e-6))  # type: ignore[arg-type]
        largest = op.ReduceMax(scores, int64s(op, [-1]), keepdims=1)
        # Beyond 1e9 the next number in float32 is further away than 80.
        lowest = op.Sub(largest, op.Max(bound, op.Mul(op.Abs(largest), relative)))
        probabilities = op.Softmax(op.Max(scores, lowest), axis=-1)
        return typed(op.Trilu(probabilities, constant(op, first, ir.DataType.INT64), upper=0), scores.dtype, scores.shape)
    return typed(op.Softmax(scores, axis=-1), scores.dtype, scores.shape)


def _log_sum_exp(op: Any, scores: ir.Value, probabilities: ir.Value) -> ir.Value:
    """(N, H, L, 1), from the largest score and its probability, which is one by the number of keys at least: a tenth of ReduceLogSumExp's time."""
    last = int64s(op, [-1])
    return op.Sub(op.ReduceMax(scores, last, keepdims=1), op.Log(op.ReduceMax(probabilities, last, keepdims=1)))


def _output(op: Any, probabilities: ir.Value, value: ir.Value, query: ir.Value, alive: ir.Value | None, fused: bool) -> ir.Value:
    out = _with_heads(op, _product(op, _with_heads(op, probabilities, value), value, fused=fused), query)
    return _where_alive(op, alive, out)


def _forward(op: Any, query: ir.Value, key: ir.Value, value: ir.Value, dropout_p: float, is_causal: bool, mask: Any, scale: Any, fused: bool) -> Any:
    if dropout_p:
        raise Unsupported("dropout inside attention")
    if fused and query.dtype == ir.DataType.DOUBLE:
        raise Unsupported("FusedMatMul has a float32 scale")
    ends = _ends(query, key, is_causal, mask)
    mask, alive = _alive_rows(op, mask)
    outs, sums = [], []
    for block in _blocks(op, query, key, value, ends):
        scores = _scores(op, block.query, block.key, is_causal, mask, _scale(query, scale), fused, block.first)
        probabilities = _softmax(op, scores)
        outs.append(_output(op, probabilities, block.value, block.query, alive, fused))
        sums.append(_where_alive(op, alive, _log_sum_exp(op, scores, probabilities)))  # read where the backward is not ours
    return _joined(op, outs), op.Squeeze(_joined(op, sums), int64s(op, [-1]))


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
    ends = _ends(query, key, is_causal, mask)
    mask, alive = _alive_rows(op, mask)
    factor = _scale(query, scale)
    key, value = _later(op, grad_out, key, value, ends)
    blocks = _blocks(op, query, key, value, ends)
    probabilities = [_softmax(op, _scores(op, one.query, one.key, is_causal, mask, factor, fused, one.first)) for one in blocks]
    return _gradients(op, grad_out, blocks, probabilities, alive, factor, fused, ends)


def _later(op: Any, grad_out: ir.Value, key: ir.Value, value: ir.Value, ends: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """Key and value, out of whose rows ONNX Runtime makes those of the blocks again: it would keep the forward's."""
    if not ends:
        return key, value
    return typed(behind(op, key, grad_out), key.dtype, key.shape), typed(behind(op, value, grad_out), value.dtype, value.shape)


def _gradients(
    op: Any,
    grad_out: ir.Value,
    blocks: list[_Block],
    probabilities: Sequence[ir.Value],
    alive: ir.Value | None,
    factor: float,
    fused: bool,
    ends: Sequence[int],
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(gradients of query, key, value)"""
    parts = [
        _gradients_of_block(op, grad, block.query, block.key, block.value, one, alive, factor, fused)
        for grad, block, one in zip(_blocks_of_rows(op, grad_out, ends), blocks, probabilities, strict=True)
    ]
    grad_query, grad_key, grad_value = (list(grads) for grads in zip(*parts))
    return _joined(op, grad_query), _sum_of_rows(op, grad_key, ends), _sum_of_rows(op, grad_value, ends)


def _gradients_of_block(
    op: Any,
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    probabilities: ir.Value,
    alive: ir.Value | None,
    factor: float,
    fused: bool,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(gradients of query, key, value)"""
    grad_out = _with_heads(op, _where_alive(op, alive, grad_out), key)
    grad_value = _product(op, _with_heads(op, probabilities, key), grad_out, fused=fused, trans_a=1)
    grad_probabilities = _with_heads(op, _product(op, grad_out, value, fused=fused, trans_b=1), query)
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

    `passes.probabilities` writes it. `bounded` (see `_softmax`) and `ends` (see `attention_choice.causal_blocks`) are for causal attention without
    another mask.
    """
    mask, alive = _alive_rows(op, attn_mask)
    blocks = _blocks(op, query, key, value, ends)
    scores = [_scores(op, one.query, one.key, is_causal, mask, _scale(query, scale), True, one.first) for one in blocks]
    probabilities = [_softmax(op, one, bounded=bounded, first=block.first) for one, block in zip(scores, blocks)]
    outs = [_output(op, one, block.value, block.query, alive, True) for one, block in zip(probabilities, blocks)]
    return [_joined(op, outs), *probabilities]


@register(ATTENTION_BACKWARD, requires=(*_FUSED, "com.microsoft::SoftmaxGrad_13"))
def attention_backward(op, grad_out, query, key, value, probabilities, attn_mask, scale, ends):
    """ort_training::attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor[] probabilities, Tensor? attn_mask,
    float? scale, int[] ends) -> (Tensor, Tensor, Tensor)

    `passes.probabilities` writes it.
    """
    _, alive = _alive_rows(op, attn_mask)
    key, value = _later(op, grad_out, key, value, ends)
    blocks = _blocks(op, query, key, value, ends)
    return _gradients(op, grad_out, blocks, probabilities, alive, _scale(query, scale), True, ends)
