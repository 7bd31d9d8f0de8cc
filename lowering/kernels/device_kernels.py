"""Which operators of a CUDA graph run by PyTorch's kernel although ONNX Runtime has one.

A node of PyTorch's costs the host some 80 microseconds more than one of ONNX Runtime's (an H100's machine; less where several are one, see
`merged_calls`): a kernel must save that, or take the place of many nodes. As measured on an H200 (onnxruntime-training 1.19.2, torch 2.11; each
operator alone, median GPU time of 12 runs), ONNX Runtime's time over PyTorch's for tensors of 25 million elements, where not said otherwise:

- In bfloat16, in which some operators of ONNX Runtime are many small ones: GELU 6.8 (by tanh 6.0) and its gradient 11 (19), SiLU's gradient 8.1,
  sigmoid 6.6; concatenation 2.1.
- A sum to another dtype, for which the tensor is cast first: 4.6 along columns. Sums along rows 2.7, in bfloat16 6.5; along columns 2.2.
- The gradient of log-softmax 2.1, in bfloat16 4.2; negative log likelihoods, 13 nodes each, 2.3 and 3.1.
- Max pooling 1.7 and its gradient, 13 nodes, 19; ReLU's gradient 1.7; the gradient of an embedding 1.6.
- A product with a bias, which ONNX Runtime spreads over the result by a product of its own, in bfloat16 1.9, in float32 1.1.

Its transposes, casts, batch norms and softmax gradients are the faster ones (0.4 to 0.8), elementwise arithmetic, layer norms, convolutions and
products as fast (0.97 to 1.4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.kernels.logit_gradients import BFLOAT16_LOGIT_GRADIENT
from ort_backend.lowering.kernels.operator_class import normalizes_bfloat16, size_of
from ort_backend.lowering.tracing.recurrence import GRU, GRU_BACKWARD, LSTM, LSTM_BACKWARD, RNN, RNN_BACKWARD

aten = torch.ops.aten

_ALWAYS, _MILLION = 0, 1 << 20

_STEPS: dict[Any, int] = {
    aten.nll_loss_forward.default: _ALWAYS,
    aten.nll_loss_backward.default: _ALWAYS,
    BFLOAT16_LOGIT_GRADIENT: _ALWAYS,
    aten.max_pool2d_with_indices_backward.default: _ALWAYS,
    aten._log_softmax_backward_data.default: _MILLION,
    aten.sigmoid.default: _MILLION,  # four nodes: ONNX Runtime's own loses the tail
    aten.embedding_dense_backward.default: _MILLION,  # many rows for one: of 8192 for two, ScatterND takes 1.5 ms (H100)
    aten.sum.dim_IntList: 8 * _MILLION,
    aten.mean.dim: 8 * _MILLION,
    aten.max_pool2d_with_indices.default: 8 * _MILLION,
    aten.threshold_backward.default: 8 * _MILLION,
}
_IN_BFLOAT16: dict[Any, int] = {
    aten.gelu.default: _ALWAYS, aten.gelu_backward.default: _ALWAYS, aten.silu.default: _ALWAYS, aten.silu_backward.default: _ALWAYS,
    aten.sigmoid.default: _ALWAYS, aten.sum.dim_IntList: 4 * _MILLION, aten.cat.default: _MILLION, aten.addmm.default: 4 * _MILLION,
}  # fmt: skip
# They return new memory, always.
FASTER_ON_DEVICE = frozenset({*_STEPS, *_IN_BFLOAT16})
# Where cuDNN does not take them. Two Scans in one training graph end the process (onnxruntime-training 1.19.2, seen on an H200).
_RECURRENT = {LSTM, LSTM_BACKWARD, GRU, GRU_BACKWARD, RNN, RNN_BACKWARD}


def faster_on_device(node: fx.Node) -> str | None:
    """Why PyTorch's kernel runs a node of a CUDA graph; None where ONNX Runtime's does."""
    if node.target in _RECURRENT:
        return "each step of ONNX Runtime's Scan waits for the host"
    if normalizes_bfloat16(node):
        return "ONNX Runtime has no kernel for it in bfloat16, but for each step of it"
    if (found := size_of(node)) is None:
        return None
    size, dtype = found
    if dtype is torch.bfloat16 and size >= _IN_BFLOAT16.get(node.target, size + 1):
        return "PyTorch's kernel for bfloat16 is faster at this size"
    if size >= _STEPS.get(node.target, size + 1) or (size >= _MILLION and _casts_before_it_sums(node)):
        return "PyTorch's kernel is faster at this size"
    return None


def _casts_before_it_sums(node: fx.Node) -> bool:
    if node.target is not aten.sum.dim_IntList or node.kwargs.get("dtype") is None:
        return False
    return node.all_input_nodes[0].meta["val"].dtype is not node.kwargs["dtype"]
