"""Rotary position embeddings that are written out, as those of Hugging Face's decoders are, become one operator each, and so do their gradients.

`x * cos + cat((-x2, x1)) * sin`, where `x1` and `x2` are the halves of `x` in its last dimension, is six operators, and nine in the backward. As
`cos` and `sin` have the same angles for both halves, the gradient is the embedding by the negative angles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false

from ort_backend.lowering.fx_nodes import REFERENCES, call_beside, source_of
from ort_backend.lowering.ops.rotary_embedding import KERNEL, ROTARY_EMBEDDING
from ort_backend.lowering.passes.effects import drop_unread
from ort_backend.lowering.symbolic import have_same_sizes
from ort_backend.target import OrtTarget

aten = torch.ops.aten

_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
# What keeps two halves of the last dimension alike, when it has no more than one tensor.
_ELEMENTWISE = {
    aten.cos.default, aten.sin.default, aten.mul.Tensor, aten.mul.Scalar, aten.neg.default, aten._to_copy.default, aten.unsqueeze.default,
    aten.clone.default, *REFERENCES,
}  # fmt: skip
# Their first dimensions, in front of the last.
_HEADS_FIRST, _HEADS_LAST = "heads, positions", "positions, heads"


class _Embedding(NamedTuple):
    """A tensor that is turned, and by which angles.

    Attributes:
        result: The node that it is in the graph.
        x: (N, heads, S, D) or (N, S, heads, D)
        cos: With one head; both halves of the last dimension are alike.
        sin: As `cos`.
        backwards: Whether it is turned by the negative angles.
        dtype: In which it is computed.
    """

    result: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    backwards: bool
    dtype: torch.dtype


def fuse_rotary_embeddings(graph: fx.Graph, target: OrtTarget) -> int:
    """Rewrites a graph in place; returns how many embeddings and gradients of such.

    Nothing is done where the kernel is slower than what is written out: on the CPU that of onnxruntime-training 1.19.2, which takes 3 times as long
    (4 x 128 tokens, 4 heads of 64); that of onnxruntime 1.32.0 takes a third to a fifth.
    """
    if KERNEL not in target.contrib_ops or (target.training and target.device_type == "cpu"):
        return 0
    found = [one for node in graph.find_nodes(op="call_function", target=aten.add.Tensor) if (one := _embedding(node, target)) is not None]
    halves: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}
    for one in found:
        _rewrite(graph, one, halves)
    if found:
        drop_unread(graph)
    return len(found)


def _embedding(add: fx.Node, target: OrtTarget) -> _Embedding | None:
    if add.kwargs or not all(isinstance(one, fx.Node) for one in add.args) or add.meta["val"].dim() != 4:
        return None
    for turned, plain in (add.args, add.args[::-1]):
        for backwards, angles_of in ((False, _turned), (True, _turned_back)):
            found = angles_of(turned)
            if found is None:
                continue
            x, sin = found
            cos = _factor(_uncast(plain), x)
            if cos is None:
                continue
            one = _Embedding(add, x, cos, sin, backwards, _uncast(plain).meta["val"].dtype)
            if _fits(one, target):
                return one
    return None


def _turned(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """`x` and `sin` of `cat((-x2, x1)) * sin`."""
    node = _uncast(node)
    if node.target is not aten.mul.Tensor:
        return None
    for cat, sin in (node.args, node.args[::-1]):
        if not isinstance(sin, fx.Node) or not isinstance(cat, fx.Node) or cat.target is not aten.cat.default or not _is_last(cat, cat.args[1:]):
            continue
        parts: Any = cat.args[0]
        if len(parts) == 2 and parts[0].target is aten.neg.default:
            second, first = _half(parts[0].args[0]), _half(parts[1])
            if second is not None and first is not None and second[0] is first[0] and (second[1], first[1]) == (1, 0):
                return first[0], sin
    return None


def _turned_back(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """`grad` and `sin`, where `m = grad * sin`, of the gradient of `x` through `cat((-x2, x1))` that `m` is that of: `cat((m2, -m1))`."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(one, fx.Node) for one in node.args):
        return None
    parts = [_put_back(one) for one in node.args]
    if None in parts:
        return None
    by_half = {which: part for part, which in parts}  # type: ignore[misc]
    if set(by_half) != {0, 1} or by_half[1].target is not aten.neg.default:
        return None
    second, first = _half(by_half[0]), _half(by_half[1].args[0])
    if second is None or first is None or second[0] is not first[0] or (second[1], first[1]) != (1, 0):
        return None
    product = _uncast(first[0])
    if product.target is not aten.mul.Tensor or not all(isinstance(one, fx.Node) for one in product.args):
        return None
    # Which is the gradient, and which the angles, their shapes tell.
    for grad, sin in (product.args, product.args[::-1]):
        if have_same_sizes(grad.meta["val"].shape, product.meta["val"].shape) and 1 in sin.meta["val"].shape[1:3]:
            return grad, sin
    return None


def _half(node: Any) -> tuple[fx.Node, int] | None:
    """The tensor of whose last dimension a node is a half, and which one."""
    if not isinstance(node, fx.Node) or node.target is not aten.slice.Tensor or not _is_last(node.args[0], node.args[1:2]):
        return None
    source: Any = node.args[0]
    return None if (which := _which(source.meta["val"].shape[-1], node.args[2:])) is None else (source, which)


def _put_back(node: Any) -> tuple[Any, int] | None:
    """What a node puts into a half of the last dimension, zeros in the other, and which one."""
    if not isinstance(node, fx.Node) or node.target is not aten.slice_backward.default or not _is_last(node, node.args[2:3]):
        return None
    part, size, _, *place = node.args
    return None if (which := _which(size[-1], place)) is None else (part, which)  # type: ignore[index]


def _which(size: Any, place: Sequence[Any]) -> int | None:
    """Which half of a dimension `start, end, step` are."""
    given: list[Any] = [*place, *(None, None, 1)[len(place) :]]
    start, end, step = given
    if not isinstance(size, int) or size % 2 or step != 1:
        return None
    start, end = start or 0, size if end is None else min(end, size)
    return {(0, size // 2): 0, (size // 2, size): 1}.get((start, end))


def _is_last(tensor: Any, dims: Any) -> bool:
    """Whether a dimension (0 if it is left out) is a tensor's last."""
    rank = tensor.meta["val"].dim()
    return (dims[0] if dims else 0) % rank == rank - 1


def _factor(product: Any, x: fx.Node) -> fx.Node | None:
    """What the other is multiplied by."""
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor or x not in product.args:
        return None
    other = product.args[1 if product.args[0] is x else 0]
    return other if isinstance(other, fx.Node) else None


def _uncast(node: Any) -> Any:
    """The tensor of real numbers whose dtype a node changes, and nothing else."""
    if isinstance(node, fx.Node) and node.target is aten._to_copy.default and {*node.kwargs} <= {"dtype", "layout", "device"}:
        source: Any = node.args[0]
        before, after = source.meta["val"], node.meta["val"]
        return source if before.is_floating_point() and after.is_floating_point() and before.device == after.device else node
    return node


def _fits(one: _Embedding, target: OrtTarget) -> bool:
    """Whether the kernel computes in the dtype, and the angles are those of positions, the same for both halves and all heads."""
    x, result = one.x.meta["val"], one.result.meta["val"]
    kernels = _DTYPES if target.has_half_kernels else {torch.float32}
    if one.dtype not in kernels or not {x.dtype, result.dtype} <= _DTYPES or not have_same_sizes(x.shape, result.shape):
        return False
    if any(size == 0 for size in x.shape) or (order := _order(one)) is None:
        return False
    heads, positions = (1, 2) if order is _HEADS_FIRST else (2, 1)
    for angles in (one.cos.meta["val"], one.sin.meta["val"]):
        sequences, length, width = angles.shape[0], angles.shape[positions], angles.shape[3]
        if not have_same_sizes((length, width), (x.shape[positions], x.shape[3])) or angles.dtype not in _DTYPES:
            return False
        if not _is_one(sequences) and not (isinstance(sequences, int) and isinstance(length, int) and sequences == x.shape[0]):
            return False
    alike = isinstance(x.shape[heads], int) and have_same_sizes(one.cos.meta["val"].shape, one.sin.meta["val"].shape)
    return alike and _has_equal_halves(one.cos) and _has_equal_halves(one.sin)


def _order(one: _Embedding) -> str | None:
    """Where the angles have their only head."""
    shapes = [angles.meta["val"].shape for angles in (one.cos, one.sin)]
    if any(len(shape) != 4 for shape in shapes):
        return None
    return next((order for order, dim in ((_HEADS_FIRST, 1), (_HEADS_LAST, 2)) if all(_is_one(shape[dim]) for shape in shapes)), None)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _has_equal_halves(angles: Any) -> bool:
    """Whether a tensor is made from one tensor twice, in the last dimension, element by element."""
    while isinstance(angles, fx.Node) and angles.target in _ELEMENTWISE:
        value = angles.meta["val"]
        if angles.target is aten.unsqueeze.default and angles.args[1] % value.dim() == value.dim() - 1:
            return False
        if len(angles.all_input_nodes) != 1:
            return False
        angles = angles.all_input_nodes[0]
    if not isinstance(angles, fx.Node) or angles.target is not aten.cat.default or not _is_last(angles, angles.args[1:]):
        return False
    parts: Any = angles.args[0]
    return len(parts) == 2 and source_of(parts[0]) is source_of(parts[1])


def _rewrite(graph: fx.Graph, one: _Embedding, halves: dict[tuple[fx.Node, torch.dtype, bool], fx.Node]) -> None:
    heads = 1 if _order(one) is _HEADS_FIRST else 2
    for full, negative in ((one.cos, False), (one.sin, one.backwards)):
        key = full, one.dtype, negative
        if key not in halves:
            with graph.inserting_before(full.next):
                halves[key] = _half_of_angles(graph, full, heads, one.dtype, negative)
    cos, sin = halves[one.cos, one.dtype, False], halves[one.sin, one.dtype, one.backwards]
    like, dtype = one.result, one.result.meta["val"].dtype
    with graph.inserting_before(one.result):
        x = _swapped(graph, one.x, like) if heads == 1 else one.x
        x = x if x.meta["val"].dtype == one.dtype else call_beside(graph, like, aten._to_copy.default, x, dtype=one.dtype)
        turned = call_beside(graph, like, ROTARY_EMBEDDING, x, cos, sin)
        turned = turned if dtype == one.dtype else call_beside(graph, like, aten._to_copy.default, turned, dtype=dtype)
        turned = _swapped(graph, turned, like) if heads == 1 else turned
        if any(user.op == "output" for user in like.users) and is_contiguous_or_false(like.meta["val"]):  # what leaves the graph keeps its strides
            turned = call_beside(graph, like, aten.clone.default, turned, memory_format=torch.contiguous_format)
    one.result.replace_all_uses_with(turned)


def _half_of_angles(graph: fx.Graph, full: fx.Node, heads: int, dtype: torch.dtype, negative: bool) -> fx.Node:
    """(N or 1, S, D / 2)"""
    half = call_beside(graph, full, aten.slice.Tensor, full, 3, 0, full.meta["val"].shape[3] // 2)
    half = call_beside(graph, full, aten.squeeze.dim, half, heads)
    if half.meta["val"].dtype != dtype:
        half = call_beside(graph, full, aten._to_copy.default, half, dtype=dtype)
    return call_beside(graph, full, aten.neg.default, half) if negative else half


def _swapped(graph: fx.Graph, x: fx.Node, like: fx.Node) -> fx.Node:
    """Heads and positions the other way round."""
    if x.target is aten.transpose.int and {one % 4 for one in x.args[1:]} == {1, 2}:  # type: ignore[operator]
        return x.all_input_nodes[0]
    return call_beside(graph, like, aten.transpose.int, x, 1, 2)
