"""Parts that are read of tensors to which parts were written: what was written there, or what it was written over.

A program that fills a tensor part by part and reads parts of it on the way (a cache, the last state of a recurrence), and the gradient of one that
does no more than fill it, have the whole tensor computed for each part. Of 64 states of 64 x 256 numbers, each of which is computed of the last one
where that lies in the tensor, a step took 0.88 of eager PyTorch's time, and takes 0.46; inductor's 0.56 (AMD EPYC of family 25, a busy hour).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ort_backend.lowering.fx_nodes import arguments_of, call_beside, nodes_in
from ort_backend.lowering.passes.effects import drop_unread
from ort_backend.lowering.passes.gathered_parts import is_plain_sum
from ort_backend.lowering.splitting.partition import view_chain
from ort_backend.lowering.symbolic import have_same_sizes, hint

aten = torch.ops.aten

_READS = {aten.slice.Tensor, aten.select.int}
_SINGLE = {aten.select.int, aten.select_scatter.default, aten.select_backward.default}
_WRITTEN = {aten.slice_scatter.default, aten.select_scatter.default}
_FILLED_UP = {aten.slice_backward.default, aten.select_backward.default}
_ERASED = {*_READS, *_WRITTEN, *_FILLED_UP, aten.add.Tensor, aten.copy.default, aten.new_empty_strided.default}


class _Places(NamedTuple):
    """Places of a dimension.

    Attributes:
        dim: The dimension.
        start: The first place.
        end: That behind the last one.
        step: From one to the next.
        is_single: Whether it is one place, selected.
        is_known: Whether the places are numbers, not symbols.
    """

    dim: int
    start: int | torch.SymInt
    end: int | torch.SymInt
    step: Any
    is_single: bool
    is_known: bool


def read_parts(graph: fx.Graph) -> int:
    """Makes, in place, what reads a part read where that comes from; returns how many nodes do.

    Parts that leave the graph stay: they lie in the memory of the whole tensor.
    """
    count = _take_whole(graph)
    results = nodes_in(graph.output_node().args)
    leaving = {node for result in results for node in view_chain(result, through_copies=False)}
    left = [node for node in reversed(graph.nodes) if node.target in _READS and node not in leaving]
    written = _Written()
    while left:
        node = left.pop()
        found = _found(graph, node, written)
        if found is not None:
            part, further = found
            node.replace_all_uses_with(part)
            _erase(graph, node)
            left += further
            count += 1
    if count:
        drop_unread(graph)
    return count


def _take_whole(graph: fx.Graph) -> int:
    """Replaces what is written to all places of a dimension by what is written."""
    count = 0
    for node in graph.nodes:
        if node.target is aten.slice_scatter.default and (places := _places(node, node)) is not None:
            given = arguments_of(node)
            source = given["src"]
            if places.is_known and places[1:4] == (0, node.meta["val"].shape[places.dim], 1) and _is_like(source, node):
                node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
                count += 1
    return count


def _is_like(source: fx.Node, node: fx.Node) -> bool:
    """Whether two tensors have one dtype, device and shape."""
    fake, wanted = source.meta["val"], node.meta["val"]
    return (fake.dtype, fake.device) == (wanted.dtype, wanted.device) and have_same_sizes(fake.shape, wanted.shape)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Removes a node that nothing reads, and what only that read of writes, sums and copies: they would count as readers."""
    unread = [node]
    while unread:
        node = unread.pop()
        sources = node.all_input_nodes
        graph.erase_node(node)
        unread += [one for one in sources if not one.users and one.target in _ERASED]


def _found(graph: fx.Graph, node: fx.Node, written: _Written) -> tuple[fx.Node, list[fx.Node]] | None:
    """Where a part comes from, and the reads that were added for it; None if there is nothing better."""
    whole, *bounds = arguments_of(node).values()
    places = _places(node, whole)
    if places is None:
        return None
    source: Any = whole
    while True:
        source = written.uncopied(source)
        if written.is_sum(source):
            summands = [one for one in source.args if one.target not in _FILLED_UP or not written.is_apart(places, one)]
            if len(summands) != 1:
                break
            source = summands[0]
        elif source.target in _WRITTEN and written.is_apart(places, source):
            source = source.args[0]
        else:
            break
    if written.covers(places, source):
        return _part(graph, node, places, source, written)
    if written.is_sum(source) and 2 * _elements(node) <= _elements(source) and any(written.covers(places, one) for one in source.args):
        parts = [_read(graph, node, one, *bounds) for one in source.args]
        with graph.inserting_before(node), node.meta["val"].fake_mode:
            return call_beside(graph, node, aten.add.Tensor, *parts), parts
    if source is whole or source.target in _WRITTEN:  # one more reader would keep writes that follow one another apart
        return None
    part = _read(graph, node, source, *bounds)
    return part, [part]


def _part(graph: fx.Graph, node: fx.Node, places: _Places, source: fx.Node, written: _Written) -> tuple[fx.Node, list[fx.Node]] | None:
    """What was written to these places, and the read that was added if it was written to more of them."""
    there = written.places(source)
    inner = arguments_of(source)["src" if source.target in _WRITTEN else "grad_output"]
    if inner.meta["val"].dtype != node.meta["val"].dtype:
        return None
    if there is None or _are_same(places, there):
        return written.uncopied(inner), []
    first = places.start - there.start
    part = _read(graph, node, inner, places.dim, *((first,) if places.is_single else (first, places.end - there.start, places.step)))
    return part, [part]


class _Written:
    """What is known of nodes, which are looked at again and again: which places they write to, or fill up around."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, _Places | None] = {}
        self._plain: dict[fx.Node, bool] = {}

    def is_sum(self, node: fx.Node) -> bool:
        """Whether a node adds two tensors that have the shape and the dtype of the sum."""
        if node.target is not aten.add.Tensor:
            return False
        if node not in self._plain:
            self._plain[node] = is_plain_sum(node)
        return self._plain[node]

    def uncopied(self, node: fx.Node) -> fx.Node:
        """What a copy over another tensor of this size and type copies; any other node as it is."""
        while node.target is aten.copy.default and isinstance(source := node.args[1], fx.Node):
            if node not in self._plain:
                self._plain[node] = _is_like(source, node)
            if not self._plain[node]:
                break
            node = source
        return node

    def places(self, node: fx.Node) -> _Places | None:
        """Those of a write or of what is filled up with zeros; None for any other node."""
        if node not in self._known:
            self._known[node] = _places(node, node) if node.target in _WRITTEN | _FILLED_UP else None
        return self._known[node]

    def is_apart(self, places: _Places, node: fx.Node) -> bool:
        """Whether a node writes to, or is, nothing at any of these places."""
        there = self.places(node)
        return there is not None and there.dim == places.dim and _are_apart(places, there)

    def covers(self, places: _Places, node: fx.Node) -> bool:
        """Whether all that is at these places comes from what a node writes, or fills up."""
        there = self.places(node)
        return there is not None and there.dim == places.dim and (_are_same(places, there) or _is_within(places, there))


def _read(graph: fx.Graph, node: fx.Node, source: Any, *bounds: Any) -> fx.Node:
    """A read like `node`, of another tensor; where that is computed, if it can be, lest it is kept for this part."""
    is_early = source.op == "call_function" and not any(isinstance(one, fx.Node) for one in bounds)
    with graph.inserting_after(source) if is_early else graph.inserting_before(node), node.meta["val"].fake_mode:
        return call_beside(graph, node, node.target, source, *bounds)


def _places(node: fx.Node, whole: Any) -> _Places | None:
    """Which places of `whole` are read or written; None where they are counted from an end that is not known."""
    given = {name: one.meta["val"] if isinstance(one, fx.Node) else one for name, one in arguments_of(node).items()}
    sizes = whole.meta["val"].shape
    dim: int = given["dim"] % len(sizes)
    size, is_single = sizes[dim], node.target in _SINGLE
    start: Any = given["index"] if is_single else given["start"]
    start = 0 if start is None else start
    end = None if is_single else given["end"]
    step = 1 if is_single else given["step"]
    numbers: tuple[Any, ...] = (start, size if end is None else end, step)
    if all(isinstance(number, int) for number in (*numbers, size)):
        if is_single:
            start += size if start < 0 else 0
            return _Places(dim, start, start + 1, 1, True, True)
        return _Places(dim, *slice(*numbers).indices(size), False, True)
    if not all(isinstance(number, torch.SymInt) or number >= 0 for number in numbers):
        return None
    return _Places(dim, start, start + 1 if is_single else numbers[1], step, is_single, False)


def _are_same(some: _Places, others: _Places) -> bool:
    return some.is_single == others.is_single and all(_is_true(a == b) for a, b in zip(some[1:4], others[1:4], strict=True))


def _is_within(some: _Places, others: _Places) -> bool:
    if others.is_single or not (some.is_known and others.is_known):
        return False
    return others.step == 1 and others.start <= some.start < some.end <= others.end


def _are_apart(some: _Places, others: _Places) -> bool:
    """Whether no place is among both."""
    if not (some.is_known and others.is_known):
        return False
    beside = some.end <= others.start or others.end <= some.start
    return beside or (some.step == others.step and (some.start - others.start) % some.step != 0)


def _is_true(known: Any) -> bool:
    return known if isinstance(known, bool) else statically_known_true(known)


def _elements(node: fx.Node) -> int:
    return math.prod(map(hint, node.meta["val"].shape))
