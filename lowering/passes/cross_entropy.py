"""The backward of a cross entropy of logits as one operator, which writes one tensor of the logits' size and no other.

Autograd writes it as two: the likelihood's gradient, which is zero but for one entry a row, and the gradient of the logarithm of softmax, which sums
these zeros. Run one by one they keep two further tensors of that size, at the place where a language model's step needs the most memory.
With smoothed labels there is another between them, which adds the same number to all classes of a row.
(ONNX Runtime's SoftmaxCrossEntropyLossInternalGrad takes four times as long: 6.1 ms against 1.5 for 256 x 8192.)
On a CUDA device a gradient that is wanted in bfloat16 is made in it (`logit_gradients`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import source_of
from ort_backend.lowering.kernels.logit_gradients import BFLOAT16_LOGIT_GRADIENT
from ort_backend.lowering.ops.loss import CROSS_ENTROPY_BACKWARD

aten = torch.ops.aten

_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_LIKELIHOODS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}


def fuse_cross_entropy(graph: fx.Graph, *, half: bool = True) -> int:
    """Replaces, in place, each gradient of a negative log likelihood that only a gradient of log-softmax reads, together with that.

    Args:
        graph: A graph with a backward.
        half: Whether also in half precision, in which PyTorch's two kernels take half of the time of ONNX Runtime's between casts.

    Returns:
        How many pairs there were.
    """
    fused = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten._log_softmax_backward_data.default:
            continue
        gradient, output, dim, dtype = node.args
        rank = output.meta["val"].dim()
        axis = 1 if rank > 1 else 0
        likelihood, uniform = _parts(gradient, axis)
        if likelihood.target not in _LIKELIHOODS or len(likelihood.users) != 1 or set(gradient.users) != {node}:
            continue
        if not half and output.meta["val"].dtype in (torch.float16, torch.bfloat16):
            continue
        if source_of(likelihood.args[1]) is not source_of(output) or dim % max(rank, 1) != axis:
            continue
        narrow = _narrowed(node) if uniform is None else None
        if narrow is None and dtype != output.meta["val"].dtype:
            continue
        with graph.inserting_before(node):
            if narrow is None:
                made = graph.call_function(CROSS_ENTROPY_BACKWARD, likelihood.args if uniform is None else (*likelihood.args, uniform))
            else:
                made = graph.call_function(BFLOAT16_LOGIT_GRADIENT, likelihood.args)
        made.meta = dict(node.meta)
        if narrow is not None:
            made.meta["val"] = node.meta["val"].to(torch.bfloat16)
            _narrow(node, narrow)
        node.replace_all_uses_with(made)
        for one in dict.fromkeys((node, gradient, likelihood)):
            graph.erase_node(one)
        fused += 1
    return fused


def _narrowed(node: fx.Node) -> fx.Node | None:
    """The gradient in bfloat16 of float32 rows on a CUDA device: the node itself, or a cast, beside which nothing reads it; None: there is none."""
    output: Any = node.args[1]
    value = output.meta["val"]
    if value.dim() != 2 or value.dtype is not torch.float32 or value.device.type != "cuda":
        return None
    last = node
    while last.meta["val"].dtype is torch.float32 and len(last.users) == 1 and (last is node or last.target in _RESHAPES):
        last = next(iter(last.users))
    is_cast = last.target in _CASTS or last is node
    return last if is_cast and last.meta["val"].dtype is torch.bfloat16 else None


def _narrow(node: fx.Node, cast: fx.Node) -> None:
    """Takes the cast away, and lets what lies between have its dtype."""
    if cast is node:
        return
    source: Any = cast.args[0]
    between = source
    while between is not node:
        between.meta = {**between.meta, "val": between.meta["val"].to(torch.bfloat16)}
        between = between.args[0]
    cast.replace_all_uses_with(source)
    cast.graph.erase_node(cast)


def _parts(gradient: fx.Node, axis: int) -> tuple[fx.Node, fx.Node | None]:
    """The gradient; or of a sum of two, of which one has the same number for all classes, the other one, and that number of each row."""
    if gradient.target is aten.add.Tensor and not gradient.kwargs:
        first, second = gradient.args
        for even, other in ((first, second), (second, first)):
            if isinstance(even, fx.Node) and even.target is aten.expand.default and isinstance(other, fx.Node):
                uniform: Any = even.args[0]
                shape = uniform.meta["val"].shape
                if len(shape) == gradient.meta["val"].dim() and shape[axis] == 1:
                    return other, uniform
    return gradient, None
