"""Scaled dot product attention as PyTorch traces it on CPU: one operator forward, one backward."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.microsoft import microsoft, typed
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

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


def _scores(op: Any, query: ir.Value, key: ir.Value, is_causal: bool, attn_mask: ir.Value | None, scale: float, fused: bool) -> ir.Value:
    """(N, H, L, S): scale query key^T + mask."""
    scores = _with_heads(op, _product(op, _with_heads(op, query, key), key, fused=fused, trans_b=1, alpha=scale), query)
    if attn_mask is not None:
        if attn_mask.dtype == ir.DataType.BOOL:
            raise Unsupported("a boolean mask")  # PyTorch makes it a floating-point one before
        scores = op.Add(scores, attn_mask)
    if is_causal:
        size = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
        above = op.Trilu(op.Expand(constant(op, -np.inf, query.dtype), size), constant(op, 1, ir.DataType.INT64), upper=1)  # type: ignore[arg-type]
        scores = op.Add(scores, above)
    return typed(scores, query.dtype, [*query.shape[:3], key.shape[2]])  # type: ignore[index]


def _alive_rows(op: Any, attn_mask: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """(mask without -inf, 1 for each of its rows that leaves a key to attend to): where none is left, PyTorch's results and gradients are 0."""
    if attn_mask is None:
        return None, None
    dtype = attn_mask.dtype
    assert dtype is not None
    alive = op.Greater(op.ReduceMax(attn_mask, int64s(op, [-1]), keepdims=1), constant(op, -np.inf, dtype))
    return op.Max(attn_mask, constant(op, float(np.finfo(dtype.numpy()).min), dtype)), op.Cast(alive, to=dtype)


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


def _forward(op: Any, query: ir.Value, key: ir.Value, value: ir.Value, dropout_p: float, is_causal: bool, mask: Any, scale: Any, fused: bool) -> Any:
    if dropout_p:
        raise Unsupported("dropout inside attention")
    if fused and query.dtype == ir.DataType.DOUBLE:
        raise Unsupported("FusedMatMul has a float32 scale")
    mask, alive = _alive_rows(op, mask)
    scores = _scores(op, query, key, is_causal, mask, _scale(query, scale), fused)
    probabilities = typed(op.Softmax(scores, axis=-1), scores.dtype, scores.shape)
    out = _with_heads(op, _product(op, _with_heads(op, probabilities, value), value, fused=fused), query)
    # Nothing reads it where the backward is ours.
    logsumexp = _where_alive(op, alive, op.ReduceLogSumExp(scores, int64s(op, [-1]), keepdims=1))
    return _where_alive(op, alive, out), op.Squeeze(logsumexp, int64s(op, [-1]))


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
    """The probabilities are computed again: they are larger than everything else that attention would have to keep."""
    if dropout_p:
        raise Unsupported("dropout inside attention")
    if fused and query.dtype == ir.DataType.DOUBLE:
        raise Unsupported("FusedMatMul has a float32 scale")
    factor = _scale(query, scale)
    mask, alive = _alive_rows(op, mask)
    scores = _scores(op, query, key, is_causal, mask, factor, fused)
    probabilities = typed(op.Softmax(scores, axis=-1), scores.dtype, scores.shape)
    grad_out = _with_heads(op, _where_alive(op, alive, grad_out), key)
    grad_value = _product(op, _with_heads(op, probabilities, key), grad_out, fused=fused, trans_a=1)
    grad_probabilities = _with_heads(op, _product(op, grad_out, value, fused=fused, trans_b=1), query)
    if fused:
        grad_scores = microsoft(op, "SoftmaxGrad_13", grad_probabilities, probabilities, like=scores, axis=-1)
    else:
        through = op.Mul(grad_probabilities, probabilities)
        grad_scores = op.Sub(through, op.Mul(probabilities, op.ReduceSum(through, int64s(op, [-1]), keepdims=1)))
    grad_scores = _with_heads(op, typed(grad_scores, scores.dtype, scores.shape), key)
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
