"""Gradients of functions that are flat somewhere, where what arrives there may be infinite: zero, as in PyTorch, and not infinity times zero.

The lowerings multiply with a mask, which is several times as fast as ONNX Runtime's `Where` (1.19.2). In front of a root, a logarithm or a
quotient, as in `relu(x).sqrt()`, that would be NaN at 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ort_backend.lowering.functions.autograd_function import BACKWARD

aten = torch.ops.aten

# In a node's metadata: that zeros are to be selected there.
SELECTS = "ort_training_selects"

_HALF = 2  # bytes
_WIDER = torch.ops.prims.convert_element_type.default


def _outside(add: Callable[..., fx.Node], x: fx.Node, low: Any, high: Any) -> fx.Node:
    x = _unrounded(add, x)
    return add(aten.logical_or.default, add(aten.le.Scalar, x, low), add(aten.ge.Scalar, x, high))


def _unrounded(add: Callable[..., fx.Node], x: fx.Node) -> fx.Node:
    """`x` so that a comparison does not round the number beside it to half precision: PyTorch's gradient of a threshold compares in float32."""
    return add(_WIDER, x, torch.float32) if x.meta["val"].dtype.itemsize == _HALF else x


# Each with a writer of where it is flat, of its arguments behind the gradient. The number beside what shrinks PyTorch does round.
_FLAT: dict[Any, Callable[..., fx.Node]] = {
    aten.threshold_backward.default: lambda add, x, threshold: add(aten.le.Scalar, _unrounded(add, x), threshold),
    aten.hardtanh_backward.default: _outside,
    aten.hardshrink_backward.default: lambda add, x, width: add(aten.le.Scalar, add(aten.abs.default, x), width),
    aten.softshrink_backward.default: lambda add, x, width: add(aten.le.Scalar, add(aten.abs.default, x), width),
    aten.hardsigmoid_backward.default: lambda add, x: add(aten.ge.Scalar, add(aten.abs.default, x), 3.0),
    aten.hardswish_backward.default: lambda add, x: add(aten.lt.Scalar, x, -3.0),
}

# Gradients that are infinite for one element are NaN for many behind these, in eager PyTorch too.
_MIXING = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default, aten.convolution_backward.default,
    aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default, aten.native_batch_norm_backward.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.embedding_dense_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}  # fmt: skip
_SINGULAR = {
    aten.rsqrt.default, aten.reciprocal.default, aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default,
    aten.pow.Tensor_Tensor, aten.linalg_vector_norm.default,
}  # fmt: skip
_QUOTIENTS = {aten.div.Tensor, aten.div.Tensor_mode, operator.truediv}
_NUMBERS = {aten.abs.default, aten.where.ScalarSelf}  # what `_select` writes that is not of bools
_KNOWN = {"aten", "prims", "ort_training"}
_FURTHEST = 200  # nodes


def mark_gradients(graph: fx.Graph, *, everywhere: bool = False) -> None:
    """Marks the gradients of such functions where what arrives may be infinite.

    Args:
        graph: A forward with its backward; or a graph without gradients, which may be a backward.
        everywhere: All of them: for a backward that does not see its forward.
    """
    for node in graph.nodes:
        if node.target in _FLAT and (everywhere or _may_be_infinite(node.args[0])):
            node.meta[SELECTS] = True


def select_gradients(graph: fx.Graph, by_itself: Callable[[fx.Node], bool] = lambda node: False) -> int:
    """Selects, in place, zeros where a marked gradient is flat, unless the node does so `by_itself`; returns how many it selected."""
    chosen = [node for node in graph.nodes if node.target in _FLAT and node.meta.get(SELECTS) and not by_itself(node)]
    for node in chosen:
        _select(graph, node)
    return len(chosen)


def _may_be_infinite(gradient: Any) -> bool:
    seen: set[fx.Node] = set()
    ahead = [gradient]
    while ahead:
        node = ahead.pop()
        if node in seen or node.target in _MIXING:
            continue
        if _is_singular(node) or _is_from_outside(node) or len(seen) == _FURTHEST:
            return True
        seen.add(node)
        ahead.extend(node.all_input_nodes)
    return False


def _is_from_outside(node: fx.Node) -> bool:
    """Whether a program computes it: the tangent of a result that is not one number, what a user's Function or operator returns."""
    if node.op == "placeholder" and node.name.startswith("tangents"):
        return not statically_known_true(getattr(node.meta.get("val"), "numel", lambda: 1)() == 1)
    return node.target is BACKWARD or (isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _KNOWN)


def _is_singular(node: fx.Node) -> bool:
    if node.target in _QUOTIENTS:
        return isinstance(node.args[1], fx.Node) and isinstance(node.args[1].meta.get("val"), torch.Tensor)
    if node.target is aten.pow.Tensor_Scalar:
        exponent = node.args[1]
        return not isinstance(exponent, (int, float)) or exponent < 0 or exponent != math.floor(exponent)
    return node.target in _SINGULAR


def _select(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces `node` by `where(flat, 0, node)`."""
    users, last = list(node.users), node

    def add(target: Any, *args: Any) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.call_function(target, args)
        fake = node.meta["val"]
        dtype = fake.dtype if target in _NUMBERS else torch.float32 if target is _WIDER else torch.bool
        last.meta.update({**node.meta, "val": torch.empty_like(fake, dtype=dtype)})
        return last

    selected = add(aten.where.ScalarSelf, _FLAT[node.target](add, *node.args[1:]), 0.0, node)
    for user in users:
        user.replace_input_with(node, selected)
