"""Results that PyTorch's kernels lay out in memory as their fake tensors do not say.

What draws random numbers for each element of a tensor, as a dropout, draws them in order of memory: behind a result that is thought to lie otherwise
other elements would be dropped. So a result is traced from an argument that already lies as the kernel's result does, of which the fake one is true,
or as a copy that lies so: nothing that takes time, as ONNX's tensors have no strides.
Kernels of the CPU; what was compared are the strides of eager results and of fake ones in torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import (
    compute_elementwise_output_logical_to_physical_perm,
    is_contiguous_for_memory_format_or_false,
    is_contiguous_or_false,
    suggest_memory_format,
)
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

Decomposition = Callable[..., Any]


def decompositions(others: Mapping[torch._ops.OpOverload, Decomposition]) -> dict[torch._ops.OpOverload, Decomposition]:
    """Those of operators that lay their result out anew; where there is nothing to do they leave the operator whole, or to the one in `others`."""
    rules: dict[torch._ops.OpOverload, Decomposition] = {
        **dict.fromkeys(_BATCH_NORMS, _normalized),
        **dict.fromkeys(_ELEMENTWISE, _elementwise),
        **dict.fromkeys(_CONTIGUOUS, _from_contiguous),
        **dict.fromkeys(_IN_ORDER_OF_PICTURES, _in_order_of_pictures),
        aten.angle.default: _angle,
        aten.binary_cross_entropy.default: _cross_entropy,
        aten.convolution.default: _convolved,
        aten.ldexp.Tensor: _power,
        aten.roll.default: _rolled,
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

# The fake results lie as those of a formula, such as a selection, whose parts take the order of other arguments.
_ELEMENTWISE = (
    *(aten.logaddexp.default, aten.logaddexp2.default, aten.heaviside.default),
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default),
    *(aten.xlogy.Tensor, aten.special_xlog1py.default, aten.copysign.Tensor),
    *(aten.floor_divide.default, aten.div.Tensor_mode),
    *(aten.complex.default, aten.polar.default),
)

# What their kernels allocate is contiguous. So is not what `rrelu` writes to in place, which cannot be told from the rest.
_CONTIGUOUS = (
    *(aten.log_sigmoid_forward.default, aten.pow.Scalar),
    *(aten.rrelu_with_noise_functional.default, aten.normal.Tensor_Tensor, aten.normal.float_Tensor, aten.normal.Tensor_float),
)

_IN_ORDER_OF_PICTURES = (
    *(aten.channel_shuffle.default, aten.max_unpool2d.default),
    *(aten.reflection_pad3d.default, aten.replication_pad3d.default),
)


def _or_else(rule: Decomposition, other: Decomposition | None, *args: Any, **kwargs: Any) -> Any:
    on_cpu = all(value.device.type == "cpu" for value in args if isinstance(value, torch.Tensor))
    result = rule(*args, **kwargs) if on_cpu else NotImplemented
    return other(*args, **kwargs) if other is not None and result is NotImplemented else result


def _from_contiguous(op: Decomposition, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if all(map(_is_contiguous, args)) else op(*map(_contiguous, args), **kwargs)


def _is_contiguous(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or is_contiguous_or_false(value)


def _contiguous(value: Any) -> Any:
    return value if _is_contiguous(value) else value.contiguous()


def _elementwise(op: Decomposition, *args: Any, **kwargs: Any) -> Any:
    """As PyTorch's TensorIterator lays results out: in the order of the first argument that has one."""
    result = _from_contiguous(op, *args, **kwargs)
    if result is NotImplemented:
        return result
    tensors = torch.broadcast_tensors(*(value for value in args if isinstance(value, torch.Tensor)))
    order, _ = compute_elementwise_output_logical_to_physical_perm(*tensors)
    if order == sorted(order):
        return result
    return aten.copy.default(aten.empty_permuted.default(result.shape, order, dtype=result.dtype, device=result.device), result)


def _cross_entropy(op: Decomposition, self: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    return NotImplemented if reduction else _elementwise(op, self, target, weight, reduction)


def _convolved(op: Decomposition, self: torch.Tensor, *args: Any) -> Any:
    """oneDNN lays volumes out as `channels_last_3d`; the fake kernel asks whether it is enabled, which it is not during the trace (`lstm_as_steps`).

    Fake results are kept, in torch 2.13 without regard to that.
    """
    if self.dim() != 5 or torch._C._get_mkldnn_enabled() or not isinstance(self, FakeTensor):
        return NotImplemented
    keeps = self.fake_mode.cache_enabled
    torch._C._set_mkldnn_enabled(True)
    self.fake_mode.cache_enabled = False
    try:
        return op(self, *args)
    finally:
        torch._C._set_mkldnn_enabled(False)
        self.fake_mode.cache_enabled = keeps


def _power(op: Decomposition, self: torch.Tensor, other: torch.Tensor) -> Any:
    """`self` times a power of 2, which is contiguous."""
    return NotImplemented if is_contiguous_or_false(other) else op(self, other.contiguous())


def _normalized(op: Decomposition, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    order = suggest_memory_format(self)
    if is_contiguous_for_memory_format_or_false(self, memory_format=order):
        return NotImplemented
    return op(self.contiguous(memory_format=order), *args, **kwargs)


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
