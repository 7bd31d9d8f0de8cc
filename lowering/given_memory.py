"""PyTorch's kernels that write their result into memory that they are given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ort_backend.lowering import dense_products

aten = torch.ops.aten

# Makes a contiguous tensor on the CPU, of the given shape and dtype, whose elements hold anything.
Empty = Callable[[Sequence[int], torch.dtype], Tensor]

# Elementwise operators: the kernel, and its argument for the result, which has the shape and dtype of the operator's tensors.
ELEMENTWISE = {
    aten.gelu.default: (aten.gelu.out, "out"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.hardswish.default: (aten.hardswish.out, "out"),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input, "grad_input"),
    aten.log.default: (aten.log.out, "out"),
    aten.log1p.default: (aten.log1p.out, "out"),
    aten.pow.Tensor_Scalar: (aten.pow.Tensor_Scalar_out, "out"),
    aten.rsqrt.default: (aten.rsqrt.out, "out"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.softplus.default: (aten.softplus.out, "out"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
}


def into_given_memory(target: Any) -> Callable[..., Tensor] | None:
    """What runs `target` with an `Empty` in front of its arguments and the result where that says; None where there is no such kernel."""
    if target is dense_products.IMPLEMENTATIONS[dense_products.MKL_MM]:
        return dense_products.by_mkl_into
    return functools.partial(_elementwise, target, *ELEMENTWISE[target]) if target in ELEMENTWISE else None


def _elementwise(target: Any, kernel: Any, result: str, empty: Empty, *args: Any, **kwargs: Any) -> Tensor:
    like, *others = (argument for argument in args if isinstance(argument, Tensor))
    alike = all(other.shape == like.shape and other.dtype == like.dtype for other in others)
    if alike and like.is_cpu and like.is_floating_point() and not any(isinstance(argument, complex) for argument in args):
        kwargs = {**kwargs, result: empty(like.shape, like.dtype)}
        return kernel(*args, **kwargs)
    return target(*args, **kwargs)
