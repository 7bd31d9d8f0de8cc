"""Operators that AOTAutograd takes apart whatever its table says, kept whole, or taken apart rightly, while it traces.

They have a Python kernel for Autograd and CompositeImplicitAutograd (`OpOverload.py_kernels`, read in torch 2.13), which runs above the tracer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import meta_table
from torch._decomp.decompositions import upsample_compute_output_size

from ort_backend.lowering.tracing import cumulative_products

aten = torch.ops.aten

_AVERAGING = (
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
    aten._upsample_bilinear2d_aa,
    aten._upsample_bicubic2d_aa,
)
_NEAREST = (
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
)
_SHRINKING = (aten.softshrink, aten.hardshrink)  # taken apart into selections, which branch on the data
_MEAN, _SUM = 1, 2  # of a loss over its rows (`torch.nn._reduction`)
_ABOVE_TRACER = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def whole_operators() -> Iterator[None]:
    """While AOTAutograd traces: `upsample_*` and its backward are one node each, instead of the index arithmetic of their decompositions; so is
    what shrinks numbers towards zero, and the gradient of running products.
    """
    with contextlib.ExitStack() as stack:
        for packet in _SHRINKING:
            stack.enter_context(replaced_kernel(packet.default, DispatchKey.Autograd, None))
            stack.enter_context(_known_shape(_backward_of(packet), lambda grad_output, self, lambd: torch.empty_like(self)))
        stack.enter_context(replaced_kernel(aten.cumprod_backward.default, DispatchKey.CompositeImplicitAutograd, cumulative_products.whole_backward))
        for packet in (*_AVERAGING, *_NEAREST):
            for key in _ABOVE_TRACER:
                stack.enter_context(replaced_kernel(packet.vec, key, _by_size(packet.default, packet in _AVERAGING, packet.vec.py_kernels.get(key))))
                stack.enter_context(replaced_kernel(packet.default, key, None))
            stack.enter_context(_known_shape(_backward_of(packet), _shape_of_gradient))
        yield


@contextlib.contextmanager
def right_losses() -> Iterator[None]:
    """While AOTAutograd traces: `multilabel_margin_loss` as its C++ kernel has it.

    PyTorch's decomposition counts places behind a row's last label as labels of class 0, in every backend (read in torch 2.13).
    """
    with replaced_kernel(aten.multilabel_margin_loss_forward.default, DispatchKey.Autograd, _multilabel_margin_loss):
        yield


def _multilabel_margin_loss(input: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row sum(max(0, 1 - (x[label] - x[i]))) / width over its labels, which end at the first -1, and the classes i that are none."""
    rows, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    width = rows.shape[1]
    is_label = (labels == -1).cumsum(1) == 0
    own = torch.where(is_label, labels, 0)
    is_target = torch.zeros_like(labels).scatter_add(1, own, is_label.to(labels.dtype)) > 0
    margins = (1 - rows.gather(1, own).unsqueeze(2) + rows.unsqueeze(1)).clamp_min(0) / width
    losses = torch.where(is_label.unsqueeze(2) & ~is_target.unsqueeze(1), margins, 0).sum((1, 2))
    result = losses.mean() if reduction == _MEAN else losses.sum() if reduction == _SUM or input.dim() < 2 else losses
    return result, is_target.to(input.dtype).reshape(target.shape)


def _by_size(target: torch._ops.OpOverload, averaging: bool, parts: Callable[..., torch.Tensor] | None) -> Callable[..., torch.Tensor]:
    """What `target.vec` does: works out the size and calls `target`; or `parts`, of no images, whose kernel for meta tensors fails for the nearest
    (in torch 2.13: a number where it checks for a bool).
    """

    def resize(input: torch.Tensor, output_size: Sequence[Any] | None, *rest: Any) -> torch.Tensor:
        if 0 in [size for size in input.shape if isinstance(size, int)] and parts is not None and not averaging:
            return parts(input, output_size, *rest)
        factors = rest[-1]
        size = upsample_compute_output_size(input.size(), output_size, factors)
        scales = list(factors) if factors else [None] * len(size)
        return target(input, size, rest[0], *scales) if averaging else target(input, size, *scales)

    return resize


def _shape_of_gradient(grad_output: torch.Tensor, output_size: Sequence[Any], input_size: Sequence[Any], *rest: Any, **more: Any) -> torch.Tensor:
    return grad_output.new_empty(input_size)


@contextlib.contextmanager
def replaced_kernel(target: torch._ops.OpOverload, key: DispatchKey, function: Callable[..., Any] | None) -> Iterator[None]:
    """`target` with another Python kernel for `key`, or with none."""
    before = target.py_kernels.get(key)
    _set_kernel(target, key, function)
    try:
        yield
    finally:
        _set_kernel(target, key, before)


def _set_kernel(target: torch._ops.OpOverload, key: DispatchKey, function: Any) -> None:
    if function is None:
        target.py_kernels.pop(key, None)
    else:
        target.py_kernels[key] = function
    target._dispatch_cache.clear()


def _backward_of(packet: Any) -> torch._ops.OpOverload:
    return getattr(aten, f"{packet.default._schema.name.removeprefix('aten::')}_backward").default


@contextlib.contextmanager
def _known_shape(target: torch._ops.OpOverload, shape: Callable[..., torch.Tensor]) -> Iterator[None]:
    """`target` with a kernel for meta tensors in Python, where PyTorch's is C++, which knows no symbolic sizes."""
    if DispatchKey.Meta in target.py_kernels:
        yield
        return
    missing = target not in meta_table  # where fake tensors ask
    if missing:
        meta_table[target] = shape
    try:
        with replaced_kernel(target, DispatchKey.Meta, shape):
            yield
    finally:
        if missing:
            del meta_table[target]
