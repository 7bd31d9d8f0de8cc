"""PyTorch's fused attention on a GPU, of which ONNX Runtime has no backward, and what its kernels ask of a bias.

`F.scaled_dot_product_attention` hands the memory efficient kernels a bias whose rows begin at multiples of 16 bytes: where they do not, it pads the
last dimension, and takes a view of the result (`preprocess_mask` in torch 2.13's attention.cpp). A session hands out contiguous tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten

EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default

KERNELS = frozenset({
    EFFICIENT, EFFICIENT_BACKWARD,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_cudnn_attention_backward.default,
})  # fmt: skip
REASON = "PyTorch's fused attention, as in eager PyTorch"


def is_kernel(target: Any) -> bool:
    """Whether it is one of them, or what stands for it."""
    return inspect.unwrap(target) in KERNELS


# Numbers between which rows of a bias begin.
ALIGNMENT = 8


def aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A bias for each query and key, as the kernels take it: (N, H, L, S).

    Args:
        bias: Of a shape that expands to that; its last dimension may go on behind the keys.
        query: (N, H, L, E)
        key: (N, H, S, E)
    """
    keys = key.shape[2]
    if bias.shape[-1] > keys:
        bias = bias[..., :keys]
    if bias.stride(-1) != 1 or any(step % ALIGNMENT for step in bias.stride()[:-1]):
        last = bias.shape[-1]
        bias = F.pad(bias, (0, ALIGNMENT - last % ALIGNMENT))[..., :last]
    return bias.expand(*query.shape[:3], keys)


@functools.wraps(EFFICIENT, assigned=(), updated=())
def _efficient(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, *others: Any, **named: Any) -> Any:
    bias = None if attn_bias is None else aligned(attn_bias, query, key)
    return EFFICIENT(query, key, value, bias, *others, **named)


@functools.wraps(EFFICIENT_BACKWARD, assigned=(), updated=())
def _efficient_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, *others: Any, **named: Any) -> Any:
    bias = None if attn_bias is None else aligned(attn_bias, query, key)
    return EFFICIENT_BACKWARD(grad, query, key, value, bias, *others, **named)


IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {EFFICIENT: _efficient, EFFICIENT_BACKWARD: _efficient_backward}
