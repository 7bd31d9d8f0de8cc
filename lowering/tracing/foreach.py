"""`aten::_foreach_*`, what a compiled optimizer computes on lists of tensors: each is taken apart into one operator a tensor.

So do PyTorch's own kernels for the CPU, with the same operators (`_foreach_*_slow` of ATen/native/ForeachOpsKernels.cpp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_PREFIX = "aten::_foreach_"

# Where the operator of one tensor has another name, or takes its last number by name.
_OTHERS: dict[str, Callable[..., torch.Tensor]] = {
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "zero": torch.zeros_like,
    "copy": lambda x, source, non_blocking=False: aten.copy.default(x, source),
    "addcmul": lambda x, one, other, value=1: torch.addcmul(x, one, other, value=value),
    "addcdiv": lambda x, one, other, value=1: torch.addcdiv(x, one, other, value=value),
}
_OF_NUMBERS: dict[str, Callable[..., torch.Tensor]] = {"maximum": torch.clamp_min, "minimum": torch.clamp_max}


@functools.cache
def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Those of the functional operators; whatever has neither a name here nor one in `torch` stays whole."""
    found: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith(_PREFIX) or full.endswith("out"):
            continue
        name, _, overload = full.removeprefix("aten::").partition(".")
        operator = getattr(getattr(aten, name), overload or "default")
        single = _single(name.removeprefix("_foreach_"), overload)
        if single is not None and not operator._schema.is_mutable:
            lists = tuple(isinstance(argument.type, torch.ListType) for argument in operator._schema.arguments)
            found[operator] = functools.partial(_each, single, lists)
    return found


def _single(name: str, overload: str) -> Callable[..., torch.Tensor] | None:
    """The operator of one tensor."""
    if name in ("addcmul", "addcdiv") and overload == "Tensor":  # the numbers of all tensors lie in one
        return None
    if name in _OF_NUMBERS and overload.startswith("Scalar"):
        return _OF_NUMBERS[name]
    found: Callable[..., torch.Tensor] | None = _OTHERS.get(name) or getattr(torch, name, None)
    return found


def _each(single: Callable[..., torch.Tensor], lists: tuple[bool, ...], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    count = next(len(argument) for argument, is_list in zip(args, lists) if is_list)
    return [single(*(argument[i] if is_list else argument for argument, is_list in zip(args, lists)), **kwargs) for i in range(count)]
