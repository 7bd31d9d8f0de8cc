"""In which order a tensor of the trace lies in memory, where an operator's meaning depends on it: ONNX Runtime knows contiguous tensors only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of
from ort_backend.lowering.symbolic import hint

# Operators whose meaning depends on the strides of their argument and not on its values alone.
READS_STRIDES = {
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
}

# Operators that hand the factors of the transpose to the backward where their argument is contiguous, of the argument itself where it is not. Which
# of them PyTorch's formulas are for (`linalg_det_backward`, `slogdet_backward` in FunctionsManual.cpp) was decided in the trace.
DETERMINANTS = {
    torch.ops.aten._linalg_det.default,
    torch.ops.aten._linalg_slogdet.default,
}


def order_for(target: Any, fake: torch.Tensor) -> tuple[int, ...] | None:
    """The order of an argument like `fake` with which `target` gives what it gave in the trace; None for contiguous, or for any."""
    if target in DETERMINANTS and not _example(fake).is_contiguous():
        *batch, rows, columns = range(fake.dim())
        return (*batch, columns, rows)
    return order_of(fake) if target in READS_STRIDES else None


def order_of(fake: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory to the innermost, as eager lays out what it computes element by element from this tensor.

    Returns:
        What `torch.empty_permuted` takes; None for that of a contiguous tensor. Sizes and strides that are symbolic stand for their examples.
    """
    if (like := _example(fake)).is_contiguous():
        return None
    strides = torch.empty_like(like).stride()
    return tuple(sorted(range(fake.dim()), key=lambda d: -strides[d]))


def is_dense(fake: torch.Tensor) -> bool:
    """Whether the elements lie one beside the other, in any order."""
    like = _example(fake)
    return all(n == 1 or mine == dense for n, mine, dense in zip(like.shape, like.stride(), torch.empty_like(like).stride()))


def storage_order(fake: torch.Tensor) -> tuple[int, ...] | None:
    """The same for a tensor without gaps, which a permutation of a contiguous one can stand for; None for any other."""
    order = order_of(fake)
    return order if order is None or is_dense(fake) else None


def entering_order(fake: Any) -> tuple[int, ...] | None:
    """The order of its dimensions in which an argument enters a graph as it lies, which a Transpose undoes there; None where its own order does.

    On the CPU, where one dimension lies behind the others, as the channels in `channels_last`: there ONNX Runtime's Transpose takes 0.15 to 0.9 of
    the time in which PyTorch copies the tensor, and none where a product or another Transpose takes it in. In other orders it takes up to 3 times as
    long, of integers of 64 bits 6 times (AMD EPYC of family 26; onnxruntime-training 1.19.2, onnxruntime 1.32.0, torch 2.13).
    """
    if not isinstance(fake, torch.Tensor) or fake.device.type != "cpu" or not fake.is_floating_point() or (order := storage_order(fake)) is None:
        return None
    outer = list(order[:-1])
    return order if outer == sorted(outer) else None


def arranged(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor in this order of `order_of`: a copy if it has another."""
    if order is None:
        return tensor.contiguous()
    made = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
    return tensor if made.stride() == tensor.stride() else made.copy_(tensor)


def reads_other_memory(node: fx.Node) -> bool:
    """Whether a node of `READS_STRIDES` addresses memory around the elements of its argument, which a session does not see."""
    named = arguments_of(node)
    fake = named["self"].meta["val"]
    offset = named["storage_offset"]
    size, stride = map(_numbers, (named["size"], named["stride"]))
    begins, start = _numbers([fake.storage_offset(), fake.storage_offset() if offset is None else offset])
    if fake.numel() == 0 or 0 in size:
        return False
    if not is_dense(fake) or (begins and offset is not None):  # a session sees a tensor without gaps that begins at 0
        return True
    return start < begins or start + sum((n - 1) * step for n, step in zip(size, stride)) >= begins + math.prod(_numbers(fake.shape))


def _example(fake: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, of the fake tensor's sizes and strides."""
    return torch.empty_strided(_numbers(fake.shape), _numbers(fake.stride()), device="meta")


def _numbers(values: Sequence[Any]) -> list[int]:
    """Numbers, or the examples of symbolic ones."""
    return [hint(value.meta["val"] if isinstance(value, fx.Node) else value) for value in values]
