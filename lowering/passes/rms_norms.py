"""Root mean square normalizations that are written out, as those of Hugging Face's models are, become one operator, forward and backward.

Each is seven operators in the forward and sixteen in the backward (transformers 5.17); ONNX Runtime has one for either. A norm of half precision is
computed in float32, and rounded in front of the weight; here it is so behind it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering import registry
from ort_backend.lowering.fx_nodes import call_beside, source_of
from ort_backend.lowering.ops.normalization import LONG
from ort_backend.lowering.passes.effects import drop_unread
from ort_backend.target import OrtTarget

aten = torch.ops.aten

_HALVES = {torch.float16, torch.bfloat16}
FORWARD, BACKWARD = aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default


@dataclasses.dataclass
class _Gradients:
    """Of `x` and `w`.

    Attributes:
        grad: The gradient of `y`.
        scaled: `grad * w`, in float32
        by_root: The part of the gradient of `x` that comes through `normal` alone: `grad * w * r`.
        by_mean: The part that comes through the mean.
        total: The sum to which `by_mean` is added, of `by_root` and maybe others.
        of_weight: The gradient of `w`; None if it has none.
    """

    grad: fx.Node
    scaled: fx.Node
    by_root: fx.Node
    by_mean: fx.Node
    total: fx.Node
    of_weight: fx.Node | None


@dataclasses.dataclass
class _Norm:
    """`y = x * r * w`, where `r = rsqrt(mean(x ** 2) + eps)`.

    Attributes:
        normal: `x * r`
        gradients: None where `x` and `w` have none.
    """

    x: fx.Node
    r: fx.Node
    weight: fx.Node
    eps: float
    y: fx.Node
    gradients: _Gradients | None


def fuse_rms_norms(graph: fx.Graph, target: OrtTarget, *, checkpoints: bool = False) -> int:
    """Rewrites a graph in place; returns how many norms. Nothing is done for an ONNX Runtime without kernels for them.

    Those in checkpoints are left, unless `checkpoints` says that what is computed again is written twice by now: the first is a norm without
    gradients, the second one with them.
    """
    if not _roots(graph) or not target.whole_graphs or any(next(registry.find(one, target), None) is None for one in (FORWARD, BACKWARD)):
        return 0
    if checkpoints:
        drop_unread(graph)
    found = [norm for norm in map(_norm_of, _roots(graph)) if norm is not None and (checkpoints or "recompute" not in norm.y.meta)]
    order = {node: i for i, node in enumerate(graph.nodes)}
    for norm in found:
        _rewrite(graph, norm, order)
    if found:
        drop_unread(graph)
    return len(found)


def _roots(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=aten.rsqrt.default))


def _norm_of(r: fx.Node) -> _Norm | None:
    """The norm whose root this is, if all of it is there, and nothing else reads what it computes on the way."""
    x, eps = _forward_of(r)
    normal = _product(r, x)
    if normal is None:
        return None
    rounded = _cast_of(normal, _HALVES) or normal
    y = _only([user for user in rounded.users if _is_scaled(user, rounded)])
    if y is None:
        return None
    weight = _other(y, rounded)
    norm = _Norm(x, r, weight, eps, y, None)
    if set(r.users) == {normal} and set(rounded.users) == {y}:
        return norm
    for product in weight.users:
        if product is not y and product.target is aten.mul.Tensor and (found := _gradients(norm, rounded, product, rounded is not normal)):
            return dataclasses.replace(norm, gradients=found)
    return None


def _gradients(norm: _Norm, rounded: fx.Node, product: fx.Node, is_half: bool) -> _Gradients | None:
    """The gradients, if `product` is `grad * w`, all of them are there, and nothing else reads what is computed on the way.

    Args:
        norm: What is known of it so far.
        rounded: `x * r`
        product: What may be the gradient of `rounded`.
        is_half: Whether they are of half precision.
    """
    x, r, weight = norm.x, norm.r, norm.weight
    grad = _other(product, weight)
    others = [user for user in rounded.users if user is not norm.y]
    of_weight = None if not others else _summed(others[0], weight)
    if others and (others != [_product(rounded, grad)] or of_weight is None):
        return None
    scaled: fx.Node | None = product
    if is_half:  # under autocast the weight, and with it the product, may be in float32
        scaled = product if product.meta["val"].dtype in _HALVES else _cast_of(product, _HALVES)
        scaled = scaled and _cast_of(scaled, {torch.float32})
    if scaled is None:
        return None
    by_root, by_x = _product(scaled, r), _product(scaled, x)
    by_mean = None if by_x is None else _through_mean(by_x, x, r)
    if by_root is None or by_mean is None or len(scaled.users) != 2 or len(by_mean.users) != 1:
        return None
    total = next(iter(by_mean.users))
    if total.target is not aten.add.Tensor or total.kwargs:
        return None
    rest = _other(total, by_mean)
    if rest is by_root or (rest.target is aten.add.Tensor and not rest.kwargs and by_root in rest.args):
        return _Gradients(grad, scaled, by_root, by_mean, total, of_weight)
    return None


def _forward_of(r: fx.Node) -> tuple[Any, float]:
    """`x` and `eps`; None for `x` where this is no norm over the last dimension of a tensor in float32."""
    nothing = None, 0.0
    added: Any = r.args[0]
    if added.target is not aten.add.Tensor or len(added.users) != 1 or not isinstance(added.args[1], float) or added.kwargs:
        return nothing
    mean: Any = added.args[0]
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim or len(mean.users) != 1 or mean.kwargs or mean.args[2:] != (True,):
        return nothing
    square: Any = mean.args[0]
    if square.target is not aten.pow.Tensor_Scalar or square.args[1] != 2 or len(square.users) != 1:
        return nothing
    x = square.args[0]
    value = x.meta["val"]
    if value.dtype is not torch.float32 or value.dim() == 0 or _dims(mean) != [value.dim() - 1]:
        return nothing
    return (x, added.args[1]) if isinstance(value.shape[-1], int) and 1 < value.shape[-1] < LONG else nothing


def _dims(reduction: fx.Node) -> list[int]:
    """The dimensions that it is over."""
    tensor, dims, *_ = reduction.args
    return sorted(d % tensor.meta["val"].dim() for d in dims)  # type: ignore[union-attr]


def _is_scaled(node: fx.Node, normal: fx.Node) -> bool:
    """Whether it is the norm times a weight for each of the last dimension."""
    if node.target is not aten.mul.Tensor or not all(isinstance(one, fx.Node) for one in node.args):
        return False
    weight, size = _other(node, normal).meta["val"], normal.meta["val"].shape[-1]
    return weight.dim() == 1 and weight.shape[0] == size and weight.dtype in (normal.meta["val"].dtype, torch.float32)


def _summed(node: fx.Node, weight: fx.Node) -> fx.Node | None:
    """The sum of a tensor over all dimensions but the last, in the shape of the weight: with one user each on the way."""
    if len(node.users) != 1:
        return None
    total = next(iter(node.users))
    if total.target is not aten.sum.dim_IntList or _dims(total) != list(range(node.meta["val"].dim() - 1)):
        return None
    if total.kwargs.get("dtype") not in (None, torch.float32):
        return None
    while total.meta["val"].dim() != 1:
        if len(total.users) != 1:
            return None
        total = next(iter(total.users))
        if total.target not in (aten.view.default, aten.reshape.default, aten.squeeze.dims, aten._to_copy.default):
            return None
    total = _cast_of(total, {weight.meta["val"].dtype}) or total
    return total if total.meta["val"].shape == weight.meta["val"].shape and total.meta["val"].dtype is weight.meta["val"].dtype else None


def _through_mean(by_x: fx.Node, x: fx.Node, r: fx.Node) -> fx.Node | None:
    """`expand(sum(grad * w * x) * -0.5 * r ** 3) / size * (2 * x)`, whose users alone read what is on the way."""
    size = x.meta["val"].shape[-1]
    node = by_x
    for target, constant in (
        (aten.sum.dim_IntList, None), (aten.mul.Scalar, -0.5), (aten.mul.Tensor, None), (aten.expand.default, None), (aten.div.Scalar, size),
        (aten.mul.Tensor, None),
    ):  # fmt: skip
        if len(node.users) != 1:
            return None
        user = next(iter(node.users))
        if user.target is not target or (constant is not None and user.args[1] != constant):
            return None
        if target is aten.sum.dim_IntList and (user.args[2:] != (True,) or _dims(user) != [x.meta["val"].dim() - 1]):
            return None
        if target is aten.mul.Tensor and not (_is_cube(_other(user, node), r) or _is_twice(_other(user, node), x)):
            return None
        node = user
    return node


def _cast_of(node: fx.Node, dtypes: Collection[torch.dtype]) -> fx.Node | None:
    """What alone reads a node, if that is a cast of it to one of the dtypes."""
    user = _only(list(node.users))
    return user if user is not None and user.target is aten._to_copy.default and user.meta["val"].dtype in dtypes else None


def _is_cube(node: Any, r: fx.Node) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.pow.Tensor_Scalar and node.args[1:] == (3,) and source_of(node.args[0]) is r


def _is_twice(node: Any, x: fx.Node) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Scalar or node.args[1] != 2:
        return False
    power: Any = node.args[0]
    return power is x or (isinstance(power, fx.Node) and power.target is aten.pow.Tensor_Scalar and power.args == (x, 1))


def _product(one: fx.Node, other: Any) -> fx.Node | None:
    """The node that multiplies the two, if there is one."""
    return _only([user for user in one.users if user.target is aten.mul.Tensor and set(user.args) == {one, other}])


def _only(nodes: Sequence[fx.Node]) -> fx.Node | None:
    return nodes[0] if len(nodes) == 1 else None


def _other(node: fx.Node, one: fx.Node) -> Any:
    return node.args[1] if node.args[0] is one else node.args[0]


def _rewrite(graph: fx.Graph, norm: _Norm, order: Mapping[fx.Node, int]) -> None:
    """Puts the operators in. `order` has the places of the nodes that were there before any were."""
    x, dtype = norm.x, norm.y.meta["val"].dtype
    sizes = [x.meta["val"].shape[-1]]
    with graph.inserting_before(norm.y):
        weight = _cast(graph, norm.weight, torch.float32)
        forward = _call(graph, FORWARD, (x, sizes, weight, norm.eps), (x.meta["val"], norm.r.meta["val"]), norm.y)
        y, root = (_item(graph, forward, i) for i in range(2))
        y = _cast(graph, y, dtype)
    norm.y.replace_all_uses_with(y)
    if (made := norm.gradients) is None:
        return
    # What adds the gradients of a weight that is used twice may stand in front of `scaled`, where that is a cast of a product in float32.
    first = made.scaled if made.of_weight is None else min(made.scaled, made.of_weight, key=order.__getitem__)
    with graph.inserting_before(first):
        grad = _cast(graph, y if made.grad is norm.y else made.grad, torch.float32)
        values = (x.meta["val"], weight.meta["val"])
        backward = _call(graph, BACKWARD, (grad, x, sizes, root, weight, [True, made.of_weight is not None]), values, made.scaled)
        of_x, of_weight = (_item(graph, backward, i) for i in range(2))
        if made.of_weight is not None:
            made.of_weight.replace_all_uses_with(_cast(graph, of_weight, norm.weight.meta["val"].dtype))
    made.by_root.replace_all_uses_with(of_x)
    made.total.replace_all_uses_with(_other(made.total, made.by_mean))


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if node.meta["val"].dtype is dtype else call_beside(graph, node, aten._to_copy.default, node, dtype=dtype)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], values: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {**like.meta, "val": values}
    return node


def _item(graph: fx.Graph, node: fx.Node, i: int) -> fx.Node:
    return call_beside(graph, node, operator.getitem, node, i)
