"""What PyTorch is far faster at than an ONNX Runtime without `PythonOp`, in float64 alone: `kernel_table` says what is inside a session.

ONNX Runtime computes in float64 one number after the other what it has kernels with vectors for in float32. It takes 0.9 to 2.8 ms longer than
PyTorch for 262,144 numbers (onnxruntime 1.32.0, AMD EPYC of family 25, model 17), and a step of layers with SiLU took 2.26 of eager's time, 0.98 with
PyTorch's kernels. Its `tanh` is as fast as PyTorch's there; in 1.19.2 it takes three times as long.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_FAR_FASTER = {
    aten.sigmoid.default, aten.silu.default, aten.silu_backward.default, aten.exp.default, aten.expm1.default, aten.log1p.default,
    aten.softplus.default, aten.softplus_backward.default, aten.elu_backward.default, aten.glu.default, aten._softmax.default,
    aten._log_softmax.default, aten.threshold_backward.default, aten.where.self,
}  # fmt: skip
_LARGE = 65536


def far_faster(node: fx.Node, size: int) -> bool:
    """Whether PyTorch's kernel saves more than the sessions before and behind a node of `size` numbers in float64 cost."""
    return node.target in _FAR_FASTER and size >= _LARGE
