"""Sessions that hold much memory, divided: what a session takes is given back when it ends, and no earlier.

A backward in one session holds all that the forward saved until the last gradient is there: as much again as all gradients take, in a Llama of 110
million parameters. In parts it holds a part's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.symbolic import hint

# What a session may hold: to compute what takes so much takes long beside a session's call (some tens of microseconds).
HELD = 32 << 20
# As many sessions as one becomes at most.
_MOST_PARTS = 8


def byte_count(fake: Any) -> int:
    """Of a fake tensor, for the example of symbolic sizes; 0 for a number."""
    if not isinstance(fake, torch.Tensor):
        return 0
    return math.prod(map(hint, fake.shape)) * fake.element_size()


def saved_values(graph: fx.Graph) -> list[fx.Node]:
    """What a backward graph gets from its forward, without parameters and inputs; nothing for other graphs."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if not any(node.name.startswith("tangents") for node in placeholders):
        return []
    return [node for node in placeholders if not node.name.startswith(("tangents", "primals", "random"))]


def cut(nodes: Sequence[fx.Node], reads: dict[fx.Node, set[fx.Node]], going: Iterable[fx.Node], wanted: set[fx.Node]) -> list[list[fx.Node]]:
    """A session's nodes, in order, as those of several.

    Each ends where the fewest bytes pass on to the next, between three quarters and five quarters of what it may hold.

    Args:
        nodes: In an order in which they can run.
        reads: What each of them reads, from inside and outside.
        going: What is read from outside, and nowhere behind this session.
        wanted: Those of `nodes` that are read behind this session, whatever happens in it.
    """
    last = {source: i for i, node in enumerate(nodes) for source in reads[node]}
    freed = [0] * len(nodes)
    for node in going:
        freed[last[node]] += byte_count(node.meta.get("val"))
    total = list(itertools.accumulate(freed))
    limit = max(HELD, total[-1] / _MOST_PARTS)
    if total[-1] < 2 * limit:
        return [list(nodes)]
    passing = _passing(nodes, last, wanted)
    parts: list[list[fx.Node]] = []
    start = before = 0
    while total[-1] - before >= 2 * limit:
        places = [i for i in range(start, len(nodes)) if total[i] >= before + 0.75 * limit and passing[i] < math.inf]
        near = [i for i in places if total[i] <= before + 1.25 * limit]
        end = min(near, key=lambda i: passing[i]) if near else places[0]
        parts.append(list(nodes[start : end + 1]))
        start, before = end + 1, total[end]
    return [*parts, list(nodes[start:])] if start < len(nodes) else parts


def _passing(nodes: Sequence[fx.Node], last: dict[fx.Node, int], wanted: set[fx.Node]) -> list[float]:
    """For each node, the bytes that a session which begins behind it would take of those before it; what is wanted outside costs nothing more.

    Infinite between a node with several results and those that pick one of them.
    """
    passing = [0.0] * len(nodes)
    for i, node in enumerate(nodes):
        fake = node.meta.get("val")
        size = math.inf if isinstance(fake, (tuple, list)) else 0 if node in wanted else byte_count(fake)
        for place in range(i, last.get(node, i)) if size else ():
            passing[place] += size
    return passing
