"""Permutations of dimensions on the CPU: those of more than one in two steps, each of which moves one, and none of dimensions of size 1.

ONNX Runtime has fast loops for a Transpose that moves one dimension, and else goes element by element. Pixel shuffle of 4 x 32 pictures of 96 x 96
takes 2400 us as one Transpose and 600 as two, its gradient 1350 and 400, PyTorch 840 and 690 (AMD EPYC of family 25, model 17; 1.19.2 and 1.32.0
alike). Between the two stands a Flatten: ONNX Runtime's optimizer would make one of them again, also across a Reshape (1.32.0).

A dimension of size 1 that moves as well, as `einsum` writes it, hides from ONNX Runtime that one moves alone, or that rows stay whole: without it
131,072 elements take 20 to 30 us, with it 260 (1.19.2) and 800 (1.32.0; Intel Xeon of family 6, model 207).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import int64s
from ort_backend.lowering.fast_loops.rewriting import product, replace, shape_with_unknown
from ort_backend.lowering.symbolic import example

# Elements from which on two more nodes are worth it.
_LARGE = 16384
# Elements that stay in a row, from which on ONNX Runtime copies them at once.
_BLOCK = 8


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Permutations of the groups of dimensions that stay together.

    Attributes:
        groups: The dimensions of each group.
        first: How the groups are permuted first.
        second: How the result is then; None where one does.
    """

    groups: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    second: tuple[int, ...] | None = None


def split_transposes(op: Any, graph: ir.Graph, hints: Mapping[str, int | None]) -> None:
    """Rewrites the Transposes of a finished graph that move more than one dimension, in place.

    Args:
        op: The builder of the graph.
        graph: The finished graph.
        hints: The examples of symbolic sizes, by name; None where a size follows from values.
    """
    for node in list(graph):
        if node.domain or node.op_type != "Transpose" or (value := node.inputs[0]) is None or value.shape is None:
            continue
        shape: list[Any] = list(value.shape)
        examples = tuple(size if isinstance(size, int) else max(example(size, hints), 2) for size in shape)
        if sum(not isinstance(size, int) for size in shape) > 1 or math.prod(examples) < _LARGE:
            continue  # a Reshape can find out one size alone
        steps = _steps(examples, tuple(node.attributes["perm"].as_ints()))
        if steps is not None:
            replace(graph, node, "steps", _written, op, value, shape, tuple(node.attributes["perm"].as_ints()), steps)


def _is_fast(shape: tuple[int, ...], permutation: tuple[int, ...]) -> bool:
    """Whether ONNX Runtime moves one dimension, or copies blocks, of those that stand there."""
    behind = len(shape)
    while behind and permutation[behind - 1] == behind - 1:
        behind -= 1
    return _moves_one(permutation) or math.prod(shape[behind:]) >= _BLOCK


@functools.lru_cache(maxsize=1024)
def _steps(shape: tuple[int, ...], permutation: tuple[int, ...]) -> _Steps | None:
    """The steps; None where the permutation is as fast as it is, or two do not suffice."""
    groups = _groups(shape, permutation)
    order = tuple(sorted(range(len(groups)), key=lambda i: permutation.index(groups[i][0])))
    count = len(groups)
    sizes = [math.prod(shape[d] for d in group) for group in groups]
    if _moves_one(order) or (order[-1] == count - 1 and sizes[-1] >= _BLOCK):
        return None if _is_fast(shape, permutation) or order == tuple(range(count)) else _Steps(groups, order)
    best: tuple[int, _Steps] | None = None
    for first in _moves(count):
        second = tuple(first.index(group) for group in order)
        if not _moves_one(second):
            continue
        block = math.prod(sizes[first[i]] for i in range(count) if all(second[j] == j for j in range(i, count)))
        if best is None or block > best[0]:
            best = block, _Steps(groups, first, second)
    return best[1] if best is not None else None


def _groups(shape: tuple[int, ...], permutation: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Dimensions in order, with those together that stay neighbours; a dimension of size 1 is with the one before it, or behind it."""
    places = {d: place for place, d in enumerate(d for d in permutation if shape[d] != 1)}
    groups: list[list[int]] = []
    for d in sorted(places):
        if groups and places[d] == places[groups[-1][-1]] + 1:
            groups[-1].append(d)
        else:
            groups.append([d])
    return tuple(map(tuple, groups))


def _moves(count: int) -> list[tuple[int, ...]]:
    """All permutations that move one of `count` dimensions."""
    made = []
    for i in range(count):
        rest = [d for d in range(count) if d != i]
        made += [(*rest[:j], i, *rest[j:]) for j in range(count) if j != i]
    return made


def _moves_one(permutation: tuple[int, ...]) -> bool:
    return permutation == tuple(range(len(permutation))) or permutation in _moves(len(permutation))


def _written(op: Any, value: ir.Value, shape: Sequence[Any], permutation: Sequence[int], steps: _Steps) -> ir.Value:
    sizes = [product([shape[d] for d in group]) for group in steps.groups]
    moved = op.Transpose(op.Reshape(value, int64s(op, sizes)), perm=list(steps.first))
    if steps.second is None:
        return op.Reshape(moved, shape_with_unknown(op, (shape[d] for d in permutation)))
    # One more dimension, so that no optimizer takes the Reshape for nothing. The newer ones move a Transpose behind it, but not behind a Flatten.
    again = op.Reshape(op.Flatten(moved, axis=1), int64s(op, [1, *(sizes[i] for i in steps.first)]))
    made = op.Transpose(again, perm=[0, *(i + 1 for i in steps.second)])
    return op.Reshape(made, shape_with_unknown(op, (shape[d] for d in permutation)))
