"""Results that PyTorch's kernels lay out in memory as their fake tensors do not say.

What draws random numbers for each element of a tensor, as a dropout, draws them in order of memory: behind a result that is thought to lie otherwise
other elements would be dropped. So a result is traced from an argument that already lies as the kernel's result does, of which the fake one is true.
Kernels of the CPU; what was compared are the strides of eager results and of fake ones in torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import is_contiguous_for_memory_format_or_false, is_contiguous_or_false, suggest_memory_format

aten = torch.ops.aten

Decomposition = Callable[..., Any]


def decompositions(others: Mapping[torch._ops.OpOverload, Decomposition]) -> dict[torch._ops.OpOverload, Decomposition]:
    """Those of operators that lay their result out anew; where there is nothing to do they leave the operator whole, or to the one in `others`."""
    rules: dict[torch._ops.OpOverload, Decomposition] = {
        **dict.fromkeys(_BATCH_NORMS, _normalized),
        aten.log_sigmoid_forward.default: _from_contiguous,
        aten.angle.default: _angle,
        aten.roll.default: _rolled,
        aten.channel_shuffle.default: _in_order_of_pictures,
        aten.max_unpool2d.default: _in_order_of_pictures,
    }
    return {op: functools.partial(_or_else, functools.partial(rule, op), others.get(op)) for op, rule in rules.items()}


# Their kernels take contiguous memory and `channels_last`.
_BATCH_NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
)


def _or_else(rule: Decomposition, other: Decomposition | None, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = rule(self, *args, **kwargs) if self.device.type == "cpu" else NotImplemented
    return other(self, *args, **kwargs) if other is not None and result is NotImplemented else result


def _normalized(op: Decomposition, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    order = suggest_memory_format(self)
    if is_contiguous_for_memory_format_or_false(self, memory_format=order):
        return NotImplemented
    return op(self.contiguous(memory_format=order), *args, **kwargs)


def _from_contiguous(op: Decomposition, self: torch.Tensor) -> Any:
    return NotImplemented if is_contiguous_or_false(self) else op(self.contiguous())


def _angle(op: Decomposition, self: torch.Tensor) -> Any:
    return _from_contiguous(op, self) if self.is_complex() else NotImplemented


def _rolled(op: Decomposition, self: torch.Tensor, shifts: Any, dims: Sequence[int] = ()) -> Any:
    return _in_order_of_pictures(op, self, shifts, dims) if dims else NotImplemented


def _in_order_of_pictures(op: Decomposition, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Pictures in `channels_last` stay so, as where `torch.cat` joins them."""
    order = suggest_memory_format(self)
    if order == torch.contiguous_format:
        return NotImplemented
    return op(self.contiguous(), *args, **kwargs).contiguous(memory_format=order)
