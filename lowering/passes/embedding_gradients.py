"""Gradients of an embedding, which are zero but for the rows of a batch, are added row by row, where they belong.

A language model whose last product has the embedding's weight (GPT-2, BERT, T5) sums the product's gradient of it and the embedding's: zeros as large
as the weight, a copy of them with the rows, and a sum. ScatterND into the product's gradient is one copy. Where the sum is a result of the graph, or
an embedding's gradient alone is, PyTorch adds the rows without any (`row_sums`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import REFERENCES, VIEWS, arguments_of, call_beside, is_transpose
from ort_backend.lowering.kernels.kernel_choice import slow_kernels_may_go
from ort_backend.lowering.kernels.row_sums import ADD_ROWS, ZERO_TABLE
from ort_backend.lowering.ops.matmul import TALL_MM
from ort_backend.lowering.symbolic import have_same_sizes, hint
from ort_backend.target import OrtTarget

aten = torch.ops.aten

_EMBEDDING_BACKWARD = aten.embedding_dense_backward.default
# What makes a tensor in memory of its own, whoever runs it.
_MAKERS = {aten.mm.default, aten.addmm.default, aten.add.Tensor, TALL_MM}
# Elements of a weight from which on a copy costs more than a call of PyTorch's and two more results of a session.
# In place 32 rows took 12 microseconds more of 131,072 elements, 16 less of a million.
_LARGE = 1 << 19


def add_rows_in_place(graph: fx.Graph, target: OrtTarget) -> int:
    """Rewrites, in place, on the CPU, gradients of embeddings that are results of the graph, alone or added to another gradient.

    Not in half precision, in which the small gradients of rows would be rounded to the large ones' digits one by one.

    Returns:
        How many results there were.
    """
    if not slow_kernels_may_go(target):
        return 0
    results: Any = graph.output_node().args[0]
    found = 0
    for node in [one for one in results if isinstance(one, fx.Node) and results.count(one) == 1]:
        sums, embeddings, base = _parts(node)
        if not embeddings or hint(node.meta["val"].numel()) < _LARGE or not (base is None or _is_alone(base)):
            continue
        with graph.inserting_before(node):
            if base is None:
                given = arguments_of(embeddings[-1])
                base = call_beside(graph, node, ZERO_TABLE, given["grad_output"], given["num_weights"])
            for embedding in reversed(embeddings):
                base = graph.call_function(ADD_ROWS, (base, *_rows(graph, node, embedding)))
                base.meta = dict(node.meta)
        node.replace_all_uses_with(base)
        for spare in [*sums, *embeddings]:
            graph.erase_node(spare)
        found += 1
    return found


def _parts(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node], fx.Node | None]:
    """A result as the sums that it was made by, the last one first, the embeddings' gradients in them, and what else; nothing else reads those."""
    sums: list[fx.Node] = []
    embeddings: list[fx.Node] = []
    while len(node.users) == 1:
        if _is_gradient_alone(node):
            return sums, [*embeddings, node], None
        if node.target is not aten.add.Tensor or (summands := _summands(node)) is None:
            return sums, embeddings, node
        sums.append(node)
        embeddings.append(summands[0])
        node = summands[1]
    return sums, [], None


def _is_alone(node: fx.Node) -> bool:
    """Whether a node is computed, in memory of its own that no other node reads."""
    while len(node.users) == 1:
        if node.target in _MAKERS or _is_cast(node):
            return True
        if not (node.target in VIEWS or node.target in REFERENCES or is_transpose(node)):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return False


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and node.meta["val"].dtype != node.args[0].meta["val"].dtype  # type: ignore[union-attr]


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
        with graph.inserting_before(node):
            indices, rows = _rows(graph, node, embedding)
            total = call_beside(graph, node, aten.index_put.default, other, [indices], rows, True)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        graph.erase_node(embedding)
        added += 1
    return added


def _rows(graph: fx.Graph, node: fx.Node, embedding: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The indices of an embedding, and the gradient's row for each, zeros for the padding's; beside `node`."""
    given = arguments_of(embedding)
    rows, indices, padding = given["grad_output"], given["indices"], given["padding_idx"]
    if padding >= 0:
        is_padding = call_beside(graph, node, aten.unsqueeze.default, call_beside(graph, node, aten.eq.Scalar, indices, padding), -1)
        rows = call_beside(graph, node, aten.masked_fill.Scalar, rows, is_padding, 0.0)
    return indices, rows


def _summands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The embedding's gradient, which nothing else reads, and what it is added to."""
    if node.kwargs or node.args[0] is node.args[1]:  # the same words looked up twice: to the partitioner one node
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
