"""How tensors go between PyTorch and a node that calls it: contiguous, real, of a dtype that ONNX has, the dimensions in the order of memory."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from ort_backend.lowering.call_orders import Order
from ort_backend.lowering.dtypes import NATIVE, carrier
from ort_backend.lowering.permuting import inverse

# A contiguous tensor of these is its own carrier. DLPack hands bool tensors over as bytes.
AS_THEY_ARE = frozenset(dtype for dtype in NATIVE if dtype != torch.bool)


def to_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as ONNX carries it: contiguous, real, of a dtype that ONNX has. Copies only what is not contiguous."""
    if tensor.dtype in AS_THEY_ARE and tensor.is_contiguous() and tensor.numel() and not tensor.is_neg():
        return tensor
    if tensor.numel() == 0:  # torch calls every empty tensor contiguous, ONNX Runtime reads its strides
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).contiguous()
    kind = carrier(tensor.dtype)
    if tensor.dtype == torch.bool or (kind is not None and not kind.native):
        return tensor.contiguous().view(torch.uint8)
    return tensor.resolve_neg().contiguous() if tensor.is_neg() else tensor.contiguous()


def from_carrier(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `to_carrier`, without a copy."""
    if tensor.dtype == dtype:
        return tensor
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    return tensor.view(dtype)


def arrival(dtype: torch.dtype, order: Order) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes a tensor of this dtype of its carrier, whose dimensions come in this order; None where the carrier is the tensor."""
    if order is None:
        return None if dtype in AS_THEY_ARE else functools.partial(from_carrier, dtype=dtype)
    permute = operator.methodcaller("permute", inverse(order))
    return permute if dtype in AS_THEY_ARE else lambda tensor: permute(from_carrier(tensor, dtype))


def departure(dtype: torch.dtype | None, order: Order) -> Callable[[Any], torch.Tensor]:
    """What makes the carrier of a result that has this dtype if it is a tensor, its dimensions in this order."""
    if dtype not in AS_THEY_ARE:
        return lambda value: given(value, dtype, order)

    def depart(value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            return given(value, dtype, order)
        carried = value if order is None else value.permute(order)
        is_carrier = carried.dtype is dtype and carried.is_contiguous() and carried.numel() and not carried.is_neg()
        return carried if is_carrier else given(value, dtype, order)

    return depart


def given(value: Any, dtype: torch.dtype | None, order: Order) -> torch.Tensor:
    """The carrier of a result, also where it is a number or None: copies only what does not lie in this order in memory."""
    tensor = as_tensor(value, dtype)
    return to_carrier(tensor if order is None else tensor.permute(order))


def as_tensor(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """A result as a tensor of the dtype that its fake value has: also None, an empty one, and a number."""
    if isinstance(value, torch.Tensor):  # whose dtype is not the fake one's in mixed precision: a group norm's statistics (seen in torch 2.13)
        return value if dtype is None or value.dtype == dtype else value.to(dtype)
    return torch.empty(0, device="cpu") if value is None else torch.tensor(value, device="cpu")


def number_of(tensor: torch.Tensor) -> int | float | bool:
    """The number that a 0-d tensor holds, or that stands in the shape of one without elements (`passes.host_values`)."""
    return tensor.item() if tensor.dim() == 0 else tensor.shape[0] - tensor.shape[1]
