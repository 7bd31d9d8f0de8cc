"""The backward of a cross entropy of logits as one operator, which writes one tensor of the logits' size and no other.

Autograd writes it as two: the likelihood's gradient, which is zero but for one entry a row, and the gradient of the logarithm of softmax, which sums
these zeros. Run one by one they keep two further tensors of that size, at the place where a language model's step needs the most memory.
(ONNX Runtime's SoftmaxCrossEntropyLossInternalGrad takes four times as long: 6.1 ms against 1.5 for 256 x 8192.)
"""

from __future__ import annotations

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import source_of
from ort_backend.lowering.ops.loss import CROSS_ENTROPY_BACKWARD

aten = torch.ops.aten

_LIKELIHOODS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}


def fuse_cross_entropy(graph: fx.Graph) -> int:
    """Replaces, in place, each gradient of a negative log likelihood that only a gradient of log-softmax reads, together with that.

    Returns:
        How many pairs there were.
    """
    fused = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten._log_softmax_backward_data.default:
            continue
        likelihood, output, dim, dtype = node.args
        if not isinstance(likelihood, fx.Node) or likelihood.target not in _LIKELIHOODS or set(likelihood.users) != {node}:
            continue
        rank = output.meta["val"].dim()
        axis = 1 if rank > 1 else 0
        if source_of(likelihood.args[1]) is not source_of(output) or dim % max(rank, 1) != axis or dtype != output.meta["val"].dtype:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(CROSS_ENTROPY_BACKWARD, likelihood.args)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        graph.erase_node(likelihood)
        fused += 1
    return fused
