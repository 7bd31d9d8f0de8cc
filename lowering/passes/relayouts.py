"""`as_strided` that only writes down other strides, as PyTorch's adaptive pooling does for channels-last tensors: a view, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Size = int | torch.SymInt


def drop_relayouts(graph: fx.Graph) -> None:
    """Replaces, in place, `as_strided` and `as_strided_scatter` over whole tensors by what they are: `alias` or `view`.

    Sizes and strides may be symbolic, which a lowering, that counts addresses, cannot take. What leaves the graph keeps its strides.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and not node.kwargs and not any(user.op == "output" for user in node.users):
            if node.target is aten.as_strided.default:
                _as_view(node, node.args[0], node.args[1], *node.args)
            elif node.target is aten.as_strided_scatter.default:
                base, source, *numbers = node.args
                _as_view(node, source, [-1] if base.meta["val"].dim() == 1 else None, base, *numbers)


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
