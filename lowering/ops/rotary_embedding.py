"""Rotary position embeddings (Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864) as one operator.

`passes.rotary_embeddings` writes it where a program writes one out, as those of Hugging Face do, and for its gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.microsoft import microsoft, typed
from ort_backend.lowering.registry import Unsupported, register

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("rotary_embedding(Tensor x, Tensor cos, Tensor sin) -> Tensor")
ROTARY_EMBEDDING = torch.ops.ort_training.rotary_embedding.default
KERNEL = "com.microsoft::RotaryEmbedding"


@torch.library.impl(_library, "rotary_embedding", "CompositeExplicitAutograd")
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first half of each vector turned against the second, each pair of elements by the angle of its position.

    Args:
        x: (N, S, heads, D), of the dtype of `cos` and `sin`.
        cos: (N or 1, S, D / 2)
        sin: As `cos`.

    Returns:
        (N, S, heads, D), contiguous.
    """
    first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@torch.library.register_fake("ort_training::rotary_embedding", lib=_library)
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@register(ROTARY_EMBEDDING, requires=(KERNEL,))
def rotary_embedding(op, x, cos, sin):
    """ort_training::rotary_embedding(Tensor x, Tensor cos, Tensor sin) -> Tensor: see `rotate`

    ONNX Runtime's operator looks the angles up, by a position for each token or by that of the first.
    """
    heads, width = x.shape[2:]
    if not isinstance(heads, int):
        raise Unsupported("a number of heads that is not known")
    angles, positions = cos.shape[0], int64s(op, [0])
    if angles != 1:
        length = cos.shape[1]
        if not isinstance(angles, int) or not isinstance(length, int):
            raise Unsupported("angles of their own for each of a number of sequences that is not known")
        positions = constant(op, np.arange(angles * length).reshape(angles, length), ir.DataType.INT64)
    tables = (_table(op, one) for one in (cos, sin))
    rows = typed(op.Reshape(x, int64s(op, [0, 0, heads * width])), x.dtype, [*x.shape[:2], heads * width])
    turned = microsoft(op, "RotaryEmbedding", rows, positions, *tables, like=rows)
    return typed(op.Reshape(turned, int64s(op, [0, 0, heads, width])), x.dtype, x.shape)


def _table(op: Any, angles: ir.Value) -> ir.Value:
    """A row for each position."""
    sequences, length, width = angles.shape  # type: ignore[misc]
    rows = length if sequences == 1 else sequences * length
    return typed(op.Reshape(angles, int64s(op, [-1, int(width)])), angles.dtype, [rows, width])  # type: ignore[arg-type]
