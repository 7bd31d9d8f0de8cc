"""What ONNX Runtime has operators to write with, but no kernel as fast as PyTorch's: where none of PyTorch's runs inside a session."""

from __future__ import annotations

import math

import torch
from torch import fx

from ort_backend.lowering import symbolic
from ort_backend.lowering.fx_nodes import attribute, convolution_of
from ort_backend.lowering.kernels.cudnn import CUDNN_LAYER, CUDNN_LAYER_BACKWARD
from ort_backend.lowering.kernels.kernel_choice import (
    faster_in_pytorch,
    is_volume_convolution,
    selects_any,
    slow_as_products,
    slow_in_steps,
    slow_kernels_may_go,
)
from ort_backend.lowering.kernels.onednn import ONEDNN_LSTM, ONEDNN_LSTM_BACKWARD
from ort_backend.lowering.kernels.part_writes import WRITE_PARTS
from ort_backend.lowering.kernels.session_choice import far_faster_in_pytorch
from ort_backend.lowering.ops.convolution import is_pointwise
from ort_backend.target import OrtTarget

aten = torch.ops.aten

# Multiplications up to which plain ONNX operators compute the backward of a dense convolution faster than PyTorch's kernel (`benchmarks/regions.py`).
_SMALL_CONVOLUTION = 1_000_000


def is_slow(node: fx.Node, target: OrtTarget) -> bool:
    """Whether ONNX Runtime has operators to write a node with, but no kernel: a convolution's backward, a long Fourier transform, what takes many
    steps; or one that takes others of equal elements than PyTorch's.

    Steps of small models with convolutions whose backward ran on ONNX Runtime took 1.2 (3 x 3, dense) to 2.4 (grouped) of eager's time, with
    PyTorch's 1.0 to 1.2.
    """
    if target.kernels == "onnxruntime":
        return False
    if node.target in (ONEDNN_LSTM, ONEDNN_LSTM_BACKWARD, CUDNN_LAYER, CUDNN_LAYER_BACKWARD, WRITE_PARTS):
        return True
    if node.target is aten.convolution_backward.default:
        return "com.microsoft::ConvGrad" not in target.contrib_ops and not _is_small_convolution(node) and not _is_pointwise_convolution(node)
    if far_faster_in_pytorch(node, target) or selects_any(node, target):
        return True
    return slow_in_steps(node, target) or slow_as_products(node, target) or (slow_kernels_may_go(target) and is_volume_convolution(node))


def has_slow_body(node: fx.Node, target: OrtTarget) -> bool:
    """Whether a node has bodies with something that `is_slow` in one, or a convolution that PyTorch's kernel would run outside of one.

    Fewer dispatches at each step of a loop gain more than other kernels lose: steps of multilayer perceptrons, attention, state spaces took 0.6 to
    0.9 of the time of an eager loop as Scans and 1.9 to 3.1 by PyTorch, but those of 3 x 3 convolutions of 64 channels (8 images of 16 x 16) 1.56
    and 1.2.
    """
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    bodies = [attribute(one) for one in node.args if isinstance(one, fx.Node) and one.op == "get_attr"]
    inside = (one for body in bodies if isinstance(body, fx.GraphModule) for one in body.graph.nodes)
    return any(_is_slow_inside(one, target) or has_slow_body(one, target) for one in inside)


def _is_slow_inside(node: fx.Node, target: OrtTarget) -> bool:
    return is_slow(node, target) or (convolution_of(node) is not None and faster_in_pytorch(node, target) is not None)


def _is_small_convolution(node: fx.Node) -> bool:
    one = convolution_of(node)
    if one is None or one.groups != 1 or one.weight.dim() > 4:
        return False
    return math.prod(map(symbolic.hint, (*one.result.shape, *one.weight.shape[1:]))) < _SMALL_CONVOLUTION


def _is_pointwise_convolution(node: fx.Node) -> bool:
    one = convolution_of(node)
    if one is None or one.weight.dtype is not torch.float32 or one.transposed:
        return False
    sizes = one.weight.shape[2:]
    return all(isinstance(size, int) for size in sizes) and is_pointwise(sizes, one.stride, one.padding, one.groups)
