"""What a lowering asks of its arguments: the dtype to which they are cast first, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.registry import Lowering, Unsupported


def promoted_dtype(lowering: Lowering, node: fx.Node) -> torch.dtype | None:
    """What `lowering.promote` says of this node; None if its arguments keep their dtypes.

    Raises:
        Unsupported: they have several where PyTorch refuses that; its fake kernels do not look.
    """
    if lowering.promote is None:
        return None
    if lowering.promote == "bool":
        return torch.bool
    if lowering.promote == "same" and len({_fake(one).dtype for one in node.all_input_nodes if isinstance(_fake(one), torch.Tensor)}) > 1:
        raise Unsupported("factors of several dtypes, which PyTorch refuses")
    if lowering.promote in ("output", "same"):
        fake = node.meta["val"]
        return _real((fake[0] if isinstance(fake, (tuple, list)) else fake).dtype)
    named = zip(node.target._schema.arguments, node.args)  # type: ignore[union-attr]
    common = _real(_common_dtype([_fake(arg) for argument, arg in named if argument.name not in lowering.keep]))
    return torch.int32 if common == torch.bool else common


def _real(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a complex dtype's parts; others as they are."""
    return dtype.to_real() if dtype.is_complex else dtype


def check_storage(lowering: Lowering, node: fx.Node) -> None:
    """Raises `Unsupported` for an argument that lies otherwise in memory than `lowering.whole_storage` asks."""
    for argument, arg in zip(node.target._schema.arguments, node.args):  # type: ignore[union-attr]
        if argument.name in lowering.whole_storage and not _is_whole_storage(_fake(arg)):
            raise Unsupported(f"{argument.name} is not contiguous, or part of a larger tensor")


def _fake(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def _is_whole_storage(fake: torch.Tensor) -> bool:
    """Whether a tensor's memory is its elements in order, and nothing else."""
    if not all(isinstance(part, int) for part in (*fake.shape, *fake.stride(), fake.storage_offset())):
        return False
    return fake.is_contiguous() and fake.untyped_storage().nbytes() == fake.numel() * fake.element_size()


def _common_dtype(values: Sequence[Any]) -> torch.dtype:
    operands = [v for v in torch.utils._pytree.tree_leaves(list(values)) if v is not None]
    numbers = [1 if isinstance(v, torch.SymInt) else 1.0 if isinstance(v, torch.SymFloat) else v for v in operands]
    result: Any = numbers[0]
    if len(numbers) == 1:
        return result.dtype
    dtype = torch.result_type(numbers[0], numbers[1])
    for more in numbers[2:]:
        dtype = torch.promote_types(dtype, more.dtype if isinstance(more, torch.Tensor) else dtype)
    return dtype
