"""`as_strided` made simpler: of the tensor that owns the memory, and a view, or nothing, where it only writes down other strides.

The latter is what PyTorch's adaptive pooling does for channels-last tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.memory_order import reads_other_memory
from ort_backend.lowering.splitting.partition import root

aten = torch.ops.aten

Size = int | torch.SymInt


def drop_relayouts(graph: fx.Graph) -> None:
    """Replaces, in place, `as_strided` and `as_strided_scatter` over whole tensors by what they are: `alias` or `view`.

    Sizes and strides may be symbolic, which a lowering, that counts addresses, cannot take. What leaves the graph keeps its strides.
    An `as_strided` of a view reads the base, with the elements around the view.
    """
    for node in list(graph.nodes):
        if node.target is aten.as_strided.default and reads_other_memory(node):
            _read_owner(node)
        if node.op == "call_function" and not node.kwargs and not any(user.op == "output" for user in node.users):
            if node.target is aten.as_strided.default:
                _as_view(node, node.args[0], node.args[1], *node.args)
            elif node.target is aten.as_strided_scatter.default:
                base, source, *numbers = node.args
                _as_view(node, source, [-1] if base.meta["val"].dim() == 1 else None, base, *numbers)


def _read_owner(node: fx.Node) -> None:
    """Makes `as_strided` of a view the same of the tensor that the view is taken from, by addresses in its memory."""
    view, size, stride, *given = (*node.args, *node.kwargs.values())
    owner = root(view, through_copies=False)  # type: ignore[arg-type]
    mine, theirs = view.meta["val"], owner.meta["val"]  # type: ignore[union-attr]
    if owner is view or mine.dtype != theirs.dtype or mine.is_conj() != theirs.is_conj() or mine.is_neg() != theirs.is_neg():
        return
    offset = given[0] if given and given[0] is not None else mine.storage_offset()
    if isinstance(offset, (int, fx.Node)):
        node.args, node.kwargs = (owner, size, stride, offset), {}


def _as_view(node: fx.Node, result: Any, shape: Any, base: Any, size: Any, stride: Any, offset: Any = None) -> None:
    """Makes of `node` a view of `result`, if the elements of `base` at these strides are all of them in their order."""
    fake, sizes, strides = base.meta["val"], _values(size), _values(stride)
    if not _equal(0 if offset is None else _values([offset])[0], 0) or not _equal(fake.storage_offset(), 0):
        return
    if _same(sizes, fake.shape) and all(_equal(n, 1) or _equal(new, old) for n, new, old in zip(sizes, strides, fake.stride())):
        node.target, node.args = aten.alias.default, (result,)
    elif shape is not None and _is_whole(fake.shape, fake.stride(), fake.numel()) and _is_whole(sizes, strides, fake.numel()):
        node.target, node.args = aten.view.default, (result, shape)


def _values(numbers: Sequence[Any]) -> list[Size]:
    return [number.meta["val"] if isinstance(number, fx.Node) else number for number in numbers]


def _same(some: Sequence[Size], others: Sequence[Size]) -> bool:
    return len(some) == len(others) and all(_equal(a, b) for a, b in zip(some, others))


def _is_whole(size: Sequence[Size], stride: Sequence[Size], elements: Size) -> bool:
    """Whether these sizes and strides are those of a contiguous tensor of so many elements."""
    step: Size = 1
    for length, one in zip(reversed(size), reversed(stride)):
        if not _equal(length, 1) and not _equal(one, step):
            return False
        step = step * length
    return _equal(step, elements)


def _equal(a: Size, b: Size) -> bool:
    """Whether two numbers are known to be equal, without a guard on them."""
    expressions = [number.node.expr if isinstance(number, torch.SymInt) else number for number in (a, b)]
    return bool(expressions[0] == expressions[1])
