"""A number that a batch of matrix products is multiplied with becomes part of the product: attention's scale, forward and backward.

ONNX Runtime's own fusion of scales does not see through the reshapes that stand around a product of more than three dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import VIEWS
from ort_backend.lowering.ops.matmul import SCALED_BMM

aten = torch.ops.aten


def fuse_scales(graph: fx.Graph) -> int:
    """Moves, in place, constant factors of results and of left or right sides of `bmm` into the product.

    Returns:
        How many products got a factor.
    """
    fused = 0
    for node in list(graph.nodes):
        factor = _factor(node)
        if factor is None:
            continue
        product = _behind_views(node.args[0])
        if product is not None:
            _scale(product, factor)
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            fused += 1
        elif products := _products(node):
            for one in products:
                _scale(one, factor)
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            fused += len(products)
    return fused


def _factor(node: fx.Node) -> float | None:
    """The number that a float32 tensor is multiplied with; None if `node` is something else."""
    if node.op != "call_function" or node.target not in (aten.mul.Tensor, aten.div.Tensor) or node.kwargs or len(node.args) != 2:
        return None
    tensor, number = node.args
    if not isinstance(tensor, fx.Node) or isinstance(number, bool) or not isinstance(number, (int, float)) or number == 0:
        return None
    fakes = (tensor.meta.get("val"), node.meta.get("val"))
    if any(not isinstance(fake, torch.Tensor) or fake.dtype != torch.float32 for fake in fakes):
        return None
    factor = float(number) if node.target is aten.mul.Tensor else 1 / number
    # Where it is no ordinary number in float32, the order of roundings would show.
    return factor if 1e-30 < abs(factor) < 1e30 else None


def _behind_views(node: Any) -> fx.Node | None:
    """The product that `node` is a view of, if nothing else reads it."""
    while isinstance(node, fx.Node) and node.target in VIEWS and len(node.users) == 1:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and _is_product(node) and len(node.users) == 1 else None


def _products(node: fx.Node) -> list[fx.Node]:
    """The products that read `node`, through views; empty if anything else reads it."""
    found = []
    for user in node.users:
        if user.target in VIEWS or _swaps(user):
            below = _products(user)
            if not below:
                return []
            found += below
        elif _is_product(user) and user.args.count(node) == 1:
            found.append(user)
        else:
            return []
    return found


def _swaps(node: fx.Node) -> bool:
    return node.target in (aten.transpose.int, aten.permute.default)


def _is_product(node: fx.Node) -> bool:
    return node.target in (aten.bmm.default, SCALED_BMM)


def _scale(product: fx.Node, factor: float) -> None:
    left, right, *before = product.args
    product.target, product.args = SCALED_BMM, (left, right, factor * (before[0] if before else 1.0))  # type: ignore[operator]
