"""PyTorch's kernels that write their result into memory that they are given.

Large results that the C library's heap makes room for cost a page fault for every 4 KB where they are larger than it keeps (32 MB), and else the
places of tensors that live longer. An operator has such a kernel if PyTorch has a variant of it with an argument for the result, and on the CPU a
kernel for that: for the others it would copy what the plain operator returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ort_backend.lowering.kernels import dense_products, selections, zero_scatter
from ort_backend.target import LARGE_RESULT

aten = torch.ops.aten

# Makes a contiguous tensor on the CPU, of the given shape and dtype, whose elements hold anything.
Empty = Callable[[Sequence[int], torch.dtype], Tensor]

# Operators without the tag of elementwise ones, and the tensor that has the shape of their result.
_LIKE_TENSOR = {
    aten._softmax.default: 0, aten._log_softmax.default: 0, aten._softmax_backward_data.default: 0, aten._log_softmax_backward_data.default: 0,
    aten.cumsum.default: 0, aten.cumprod.default: 0, aten.hardswish.default: 0, aten.leaky_relu_backward.default: 0,
    aten.nll_loss_backward.default: 1, aten.max_pool2d_with_indices_backward.default: 1, aten.reflection_pad2d_backward.default: 1,
    aten.replication_pad2d_backward.default: 1,
}  # fmt: skip


def into_given_memory(target: Any, result: Any) -> Callable[..., Tensor] | None:
    """What runs `target` with an `Empty` in front of its arguments and the result where that says; None where there is no such kernel.

    None as well where the result is known to be smaller than `LARGE_RESULT`.

    Args:
        target: An operator, or what a node calls in its place.
        result: Its fake result.
    """
    if target is dense_products.IMPLEMENTATIONS[dense_products.MKL_MM]:  # and of products in bfloat16
        return dense_products.as_eager_into
    selects = target in selections.INTO
    puts_into_zeros = target is zero_scatter.IMPLEMENTATIONS[zero_scatter.PUT_INTO_ZEROS]
    if not (selects or puts_into_zeros or isinstance(target, torch._ops.OpOverload)) or not isinstance(result, Tensor) or result.device.type != "cpu":
        return None
    shape = torch.Size(result.shape) if all(isinstance(size, int) for size in result.shape) else None
    if shape is not None and shape.numel() * result.dtype.itemsize < LARGE_RESULT:
        return None
    if result.is_complex() and target is not aten.mul.Tensor:
        return None
    if selects:
        return selections.INTO[target]
    if puts_into_zeros:
        return zero_scatter.put_into
    if target is aten._to_copy.default:
        return functools.partial(_cast_into, result.dtype)
    if torch.Tag.nondeterministic_seeded in target.tags or (torch.Tag.pointwise not in target.tags and target not in _LIKE_TENSOR):
        return None  # draws fill memory in the order of eager's tensor
    if target is aten.relu.default:  # whose own variant copies
        return functools.partial(_into, _relu_into, "out", 0, result.dtype, shape)
    if (variant := _variant(target)) is None:
        return None
    return functools.partial(_into, *variant, _LIKE_TENSOR.get(target), result.dtype, shape)


@functools.cache
def _variant(target: Any) -> tuple[Any, str] | None:
    """The operator that takes the arguments of `target` and one for the result, and that argument's name."""
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        overload = getattr(target.overloadpacket, name)
        results = [argument.name for argument in overload._schema.arguments if argument.is_out]
        others = [(argument.name, str(argument.type)) for argument in overload._schema.arguments if not argument.is_out]
        if len(results) == 1 and others == wanted and torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU"):
            return overload, results[0]
    return None


def _cast_into(wanted: torch.dtype, empty: Empty, tensor: Tensor, **_: Any) -> Tensor:
    return empty(tensor.shape, wanted).copy_(tensor)


def _relu_into(tensor: Tensor, out: Tensor) -> Tensor:
    return aten.clamp_min.out(tensor, 0, out=out)


def _into(
    kernel: Any, argument: str, like: int | None, dtype: torch.dtype, shape: torch.Size | None, empty: Empty, /, *args: Any, **kwargs: Any
) -> Tensor:
    """With a result of `shape`; where that is None elementwise (`like` is None), or with one as large as the tensor of that number."""
    if shape is None:
        tensors = list(_tensors(args, kwargs))
        shapes = {tensor.shape for tensor in tensors}
        shape = tensors[like].shape if like is not None else shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    return kernel(*args, **kwargs, **{argument: empty(shape, dtype)})


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    return (argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor))
