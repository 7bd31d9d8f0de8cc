"""What PyTorch is faster at than ONNX Runtime on a processor of Intel's, and not, or less so, on those that `kernel_table` is from.

PyTorch computes 16 numbers at once there, and its products are MKL's. What an ONNX Runtime without `PythonOp` has no kernel for, its operators go
over ten times where one of PyTorch's kernels goes over it once. With what is chosen here to run between its sessions, steps took, of eager's time,
before and after: gpt 1.19 to 1.23 and 1.03 to 1.06, bert 1.16 and 1.06, vit 1.15 and 1.05, gpt-tiny 1.27 and 1.13, resnet50 1.11 and 1.01, mlp 1.04
to 1.12 and 0.98 to 1.06, convnext 0.93 and 0.86, t5 0.94 and 0.96 (onnxruntime 1.32.0; Intel Xeon of family 6, model 207, AVX-512).
"""

from __future__ import annotations

import math

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of, untransposed
from ort_backend.lowering.kernels.attention_choice import ATTENTION, ATTENTION_BACKWARD
from ort_backend.lowering.kernels.operator_class import product_sizes, size_of
from ort_backend.lowering.symbolic import hint

aten = torch.ops.aten

# Inside a session, as in `kernel_table` (onnxruntime-training 1.19.2). Steps of four layers with GELUs by tanh, of 1,048,576 elements, took 1.07 of
# eager's time with ONNX Runtime's gradient, 0.97 with PyTorch's.
FASTER_IN_PYTORCH: dict[str, tuple[tuple[int, int, float], ...]] = {
    "aten.gelu_backward.default tanh": ((131072, 16777216, 2.4),),
    "aten.sin.default": ((65536, 16777216, 2.3),),
}

# Operators that take ONNX Runtime 0.3 (logarithms, max pooling) to 1.1 ms (softplus) longer than PyTorch for 262,144 elements: 3 to 10 times as long.
_SLOW = {
    aten.gelu_backward.default, aten.silu_backward.default, aten.hardswish_backward.default, aten.mish_backward.default, aten.softplus.default,
    aten.softplus_backward.default, aten._softmax_backward_data.default, aten.native_batch_norm_backward.default,
    aten.max_pool2d_with_indices_backward.default, aten.log.default, aten.sin.default, aten.cos.default,
}  # fmt: skip
_LARGE = 65536

# Queries and keys from which on attention is PyTorch's. Inside a session, where ONNX Runtime has
# fused kernels, only a longer one is (`long_attention`).
_LONG = 64

# Multiplications from which on gradients of weights are: MKL's take 0.7 to 0.8 of ONNX Runtime's time, other products 0.8 to 1.1. And nothing else in
# the backward reads them, so that they can wait for the next step in PyTorch.
_MANY = 1e7


def far_faster(node: fx.Node) -> bool:
    """Whether PyTorch's kernel saves more than the sessions before and behind it cost. A symbolic size counts as its example."""
    if node.target in (ATTENTION, ATTENTION_BACKWARD):
        given = arguments_of(node)
        query, key = given["query"].meta["val"], given["key"].meta["val"]
        return query.dtype is torch.float32 and min(hint(query.shape[-2]), hint(key.shape[-2])) >= _LONG
    if node.target is aten.mm.default:
        is_gradient_of_weights = node.meta["val"].dtype is torch.float32 and untransposed(node.args[0])[1]
        return is_gradient_of_weights and math.prod(product_sizes(*node.args)) >= _MANY
    if node.target not in _SLOW or (found := size_of(node)) is None:
        return False
    size, dtype = found
    return dtype is torch.float32 and size >= _LARGE
