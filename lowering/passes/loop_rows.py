"""What the backward of a `scan` reads of each step of its forward: the value itself, where the forward keeps a view or a copy of it.

AOTAutograd traces the backward of a body for itself and keeps for each step what it reads, so that of `h @ w` it keeps the transpose of `w` at every
step, too: 100 steps of 512 units keep 100 MB, and write and read them. What all steps read is read by the backward likewise; what a step computes is
kept as it lies, and transposed where it is read.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import attribute

aten = torch.ops.aten

_SCAN = torch.ops.higher_order.scan
# Their results have the elements of their first argument, and the others are numbers.
_MOVES = {
    *(aten.t.default, aten.t_copy.default, aten.transpose.int, aten.transpose_copy.int, aten.permute.default, aten.permute_copy.default),
    *(aten.view.default, aten.view_copy.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.unsqueeze_copy.default),
    *(aten.detach.default, aten.detach_copy.default, aten.alias.default, aten.alias_copy.default, aten.clone.default),
}
_ARGUMENTS = 4  # body, first states, rows, what all steps read (torch 2.13)
_numbers = itertools.count()


class _Reader(NamedTuple):
    """A scan that reads the rows, as which of its `xs`."""

    scan: fx.Node
    place: int


def read_rows_at_their_source(graph: fx.Graph) -> None:
    """Gives the scans of a backward what the rows that they read are made of, in place."""
    for node in graph.find_nodes(op="call_function", target=_SCAN):
        if len(node.args) != _ARGUMENTS:
            continue
        for i in range(len(node.args[1]), len(node.meta["val"])):
            body = attribute(node.args[0])
            source, moves = _moved(body.graph.output_node().args[0][i])
            items = [user for user in node.users if user.target is operator.getitem and user.args[1] == i]
            readers = _readers(items[0]) if len(items) == 1 and source is not None else []
            at = body.graph.find_nodes(op="placeholder").index(source) if readers and source.op == "placeholder" else -1
            row, weight = at - len(node.args[1]), at - len(node.args[1]) - len(node.args[2])
            if not readers or not (moves or row >= 0):
                continue
            for reader in readers:
                _move_inside(reader, source, moves, node.args[3][weight] if weight >= 0 else None)
            if row < 0:
                _keep(node, i, source, items[0])
            elif weight < 0:
                _say(items[0], node.args[2][row].meta["val"])
                items[0].replace_all_uses_with(node.args[2][row])
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "get_attr" or node.target in (operator.getitem, aten.flip.default)):
            graph.erase_node(node)


def _moved(node: Any) -> tuple[Any, list[fx.Node]]:
    """What `node` is made of by moves of elements alone, and those moves."""
    moves: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.target in _MOVES and len(node.all_input_nodes) == 1:
        moves.insert(0, node)
        node = node.args[0]
    return (node, moves) if isinstance(node, fx.Node) else (None, [])


def _readers(rows: fx.Node) -> list[_Reader]:
    """The scans that read rows, or the same in reverse; none where something else does."""
    found: list[_Reader] = []
    for user in rows.users:
        if user.target is aten.flip.default and user.args[1] == [0]:
            behind = _readers(user)
            if not behind:
                return []
            found += behind
        elif user.target is _SCAN and len(user.args) == _ARGUMENTS and rows not in user.args[1] and rows not in user.args[3]:  # type: ignore[operator]
            places = [i for i, one in enumerate(user.args[2]) if one is rows]  # type: ignore[arg-type]
            if len(places) != 1:
                return []
            found.append(_Reader(user, places[0]))
        else:
            return []
    return found


def _move_inside(reader: _Reader, source: fx.Node, moves: Sequence[fx.Node], weight: Any) -> None:
    """The reader moves the elements itself: of its rows, or of `weight`, which it then takes instead of them."""
    node, place = reader
    first, rows, read = (list(part) for part in node.args[1:4])  # type: ignore[arg-type]
    body = attribute(node.args[0])  # type: ignore[arg-type]
    placeholders = body.graph.find_nodes(op="placeholder")
    old = placeholders.pop(len(first) + place)
    if weight is None:
        placeholders.insert(len(first) + place, old)
    else:
        placeholders.append(old)
        rows.pop(place)
        read.append(weight)
    made = fx.Graph()
    values = {one: made.node_copy(one) for one in placeholders}
    values[old].meta = {**old.meta, "val": source.meta["val"]}
    inside = {source: values[old]}
    for move in moves:
        inside[move] = made.node_copy(move, inside.__getitem__)
    values[old] = inside[moves[-1] if moves else source]
    made.output(made.graph_copy(body.graph, values))
    node.args = (_get(node, made), first, rows, tuple(read))


def _keep(node: fx.Node, i: int, source: fx.Node, item: fx.Node) -> None:
    """A scan keeps `source` of each step, and not what is moved of it: its result `i`, which is `item`."""
    made, values = fx.Graph(), dict[fx.Node, fx.Node]()
    results = list(made.graph_copy(attribute(node.args[0]).graph, values))  # type: ignore[arg-type]
    results[i] = values[source]
    made.output(tuple(results))
    node.args = (_get(node, made), *node.args[1:])
    fakes = list(node.meta["val"])
    fakes[i] = fakes[i].new_empty((fakes[i].shape[0], *source.meta["val"].shape))
    node.meta["val"] = tuple(fakes)
    _say(item, fakes[i])


def _say(rows: fx.Node, fake: Any) -> None:
    """Rows, and the same in reverse, are like `fake`."""
    rows.meta["val"] = fake
    for user in rows.users:
        if user.target is aten.flip.default:
            _say(user, fake)


def _get(node: fx.Node, body: fx.Graph) -> fx.Node:
    """Another body for a scan."""
    old, owner = node.args[0], node.graph.owning_module
    name = f"{old.target}_{next(_numbers)}"  # type: ignore[union-attr]
    setattr(owner, name, fx.GraphModule(attribute(old), body))  # type: ignore[arg-type]
    with node.graph.inserting_before(node):
        made = node.graph.get_attr(name)
    made.meta = dict(old.meta)  # type: ignore[union-attr]
    return made
