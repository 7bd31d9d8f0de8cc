"""Writes to parts of a large tensor that follow one another become one call, which copies the tensor once.

`x[:, 1:-1, ::2] = part` comes as a write to a slice of a slice, which is a copy of the inner one and a copy of `x`; with a step ONNX Runtime
transposes both, there and back. A program that fills a tensor so, part by part, has it copied twice and more for each part.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of
from ort_backend.lowering.kernels.kernel_choice import slow_kernels_may_go
from ort_backend.lowering.kernels.part_writes import WRITE_PARTS, View, flat
from ort_backend.lowering.kernels.write_back import IN_PLACE_WRITES
from ort_backend.lowering.passes.effects import drop_unread
from ort_backend.lowering.symbolic import hint
from ort_backend.target import OrtTarget

aten = torch.ops.aten

_VIEWS = {aten.slice.Tensor, aten.select.int}
_SCATTERS = {aten.slice_scatter.default, aten.select_scatter.default}
_SET = {aten.copy.default, aten.fill.Tensor}  # a part to other numbers
_END = 2**63 - 1
# Elements from which on a call of PyTorch costs less than transposing a tensor there and back, and than copying a part of it once more. Of 4 million
# elements (an AMD EPYC of family 25, a busy hour) a step that writes the even rows and then the odd ones took 32 ms, and takes 17, eager PyTorch's
# 14; one that writes to a slice of a slice 17, now 15, eager's 10.
LARGE, _LARGER = 1 << 16, 1 << 20


@dataclasses.dataclass
class Write:
    """`base` with `source` written to a part of it.

    Attributes:
        node: The call that is it.
        views: From `base` to the part.
        used: The nodes that do no more than name the part, or write it back.
    """

    node: fx.Node
    base: fx.Node
    source: fx.Node
    views: list[View]
    used: set[fx.Node]


def join_writes(graph: fx.Graph, target: OrtTarget) -> int:
    """Rewrites, in place, on the CPU, writes to parts of parts, or with a step, and those in a row with them.

    Returns:
        How many calls there are instead.
    """
    if not slow_kernels_may_go(target):
        return 0
    written: dict[fx.Node, list[Write]] = {}
    for node in graph.nodes:
        if (write := write_of(node)) is not None:
            before = written.get(write.base)
            if before is not None and is_for(write.base, node, write.used):
                del written[write.base]
            else:
                before = []
            written[node] = [*before, write]
    chosen = {node: writes for node, writes in written.items() if any(_is_slow(one, _elements(node)) for one in writes)}
    calls: dict[fx.Node, fx.Node] = {}
    for node, writes in chosen.items():
        base, *sources = (calls.get(one, one) for one in (writes[0].base, *(write.source for write in writes)))
        with graph.inserting_before(node):
            calls[node] = graph.call_function(WRITE_PARTS, (base, sources, flat([one.views for one in writes])))
        calls[node].meta = dict(node.meta)
        node.replace_all_uses_with(calls[node])
    if chosen:
        drop_unread(graph)
    return len(chosen)


def _is_slow(write: Write, elements: int) -> bool:
    has_step = any(view.step > 1 and view.dim != 0 for view in write.views)
    return has_step or (len(write.views) > 1 and elements >= _LARGER)


def write_of(node: fx.Node, *, symbolic: bool = False) -> Write | None:
    """The write that a node is; None for other nodes, and where the tensor is small, or bounds are symbolic and not to be."""
    if node.target not in _SCATTERS or node.meta["val"].is_complex() or _elements(node) < LARGE:
        return None
    given = arguments_of(node)
    base, inner = given["self"], given["src"]
    views, used = [_view_of(given, symbolic)], {node}
    while inner.target in _SCATTERS and len(inner.users) == 1 and (names := _part_of(inner.args[0], base, views, symbolic)):
        given = arguments_of(inner)
        views.append(_view_of(given, symbolic))
        used |= {inner, *names}
        inner = given["src"]
    if inner.target in _SET and len(inner.users) == 1 and (names := _part_of(inner.args[0], base, views, symbolic)):
        used |= {inner, *names}
        inner = inner.args[1]
    known = [view for view in views if view is not None]
    return Write(node, base, inner, known, used) if len(known) == len(views) else None


def _elements(node: fx.Node) -> int:
    """Of a tensor; symbolic sizes count as their example."""
    return math.prod(map(hint, node.meta["val"].shape))


def _view_of(given: dict[str, Any], symbolic: bool) -> View | None:
    """The view of a call of a slice or selection, or of one that writes to it; None where its bounds are symbolic and not to be."""
    if "index" in given:
        view = View(given["dim"], given["index"], 0, 0)
    else:
        start, end = given["start"], given["end"]
        view = View(given["dim"], 0 if start is None else start, _END if end is None else end, given["step"])
    return view if symbolic or all(isinstance(number, int) for number in view) else None


def _part_of(node: Any, base: fx.Node, views: list[View | None], symbolic: bool) -> set[fx.Node]:
    """The nodes that these views of `base` are, of which `node` is the last; none if it is another tensor."""
    nodes = set()
    for view in reversed(views):
        if not isinstance(node, fx.Node) or node.target not in _VIEWS or view is None:
            return set()
        given = arguments_of(node)
        if _view_of(given, symbolic) != view:
            return set()
        nodes.add(node)
        node = given["self"]
    return nodes if node is base else set()


def parts_read(argument: fx.Node) -> list[list[int]] | None:
    """The fixed views through which a graph reads an argument, the numbers of each in a row, writes aside; None where it reads the whole."""
    parts = list[list[int]]()
    left: list[tuple[fx.Node, list[int]]] = [(argument, [])]
    while left:
        node, before = left.pop()
        readers = [user for user in node.users if user.target not in IN_PLACE_WRITES]
        views = [_view_of(arguments_of(reader), symbolic=False) if reader.target in _VIEWS else None for reader in readers]
        if readers and None not in views:
            left += [(reader, [*before, *view]) for reader, view in zip(readers, views) if view is not None]
        elif before:
            parts.append(before)
        else:
            return None
    return parts


def is_for(tensor: fx.Node, write: fx.Node, used: set[fx.Node]) -> bool:
    """Whether a tensor is there for a write alone, whose nodes are `used`: nothing else reads it, nor what names its part."""
    names = [user for user in used if user.target in _VIEWS]
    return all(user is write or user in used for one in (tensor, *names) for user in one.users)
