"""The gradient of a tensor of which neighbouring parts are read, each by itself: the gradients of the parts, side by side.

Autograd fills up the gradient of each part with zeros to the size of the whole tensor, and adds these up: `q, k, v = qkv[0], qkv[1], qkv[2]` takes
three tensors of the size of `qkv`, and two sums of them. A step of a recurrence written out over 64 places takes 0.67 of its time without those, of
four layers with gates as halves of their channels 0.94, of a small network with pairs as results 0.82 (AMD EPYC of family 25; as much by onnxruntime
1.32.0).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of, call_beside
from ort_backend.lowering.symbolic import have_same_sizes

aten = torch.ops.aten

_FILLED_UP = {aten.select_backward.default, aten.slice_backward.default}


class _Part(NamedTuple):
    """A gradient that is nothing but zeros outside a part of a dimension.

    Attributes:
        dim: The dimension.
        start: Where the part begins.
        end: Where it ends.
        gradient: Of the part; without that dimension if it `is_single`.
        is_single: Whether the part is one place, selected.
        sizes: Of the whole, as an argument of an operator.
    """

    dim: int
    start: int
    end: int
    gradient: fx.Node
    is_single: bool
    sizes: Any


def gather_parts(graph: fx.Graph) -> int:
    """Concatenates, in place, the gradients of neighbouring parts; returns for how many tensors."""
    gathered = 0
    for node in reversed(list(graph.nodes)):
        if not node.users or not is_plain_sum(node) or _joins(node):
            continue
        summands = [(one, _part(one)) for one in _summands(node)]
        for dim in {part.dim for _, part in summands if part is not None}:
            runs = _runs([part for _, part in summands if part is not None and part.dim == dim])
            if runs:
                taken = {id(part) for run in runs for part in run}
                _gather(graph, node, runs, [one for one, part in summands if id(part) not in taken])
                gathered += 1
                break
    return gathered


def _runs(parts: list[_Part]) -> list[list[_Part]]:
    """Those that lie side by side, of two places or more, in order; none where places overlap without being the same."""
    runs = list[list[_Part]]()
    for part in sorted(parts, key=lambda part: (part.start, part.end)):
        last = runs[-1][-1] if runs else None
        if last is not None and (part.start == last.end or (part.start, part.end) == (last.start, last.end)):
            runs[-1].append(part)
        elif last is None or part.start > last.end:
            runs.append([part])
        else:
            return []
    return [run for run in runs if run[0].start < run[-1].start]


def is_plain_sum(node: Any) -> bool:
    """Whether a node adds two tensors that have the shape and the dtype of the sum."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(one, fx.Node) for one in node.args):
        return False
    total, *fakes = node.meta["val"], *(one.meta["val"] for one in node.args)  # type: ignore[union-attr]
    if not isinstance(total, torch.Tensor) or not all(isinstance(one, torch.Tensor) for one in fakes):
        return False
    return all(one.dtype == total.dtype and have_same_sizes(one.shape, total.shape) for one in fakes)


def _joins(node: fx.Node) -> bool:
    """Whether nothing but another sum reads this one: that is looked at as a whole."""
    return len(node.users) == 1 and is_plain_sum(next(iter(node.users)))


def _summands(node: fx.Node) -> list[fx.Node]:
    found, left = list[fx.Node](), [node]
    while left:
        one = left.pop()
        if one is node or (is_plain_sum(one) and len(one.users) == 1):
            left += reversed(one.args)  # type: ignore[arg-type]
        else:
            found.append(one)
    return found


def _part(node: fx.Node) -> _Part | None:
    """What a gradient is that was filled up with zeros; None for any other. What was filled up by nothing is seen through."""
    while True:
        if node.target not in _FILLED_UP:
            return None
        given = arguments_of(node)
        dim, size = given["dim"], node.meta["val"].shape
        dim %= len(size)
        if not isinstance(size[dim], int):
            return None
        is_single = node.target is aten.select_backward.default
        if is_single:
            numbers = (given["index"], given["index"] + 1 or None, 1) if isinstance(given["index"], int) else ()
        else:
            numbers = tuple(given[name] for name in ("start", "end", "step"))
        if not numbers or not all(isinstance(number, int | None) for number in numbers):
            return None
        start, end, step = slice(*numbers).indices(size[dim])
        if step != 1 or start >= end:
            return None
        source = given["grad_output"]
        if is_single or end - start < size[dim]:
            return _Part(dim, start, end, source, is_single, given["input_sizes"])
        node = source


def _gather(graph: fx.Graph, node: fx.Node, runs: list[list[_Part]], others: list[fx.Node]) -> None:
    with graph.inserting_before(node), node.meta["val"].fake_mode:
        first, *rest = [*(_gradient(graph, node, run) for run in runs), *others]
        for one in rest:
            first = call_beside(graph, node, aten.add.Tensor, first, one)
    first.meta["val"] = node.meta["val"]  # as it lies in memory, too
    node.replace_all_uses_with(first)
    unread = [node]
    while unread:
        one = unread.pop()
        sources = one.all_input_nodes
        graph.erase_node(one)
        unread += [source for source in sources if not source.users and (source.target in _FILLED_UP or is_plain_sum(source))]


def _gradient(graph: fx.Graph, node: fx.Node, run: list[_Part]) -> fx.Node:
    """What parts that lie side by side add to the whole's gradient, which is `node`."""
    pieces = dict[int, fx.Node]()
    for part in run:
        piece = part.gradient
        if part.is_single:
            piece = call_beside(graph, node, aten.unsqueeze.default, piece, part.dim)
        before = pieces.get(part.start)
        pieces[part.start] = piece if before is None else call_beside(graph, node, aten.add.Tensor, before, piece)
    (dim, start), end = run[0][:2], run[-1].end
    result = call_beside(graph, node, aten.cat.default, list(pieces.values()), dim)
    if end - start == node.meta["val"].shape[dim]:
        return result
    return call_beside(graph, node, aten.slice_backward.default, result, run[0].sizes, dim, start, end, 1)
