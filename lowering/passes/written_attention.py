"""Attention that is written out (products, a softmax, a product) becomes PyTorch's `scaled_dot_product_attention`, where it is long.

Written out, the probabilities, queries x keys for each head, wait for the backward. Attention as one operator keeps none where they are many, and is
causal in blocks where its mask says so (`attention_choice`). Four layers, 6 heads 64 wide, a batch of 4 (AMD EPYC of family 26), as written and so:
512 tokens 465 and 349 MB in 1.05 of the time; 1024 tokens 1129 and 570 MB in 1.14, with a causal mask in a buffer 1207 and 610 MB in 1.02. These are
0.6, 0.5 and 0.43 of eager's time.

Where a mask hides every key from a query, eager PyTorch gives NaN and the operator zero: here it is NaN, too.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ort_backend.lowering.fx_nodes import graph_modules
from ort_backend.lowering.passes.traced_masks import given, is_written
from ort_backend.lowering.passes.written_activations import number_of, take_numbers
from ort_backend.lowering.symbolic import have_same_sizes, hint

# Queries, and keys, up to which the probabilities stay: as one operator they would be kept as well, or gain nothing.
_FEW = 256

_PRODUCTS = {operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm", "__matmul__"}
_SOFTMAX = {F.softmax, torch.softmax, "softmax"}
_TIMES, _OVER, _PLUS = {operator.mul, torch.mul, "mul"}, {operator.truediv, torch.div, "div"}, {operator.add, torch.add, "add"}
_FILLED = {torch.masked_fill, "masked_fill"}
_CASTS = {"to", "type_as", "float", "type"}
_SWAPPED = {torch.transpose, "transpose", "swapaxes", "swapdims", torch.swapaxes, torch.swapdims}


@dataclasses.dataclass
class _Scores:
    """`query @ key^T * scale`, masked.

    Attributes:
        transposed: Whether `key` is (..., D, keys), and not (..., keys, D).
        mask: What is added, or, if `is_filled`, where minus infinity is written.
        nodes: All nodes from the first product on.
    """

    query: fx.Node
    key: fx.Node
    transposed: bool
    nodes: list[fx.Node]
    scale: float = 1.0
    mask: fx.Node | None = None
    is_filled: bool = False


def fold_attention(gm: fx.GraphModule, few: int = _FEW) -> int:
    """Makes one operator of what is written out, in place; returns how many.

    Args:
        gm: Dynamo's graph, with fake tensors as `example_value` in its metadata.
        few: Up to how many queries, or keys, attention stays as it is.
    """
    modules = graph_modules(gm)
    if any(_is_transform(node) for module in modules for node in module.graph.nodes):
        return 0
    folded = 0
    for module in modules:
        here = sum(_fold(module.graph, node, few) for node in list(module.graph.nodes) if _is(node, _PRODUCTS) or _is(node, {torch.einsum}))
        if here:
            module.recompile()
        folded += here
    return folded


def has_long_softmax(gm: fx.GraphModule, few: int = _FEW) -> bool:
    """Whether there may be something to fold."""
    softmaxes = [_value(node) for module in graph_modules(gm) for node in module.graph.nodes if _is(node, _SOFTMAX)]
    return any(isinstance(one, Tensor) and one.dim() > 2 and min(map(hint, one.shape[-2:])) > few for one in softmaxes)


def _is_transform(node: fx.Node) -> bool:
    """Whether a gradient or another transform is taken inside the graph: the operator has no second derivative, and none in forward mode."""
    module = getattr(node.target, "__module__", None) or ""
    return node.target is torch.autograd.grad or module.startswith(("torch._functorch.", "torch._C._functorch"))


def _fold(graph: fx.Graph, product: fx.Node, few: int) -> bool:
    operands = _operands(product, transposed=False)
    if operands is None or (softmax := _softmax(operands[0])) is None:
        return False
    value, (chain, scores) = operands[1], softmax
    if not _fits(scores, value, product, few):
        return False
    nodes = [product, *chain, *scores.nodes]
    take_numbers(nodes)
    with graph.inserting_before(product):
        made = _write(graph, scores, value)
    made.meta = dict(product.meta)
    product.replace_all_uses_with(made)
    for node in nodes:
        if not node.users:
            graph.erase_node(node)
    return True


def _softmax(node: fx.Node) -> tuple[list[fx.Node], _Scores] | None:
    """From what a product with the values takes: the nodes from there to the softmax, and its scores."""
    chain: list[fx.Node] = []
    while len(node.users) == 1 and (_is(node, _CASTS) or _drops_nothing(node)):
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if len(node.users) != 1 or not _is(node, _SOFTMAX) or given(node, 1, "dim") not in (-1, _value(node).dim() - 1):
        return None
    scores = _scores(node.args[0])
    return None if scores is None else ([*chain, node], scores)


def _scores(node: Any) -> _Scores | None:
    """The scores that a softmax takes; None if they are something else, or read elsewhere."""
    if not isinstance(node, fx.Node) or len(node.users) != 1 or (node.kwargs and not _is(node, _FILLED)):
        return None
    if (operands := _operands(node, transposed=True)) is not None:
        query, key = operands
        is_swapped = _is(key, _SWAPPED) and {one % _value(key).dim() for one in key.args[1:3] if isinstance(one, int)} == _last_two(key)
        if is_swapped and not is_written(key, _value(key)):
            return _Scores(query, key.args[0], False, [node, key])  # type: ignore[arg-type]
        return _Scores(query, key, not _is(node, {torch.einsum}), [node])
    args = node.args
    if _is(node, _FILLED) and len(args) == 3 and args[2] == -math.inf and (found := _scores(args[0])) is not None:
        return _masked(found, node, args[1], filled=True)
    if len(args) != 2 or not any(_is(node, kinds) for kinds in (_TIMES, _OVER, _PLUS)):
        return None
    for one, other in (args, args[::-1]):
        if (factor := number_of(other)) is not None and not _is(node, _PLUS):
            if (_is(node, _OVER) and (one is not args[0] or factor == 0)) or (found := _scores(one)) is None or found.mask is not None:
                continue
            return dataclasses.replace(found, scale=found.scale / factor if _is(node, _OVER) else found.scale * factor, nodes=[node, *found.nodes])
        if _is(node, _PLUS) and isinstance(other, fx.Node) and (found := _scores(one)) is not None:
            return _masked(found, node, other, filled=False)
    return None


def _masked(scores: _Scores, node: fx.Node, mask: Any, *, filled: bool) -> _Scores | None:
    if scores.mask is not None or not isinstance(mask, fx.Node):
        return None
    return dataclasses.replace(scores, mask=mask, is_filled=filled, nodes=[node, *scores.nodes])


def _fits(scores: _Scores, value: fx.Node, product: fx.Node, few: int) -> bool:
    """Whether the operator computes the same of them, and keeps less."""
    tensors = [_value(node) for node in (scores.query, scores.key, value, product)]
    if any(not isinstance(one, Tensor) or one.dim() != tensors[0].dim() for one in tensors) or tensors[0].dim() not in (3, 4):
        return False
    if not tensors[0].is_floating_point() or len({one.dtype for one in tensors}) != 1:
        return False
    if tensors[0].device.type != "cpu" and torch.are_deterministic_algorithms_enabled():  # fused gradients on a device may add in any order
        return False
    if any(is_written(node, _value(node)) for node in (scores.query, scores.key, value, product, *scores.nodes) if isinstance(_value(node), Tensor)):
        return False
    query, key, values = (tuple(one.shape) for one in tensors[:3])
    if scores.transposed:
        key = (*key[:-2], key[-1], key[-2])
    if not have_same_sizes(key, values) or not have_same_sizes((*query[:-2], query[-1]), (*key[:-2], key[-1])):
        return False
    return min(hint(query[-2]), hint(key[-2])) > few and (scores.mask is None or _is_mask(scores, (*query[:-1], key[-2]), tensors[0].dtype))


def _is_mask(scores: _Scores, shape: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Whether the mask is one for all, or some, of scores of this shape, and has no gradient."""
    assert scores.mask is not None
    mask = _value(scores.mask)
    if not isinstance(mask, Tensor) or mask.requires_grad or mask.dim() not in (2, len(shape)) or is_written(scores.mask, mask):
        return False
    if mask.dtype is not (torch.bool if scores.is_filled else dtype) or not have_same_sizes(mask.shape[-1:], shape[-1:]):
        return False
    sizes = zip(mask.shape[:-1], shape[-mask.dim() : -1], strict=True)
    return all((isinstance(size, int) and size == 1) or have_same_sizes((size,), (whole,)) for size, whole in sizes)


def _write(graph: fx.Graph, scores: _Scores, value: fx.Node) -> fx.Node:
    """The operator's node, and what is around it. Its result lies in memory as that of a product."""
    flat = _value(value).dim() == 3
    key = graph.call_method("transpose", (scores.key, -1, -2)) if scores.transposed else scores.key
    tensors = [graph.call_method("unsqueeze", (one, 0)) if flat else one for one in (scores.query, key, value)]
    mask = None if scores.mask is None else _mask(graph, scores, scores.mask, _value(value).dtype)
    made = graph.call_function(F.scaled_dot_product_attention, (*tensors,), {"attn_mask": mask, "scale": scores.scale})
    return graph.call_method("contiguous", (graph.call_method("squeeze", (made, 0)) if flat else made,))


def _mask(graph: fx.Graph, scores: _Scores, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
    """What the operator adds to the scores: NaN for a query that sees no key, of which a softmax makes that, and the operator zero."""
    dims = _value(mask).dim()
    if scores.is_filled:
        hides_all = graph.call_method("all", (mask,), {"dim": -1, "keepdim": True})
        hidden = graph.call_method("to", (graph.call_function(torch.where, (hides_all, math.nan, -math.inf)), dtype))
        mask = graph.call_function(torch.where, (mask, hidden, 0.0))
    else:
        hides_all = graph.call_function(operator.eq, (graph.call_method("amax", (mask,), {"dim": -1, "keepdim": True}), -math.inf))
        hidden = graph.call_method("to", (graph.call_function(torch.where, (hides_all, math.nan, 0.0)), dtype))
        mask = graph.call_function(operator.add, (mask, hidden))
    return graph.call_method("unsqueeze", (mask, 0)) if dims == 3 else mask


def _operands(node: fx.Node, *, transposed: bool) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors of a product; an `einsum` must multiply with the second one transposed, or not."""
    if _is(node, _PRODUCTS) and len(node.args) == 2 and not node.kwargs:
        left, right = node.args
    elif _is(node, {torch.einsum}) and len(node.args) == 3 and isinstance(node.args[0], str):
        terms = re.split(",|->", node.args[0].replace(" ", ""))
        if len(terms) != 3 or len(terms[0]) not in (3, 4) or any(len(set(term)) != len(terms[0]) or not term.isalpha() for term in terms):
            return None
        batch, i, inner, j = terms[0][:-2], terms[0][-2], terms[0][-1], terms[2][-1]
        if terms[1:] != [batch + (j + inner if transposed else inner + j), batch + i + j]:
            return None
        left, right = node.args[1:]
    else:
        return None
    return (left, right) if isinstance(left, fx.Node) and isinstance(right, fx.Node) else None


def _drops_nothing(node: fx.Node) -> bool:
    if not _is(node, {F.dropout}):
        return False
    return given(node, 1, "p") in (0, 0.0) or given(node, 2, "training") is False


def _is(node: fx.Node, targets: set[Any]) -> bool:
    return node.op in ("call_function", "call_method") and node.target in targets


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _last_two(node: fx.Node) -> set[int]:
    return {_value(node).dim() - 1, _value(node).dim() - 2}
