"""Sums of negative zeros, where their sign shows: as in PyTorch, whose sums begin with 0.

The sum of negative zeros is 0 to PyTorch, and -0 to ONNX Runtime's ReduceSum, ReduceMean and CumSum (1.19.2 and 1.32.0 alike). `atan2(0, -0)` is
pi: it would be the angle between a direction and the way from a point to itself.
"""

from __future__ import annotations

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import call_beside

aten = torch.ops.aten

# Operators that tell one zero from the other.
_TELLING = {aten.atan2.default, aten.copysign.Tensor, aten.signbit.default}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default}
# What hands numbers on as they are, from their first argument.
_VIEWS = {
    aten.alias.default, aten.clone.default, aten.detach.default, aten.expand.default, aten.permute.default, aten.select.int, aten.slice.Tensor,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.view.default,
    aten._unsafe_view.default,
}  # fmt: skip


def settle_zeros(graph: fx.Graph) -> int:
    """Makes, in place, positive zeros of those among sums that an operator reads which tells them apart.

    Returns:
        How many sums.
    """
    settled: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in _TELLING:
            for argument in list(node.all_input_nodes):
                if argument not in settled and _is_sum(argument):
                    settled[argument] = _without_sign(graph, argument)
                if argument in settled:
                    node.replace_input_with(argument, settled[argument])
    return len(settled)


def _is_sum(node: fx.Node) -> bool:
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node.target in _SUMS and node.meta["val"].is_floating_point()


def _without_sign(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A sum with 0, which ONNX Runtime's optimiser would drop."""
    with graph.inserting_after(node):
        is_zero = call_beside(graph, node, aten.eq.Scalar, node, 0)
    with graph.inserting_after(is_zero):
        return call_beside(graph, node, aten.masked_fill.Scalar, node, is_zero, 0.0)
