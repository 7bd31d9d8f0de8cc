"""Gradients of an embedding that are added to another gradient of its weight are added row by row, where they belong.

A language model whose last product has the embedding's weight (GPT-2, BERT, T5) sums the product's gradient of it and the embedding's, which is zero
but for the rows of a batch: zeros as large as the weight, a copy of them with the rows, and a sum. ScatterND into the product's gradient is one copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of, call_beside
from ort_backend.lowering.symbolic import have_same_sizes
from ort_backend.target import OrtTarget

aten = torch.ops.aten

_EMBEDDING_BACKWARD = aten.embedding_dense_backward.default


def add_to_tied_gradients(graph: fx.Graph, target: OrtTarget) -> int:
    """Rewrites, in place, on the CPU, sums of an embedding's gradient and another tensor of its shape.

    Not in half precision, in which ScatterND has no kernel there: the whole tensor would be cast there and back.

    Returns:
        How many there were.
    """
    if target.device_type != "cpu":
        return 0
    added = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if (found := _summands(node)) is None:
            continue
        embedding, other = found
        given = arguments_of(embedding)
        rows, indices, padding = given["grad_output"], given["indices"], given["padding_idx"]
        with graph.inserting_before(node):
            if padding >= 0:
                is_padding = call_beside(graph, node, aten.unsqueeze.default, call_beside(graph, node, aten.eq.Scalar, indices, padding), -1)
                rows = call_beside(graph, node, aten.masked_fill.Scalar, rows, is_padding, 0.0)
            total = call_beside(graph, node, aten.index_put.default, other, [indices], rows, True)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        graph.erase_node(embedding)
        added += 1
    return added


def _summands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The embedding's gradient, which nothing else reads, and what it is added to."""
    if node.kwargs:
        return None
    for embedding, other in (node.args, node.args[::-1]):
        if _is_gradient_alone(embedding) and isinstance(other, fx.Node) and _alike(embedding, other) and _alike(embedding, node):
            return embedding, other  # type: ignore[return-value]
    return None


def _is_gradient_alone(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target is not _EMBEDDING_BACKWARD or len(node.users) != 1:
        return False
    given = arguments_of(node)
    is_full = node.meta["val"].dtype in (torch.float32, torch.float64)
    return is_full and isinstance(given["padding_idx"], int) and not given["scale_grad_by_freq"]


def _alike(one: Any, other: fx.Node) -> bool:
    one, other = one.meta["val"], other.meta["val"]
    return isinstance(other, torch.Tensor) and one.dtype == other.dtype and have_same_sizes(one.shape, other.shape)
