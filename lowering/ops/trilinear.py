"""Sums of products of three tensors, which `nn.Bilinear` and its gradients are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import rank, refuse_empty
from ort_backend.lowering.registry import register

aten = torch.ops.aten


@register(aten._trilinear.default)
def trilinear(
    op: Any,
    i1: ir.Value,
    i2: ir.Value,
    i3: ir.Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> ir.Value:
    """_trilinear(Tensor i1, Tensor i2, Tensor i3, int[] expand1, int[] expand2, int[] expand3, int[] sumdim, int unroll_dim=1) -> Tensor"""
    refuse_empty("products", i1, i2, i3)
    letters = "abcdefghijkl"[: rank(i1) + len(expand1)]
    terms = ["".join(letter for i, letter in enumerate(letters) if i not in expand) for expand in (expand1, expand2, expand3)]
    result = "".join(letter for i, letter in enumerate(letters) if i not in sumdim)
    return op.Einsum(i1, i2, i3, equation=f"{','.join(terms)}->{result}")
