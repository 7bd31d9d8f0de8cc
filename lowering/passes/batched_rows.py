"""Indices of a batch that are expanded along whole rows, as `index.unsqueeze(-1).expand(-1, -1, width)`, become indices of rows.

So masked autoencoders choose patches, and point clouds the neighbours of each point, of a table that is expanded to one for each. ONNX's
GatherElements and ScatterElements, and PyTorch's kernels, look up an index for each element, and autograd makes the gradient of each copy of a table
before it adds these up.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import VIEWS, arguments_of, call_beside
from ort_backend.lowering.kernels.batched_rows import ADD_TO_ROWS, ROWS_OF
from ort_backend.lowering.symbolic import have_same_sizes, hint

aten = torch.ops.aten

# Elements of a row from which on it is copied as one.
_WIDE = 3


def index_batches(graph: fx.Graph) -> int:
    """Rewrites, in place, `gather` and `scatter_add` on the CPU whose index is expanded into the last dimensions, and sums over what was added to
    copies of a table of zeros. What has one index for all is `index_rows`'s.

    Returns:
        How many it has rewritten.
    """
    rewritten = 0
    for node in reversed(list(graph.nodes)):  # a sum in front of what it adds up
        write = _BY_ROWS.get(node.target)
        if write is None or not node.users:  # nothing reads what was a summand
            continue
        with graph.inserting_before(node), node.meta["val"].fake_mode:
            new = write(graph, node)
        if new is None:
            continue
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        rewritten += 1
    return rewritten


def _gather(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    given = arguments_of(node)
    table, index = _source(given["self"]), _source(given["index"])
    sizes, dim, row = _looked_up(table, given["dim"], index)
    if not row:
        return None
    copied, source = list[int](), table
    if table.target is aten.expand.default and len(before := table.args[0].meta["val"].shape) == len(sizes):
        copied = [i for i in range(row) if i != dim and _is_one(before[i]) and not _is_one(sizes[i])]
        source = table.args[0]
        if not have_same_sizes(*([one for i, one in enumerate(shape) if i not in copied] for shape in (before, sizes))):
            return None
    batch = _batch(sizes, index, [i for i in range(row) if i != dim and i not in copied])
    if batch is None or not (batch or copied):
        return None
    if copied:
        source = call_beside(graph, node, aten.squeeze.dims, source, copied)
    return call_beside(graph, node, ROWS_OF, source, _rows(graph, node, index, row), batch)


def _scatter_add(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    given = arguments_of(node)
    table, index, rows = given["self"], _source(given["index"]), given["src"]
    sizes, dim, row = _looked_up(table, given["dim"], index)
    if not row or not have_same_sizes(rows.meta["val"].shape, index.meta["val"].shape):
        return None
    batch = _batch(sizes, index, [i for i in range(row) if i != dim])
    if not batch:
        return None
    return call_beside(graph, node, ADD_TO_ROWS, table, _rows(graph, node, index, row), rows, batch)


def _sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A sum over what was added to copies of a table of zeros: all of it added to one table."""
    added, dims, keepdim = (arguments_of(node)[name] for name in ("self", "dim", "keepdim"))
    if added.target is not aten.scatter_add.default or len(added.users) > 1 or not dims or added.meta["val"].dtype != node.meta["val"].dtype:
        return None
    given = arguments_of(added)
    table, index, rows = given["self"], _source(given["index"]), given["src"]
    sizes, dim, row = _looked_up(table, given["dim"], index)
    summed = sorted(one % len(sizes) for one in dims)
    if not row or dim in summed or summed[-1] >= row or table.target is not aten.new_zeros.default:
        return None
    batch = _batch(sizes, index, [i for i in range(row) if i != dim and i not in summed])
    if batch is None or not have_same_sizes(rows.meta["val"].shape, index.meta["val"].shape):
        return None
    kept = [one for i, one in enumerate(table.args[1]) if i not in summed]
    zeros = call_beside(graph, node, aten.new_zeros.default, table.args[0], kept, **table.kwargs)
    result = call_beside(graph, node, ADD_TO_ROWS, zeros, _rows(graph, node, index, row), rows, batch)
    for i in summed if keepdim else ():
        result = call_beside(graph, node, aten.unsqueeze.default, result, i)
    return result


_BY_ROWS = {aten.gather.default: _gather, aten.scatter_add.default: _scatter_add, aten.sum.dim_IntList: _sum}


def _looked_up(table: Any, dim: int, index: Any) -> tuple[Any, int, int]:
    """(sizes of a table, the dimension along which an index looks it up, the first one of its rows; that is 0 where the index is not one of rows)"""
    sizes, fake = table.meta["val"].shape, index.meta["val"]
    nothing = sizes, 0, 0
    if index.target not in (aten.expand.default, aten.repeat.default) or len(sizes) < 2 or fake.device.type != "cpu":
        return nothing
    dim, before, row = dim % len(sizes), index.args[0].meta["val"].shape, len(sizes)
    if len(before) != len(sizes):
        return nothing
    while row - 1 > dim and _is_one(before[row - 1]):
        row -= 1
    if row == len(sizes) or not have_same_sizes(before[:row], fake.shape[:row]) or not have_same_sizes(sizes[row:], fake.shape[row:]):
        return nothing
    return (sizes, dim, row) if math.prod(map(hint, sizes[row:])) >= _WIDE else nothing


def _source(node: Any) -> Any:
    """A node in front of views to the sizes that it has, as einops writes them."""
    while node.target in VIEWS and have_same_sizes(node.args[0].meta["val"].shape, node.meta["val"].shape):
        node = node.args[0]
    return node


def _batch(sizes: Any, index: Any, dims: list[int]) -> int | None:
    """How many dimensions a table and its index have together, one table for each; None where these are not the first ones, or not of one size."""
    count = len(dims)
    same = dims == list(range(count)) and have_same_sizes(sizes[:count], index.meta["val"].shape[:count])
    return count if same else None


def _rows(graph: fx.Graph, node: fx.Node, index: Any, row: int) -> fx.Node:
    """The index as it was before it was expanded into rows."""
    source = index.args[0]
    return call_beside(graph, node, aten.squeeze.dims, source, list(range(row, source.meta["val"].dim())))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
