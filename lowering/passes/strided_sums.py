"""The gradient of `as_strided` adds whole blocks of neighbours, where autograd's formula adds element by element.

The formula numbers the places in memory (`arange`), looks at these through the same `as_strided`, and adds the gradient at the numbers found. Windows
over rows, as in sliding attention, are blocks of some thousand elements, each with one number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.strides import in_blocks

aten = torch.ops.aten

_SAME_ELEMENTS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.alias.default}


def add_blocks(graph: fx.Graph) -> int:
    """Rewrites, in place, each `index_add` to a vector at such places as one to the rows of a matrix; returns how many."""
    rewritten = 0
    for node in list(graph.nodes):
        if node.target is not aten.index_add.default or node.kwargs or node.meta["val"].dim() != 1:
            continue
        if (found := _strided_numbers(node.args[2], node.meta["val"].shape[0])) is None:
            continue
        numbered, block, of_blocks = found
        vector, _, _, source = node.args
        with graph.inserting_before(node), node.meta["val"].fake_mode:
            numbers = _call(graph, aten.arange.default, node.meta["val"].shape[0] // block, **numbered.kwargs)
            places = _call(graph, aten.reshape.default, _call(graph, aten.as_strided.default, numbers, *of_blocks), [-1])
            rows = [_call(graph, aten.reshape.default, one, [-1, block]) for one in (vector, source)]
            added = _call(graph, aten.index_add.default, rows[0], 0, places, rows[1])
            total = _call(graph, aten.view.default, added, [-1])
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        rewritten += 1
    return rewritten


def _strided_numbers(index: Any, total: Any) -> tuple[fx.Node, int, tuple[list[int], list[int], int]] | None:
    """What makes the numbers of `total` places, the elements of a block, and arguments of an `as_strided` of the blocks' numbers.

    None where `index` is something else, or a block one element.
    """
    while index.target in _SAME_ELEMENTS:
        index = index.args[0]
    if index.target is not aten.as_strided.default or index.kwargs:
        return None
    numbered, size, stride, *given = index.args
    offset = given[0] if given and given[0] is not None else 0
    if not all(isinstance(number, int) for number in (*size, *stride, offset, total)):
        return None
    counts = (numbered.target, numbered.args) in ((aten.arange.default, (total,)), (aten.arange.start, (0, total)))
    block, *of_blocks = in_blocks(total, size, stride, offset)
    return (numbered, block, tuple(of_blocks)) if counts and block > 1 else None  # type: ignore[return-value]


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]), **kwargs)
    return node
