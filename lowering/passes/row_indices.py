"""Indices that differ along one dimension alone, as `index.view(-1, 1).expand_as(source)`, become one-dimensional ones of whole rows.

So libraries for graphs write their sums, means and extremes over neighbours. ONNX's GatherElements and ScatterElements look up an index for each
element; PyTorch's kernels see that the index is expanded, and so does this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of
from ort_backend.lowering.symbolic import dim

aten = torch.ops.aten

_VIEWS = {aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_REDUCED = {"prod", "mean", "amax", "amin"}  # by `index_reduce`


def index_rows(graph: fx.Graph) -> int:
    """Rewrites, in place, `gather`, `scatter_add` and `scatter_reduce` whose index is expanded into all other dimensions.

    Returns:
        How many it has rewritten.
    """
    rewritten = 0
    for node in list(graph.nodes):
        write = _BY_ROWS.get(node.target)
        if write is None:
            continue
        given = arguments_of(node)
        call = write(given)
        if call is None or (source := _expanded(given)) is None:
            continue
        target, args, kwargs = call
        with graph.inserting_before(node):
            rows = _vector(graph, source)
            new = graph.call_function(target, (given["self"], given["dim"], rows, *args), kwargs)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        rewritten += 1
    return rewritten


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _gather(given: dict[str, Any]) -> Call | None:
    return aten.index_select.default, (), {}


def _scatter_add(given: dict[str, Any]) -> Call | None:
    return aten.index_add.default, (given["src"],), {}


def _scatter_reduce(given: dict[str, Any]) -> Call | None:
    if given["reduce"] == "sum" and given["include_self"]:
        return aten.index_add.default, (given["src"],), {}
    if given["reduce"] not in _REDUCED or not _reduces(given["self"].meta["val"].dtype, given["reduce"]):
        return None
    return aten.index_reduce.default, (given["src"], given["reduce"]), {"include_self": given["include_self"]}


def _reduces(dtype: torch.dtype, reduce: str) -> bool:
    """Whether `index_reduce` is for a dtype: not for bools, as `scatter_reduce` is, nor for products in half precision (torch 2.13)."""
    return dtype is not torch.bool and not (reduce == "prod" and dtype in (torch.float16, torch.bfloat16))


_BY_ROWS: dict[Any, Callable[[dict[str, Any]], Call | None]] = {
    aten.gather.default: _gather,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
}


def _expanded(given: dict[str, Any]) -> fx.Node | None:
    """What the index was expanded from, if it spans the other dimensions of all tensors there."""
    index = given["index"]
    sizes, rank = _sizes(index), index.meta["val"].dim()
    if index.target is not aten.expand.default or rank < 2 or ("src" in given and _sizes(given["src"]) != sizes):
        return None
    at, whole, source = given["dim"] % rank, _sizes(given["self"]), index.args[0]
    before = [*[1] * (rank - source.meta["val"].dim()), *_sizes(source)]
    spans = all(sizes[i] == whole[i] and before[i] == 1 for i in range(rank) if i != at)
    return source if spans and before[at] == sizes[at] else None


def _sizes(node: fx.Node) -> list[int | str]:
    return [dim(size) for size in node.meta["val"].shape]


def _vector(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """`source`, of which one dimension may not be 1, as a vector."""
    before: Any = source
    while before.target in _VIEWS:
        before = before.args[0]
        if before.meta["val"].dim() == 1:
            return before
    flat = graph.call_function(aten.view.default, (source, [-1]))
    flat.meta["val"] = source.meta["val"].reshape(-1)
    return flat
