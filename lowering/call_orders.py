"""In which orders the tensors of a call of PyTorch's lie in memory. ONNX Runtime holds contiguous tensors only.

A Python node takes and gives tensors with their dimensions in the order in which they lie in memory, the outermost first; the callable sees them
permuted, which is a view. In the graph a Transpose stands between, and cancels with the one by which the trace came to such a tensor: so attention
takes queries, keys and values, and gives their gradients, as the projections around it give and take them. Nobody copies.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.kernels import fused_attention
from ort_backend.lowering.memory_order import order_for, order_of
from ort_backend.lowering.permuting import inverse, permutation_of, permuted

Order = tuple[int, ...] | None

# Operators that are known to give the same for tensors in any order. Those of users may read strides, or have kernels for some alone.
_KNOWN = {"aten", "prim", "prims", "ort_training"}

aten = torch.ops.aten

# Operators that take tensors in any order, and give their results in that of eager's only if they got it.
_IN_ANY_ORDER = {
    *fused_attention.KERNELS,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def call_orders(
    target: Any, values: Sequence[ir.Value], fakes: Sequence[Any], results: Sequence[Any], *, on_cpu: bool
) -> tuple[list[Order], list[Order]]:
    """The order of each argument and of each result; None for contiguous.

    Where `target` may read strides, where its kernels are for any order, and where all that is not contiguous comes from a Transpose, it is that of
    the trace. On the CPU the choice between ONNX Runtime's kernels and PyTorch's was measured with contiguous tensors: there, the last is so for
    attention alone.

    Args:
        target: What is called.
        values: Its tensors and symbolic numbers in the graph.
        fakes: Of the trace, likewise.
        results: The fake results.
        on_cpu: Whether the node is for the CPU.
    """
    traced = [_order_of(fake) for fake in fakes]
    if (
        _draws(target)
        or _reads_strides(inspect.unwrap(target))
        or inspect.unwrap(target) in _IN_ANY_ORDER
        or (not on_cpu and _cancel(values, traced))
    ):
        return traced, [_order_of(result) for result in results]
    needed = [order_for(target, fake) if isinstance(fake, torch.Tensor) else None for fake in fakes]
    return needed, [None for _ in results]


def laid_out(op: Any, value: ir.Value, order: Order) -> ir.Value:
    """`value`, the carrier of a tensor, as a tensor lies in memory in this order."""
    return value if order is None else permuted(op, value, _with_pairs(value, order))


def read_back(op: Any, value: ir.Value, order: Order) -> ir.Value:
    """The inverse of `laid_out`."""
    return value if order is None else permuted(op, value, inverse(_with_pairs(value, order)))


def _with_pairs(value: ir.Value, order: tuple[int, ...]) -> tuple[int, ...]:
    """An order of the dimensions of a carrier, which of a complex tensor has one more."""
    rank = len(order) if value.shape is None else value.shape.rank()
    return (*order, *range(len(order), rank))


def _order_of(fake: Any) -> Order:
    order = order_of(fake) if isinstance(fake, torch.Tensor) else None
    return None if order == tuple(range(len(order or ()))) else order


def _draws(target: Any) -> bool:
    """Whether an operator draws random numbers, which go into memory in its order: that of eager's tensors."""
    target = inspect.unwrap(target)
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _reads_strides(target: Any) -> bool:
    """Whether what an operator gives may depend on the strides of its arguments. The same operators get those of the trace from inductor.

    Bodies of control flow address memory as they were traced, and so does what stands for an operator that changes its arguments.
    """
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.needs_exact_strides in target.tags or torch.Tag.needs_fixed_stride_order in target.tags:
        return True
    is_free = torch.Tag.flexible_layout in target.tags or torch.Tag.needs_contiguous_strides in target.tags
    return target.namespace not in _KNOWN and not is_free


def _cancel(values: Sequence[ir.Value], orders: Sequence[Order]) -> bool:
    """Whether tensors that are not contiguous can all be had in their orders without a Transpose, and there are some."""
    needed = [(value, order) for value, order in zip(values, orders, strict=True) if order is not None]
    return bool(needed) and all(permutation_of(value) == inverse(order) for value, order in needed)
