"""What is worth a call of PyTorch's between two sessions, where none runs inside of one, as with the plain onnxruntime.

That is less than what PyTorch's kernels are faster at (`kernel_choice`).
"""

from __future__ import annotations

import math

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of, convolution_of
from ort_backend.lowering.kernels import bag_choice, dense_convolutions, depthwise, float64_kernels, intel_kernels, selections, tiny_products
from ort_backend.lowering.kernels.attention_choice import ATTENTION, ATTENTION_BACKWARD, long_attention
from ort_backend.lowering.kernels.kernel_choice import finds_positions, measured_ratio, ratio_of, slow_kernels_may_go
from ort_backend.lowering.kernels.operator_class import operator_class, product_sizes, size_of, table_key
from ort_backend.lowering.kernels.product_choice import product_in_bfloat16
from ort_backend.lowering.passes.selected_gradients import SELECTS
from ort_backend.lowering.symbolic import hint
from ort_backend.target import OrtTarget

aten = torch.ops.aten

# Microseconds that a node of PyTorch's costs between two sessions, with the session behind it.
_SESSIONS = 60.0
_MULTIPLICATION = 1.5e-5  # by oneDNN
_ELEMENT = 1.2e-4  # of a pointwise kernel of PyTorch's, at the least

# Elements from which on a selection by bits is worth two sessions: ONNX Runtime takes at least 0.3 ms of them, and 2 by a mask that follows from
# values.
_LARGE_MASK = 262144

# What ONNX Runtime computes one number after the other in version 1.32.0 as well: 3 (`digamma`) to 49 (`copysign`) times PyTorch's time at 262,144
# elements, and worth two more sessions, of some 30 us each, from `_FAR_LARGER` on. So are normalizations without kernels of their own: steps of a
# U-Net with groups took 0.92 of their time, of a ViT, a ConvNeXt and GPTs 0.98 to 0.99, of a BERT 1.01. Powers take 1.6 times as long,
# 0.4 ms of 262,144 elements; binary cross entropies 1.9, 0.6 ms.
_FAR_FASTER = {
    aten.native_layer_norm_backward.default, aten.native_group_norm.default, aten.native_group_norm_backward.default,
    aten.tan.default, aten.sinh.default, aten.cosh.default, aten.atanh.default, aten.atan2.default, aten.exp2.default, aten.log1p.default,
    aten.erfinv.default, aten.lgamma.default, aten.digamma.default, aten.logaddexp.default, aten.copysign.Tensor, aten.cumsum.default,
    aten.cumprod.default, aten.fmod.Tensor, aten.fmod.Scalar, aten.remainder.Tensor, aten.remainder.Scalar, aten.div.Tensor_mode,
    aten.pow.Tensor_Scalar, aten.binary_cross_entropy_with_logits.default,
    aten.hypot.default, aten.lerp.Tensor, aten.floor_divide.default,
}  # fmt: skip
_FAR_LARGER = 65536
# What is worth two sessions if it saves as long, beside operators with the tag of pointwise functions: their gradients, and what moves numbers.
_LIKE_POINTWISE = {
    aten.hardswish.default, aten.hardswish_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
    aten.softplus_backward.default, aten.hardsigmoid_backward.default, aten.hardtanh_backward.default, aten.hardshrink_backward.default,
    aten.softshrink_backward.default, aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default, aten.huber_loss.default,
    aten.huber_loss_backward.default, aten.glu.default, aten.glu_backward.default, aten.gather.default, aten.scatter.src,
    aten.scatter_add.default, aten.flip.default, aten.roll.default, aten.max.dim, aten.min.dim, aten.amax.default, aten.amin.default,
}  # fmt: skip
_FARTHEST, _LARGER = 10, 16384  # where ONNX Runtime takes so many times as long, it takes 80 us or more longer from so many elements on


def far_faster_in_pytorch(node: fx.Node, target: OrtTarget) -> bool:
    """Whether a kernel of PyTorch's saves more than the sessions before and behind it cost, where none runs inside a session."""
    if not slow_kernels_may_go(target):
        return False
    if target.mkl and intel_kernels.far_faster(node):
        return True
    if tiny_products.is_faster_in_pytorch(node, _SESSIONS) or bag_choice.is_faster_in_pytorch(node, _SESSIONS):
        return True
    if node.target in (ATTENTION, ATTENTION_BACKWARD):
        return _is_far_faster_attention(node, target)
    if selections.is_faster_in_pytorch(node, _LARGE_MASK):
        return True
    if (found := size_of(node)) is not None and found[1] is torch.float64 and float64_kernels.far_faster(node, found[0]):
        return True
    if found is not None and found[1] not in (torch.float32, torch.float64):
        return _far_faster_in_half(node, *found, target)
    if node.target is aten.convolution.default:
        return target.onednn and _is_far_faster_convolution(node, found)
    if finds_positions(node):
        return True
    if found is not None and _saves_sessions(node, *found):
        return True
    if node.target not in _FAR_FASTER and not node.meta.get(SELECTS):
        return False
    if node.target is aten.pow.Tensor_Scalar and not operator_class(node).endswith(" any"):
        return False
    if node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") != "floor":  # others are quotients, rounded at once
        return False
    if found is None:
        return False
    size, dtype = found
    return size >= (_LARGER if (ratio_of(table_key(node, dtype), size) or 0) >= _FARTHEST else _FAR_LARGER)


def _saves_sessions(node: fx.Node, size: int, dtype: torch.dtype) -> bool:
    """Whether a kernel that the table has for float32 saves more than two sessions cost, if it does nothing but read and write memory."""
    if dtype is not torch.float32 or not isinstance(node.target, torch._ops.OpOverload) or node.target is aten._to_copy.default:
        return False
    if torch.Tag.pointwise not in node.target.tags and node.target not in _LIKE_POINTWISE:
        return False
    ratio = ratio_of(table_key(node, dtype), size)
    return ratio is not None and (ratio - 1) * size * _ELEMENT > 2 * _SESSIONS


def _is_far_faster_attention(node: fx.Node, target: OrtTarget) -> bool:
    """Whether PyTorch's fused kernels run attention where they run it inside a session, too, if it is in float32 and not causal.

    A step of three layers with 8 heads took so, of its time in one session, 16 wide at 64, 128, 192 and 256 tokens 1.08, 0.98, 0.87, 0.79; 32 wide at
    128, 192, 256, 384 1.03, 0.96, 0.88, 0.89; 48 wide at 256 and 384 0.96 and 0.93; 64 wide at 768 and 1024 0.99 and 0.93; causal 1.01 to 1.08, but
    for 0.95 to 0.97 at 192 and 256 tokens 16 wide (onnxruntime 1.32.0; AMD EPYC of family 25, model 17).
    """
    given = arguments_of(node)
    is_for_them = given["query"].meta["val"].dtype is torch.float32 and not given["is_causal"]
    return is_for_them and long_attention(node, target) is not None


def _is_far_faster_convolution(node: fx.Node, found: tuple[int, torch.dtype] | None) -> bool:
    if (dense := dense_convolutions.is_faster_in_pytorch(node, _SESSIONS)) is not None:
        return dense
    if depthwise.is_faster_in_pytorch(node, _SESSIONS):
        return True
    one = convolution_of(node)
    if one is None or one.transposed or found is None or found[1] is not torch.float32:
        return False
    ratio = ratio_of(table_key(node, found[1]), found[0])
    multiplications = math.prod(map(hint, (*one.result.shape, *one.weight.shape[1:])))
    return ratio is not None and (ratio - 1) * multiplications * _MULTIPLICATION > _SESSIONS


def _far_faster_in_half(node: fx.Node, size: int, dtype: torch.dtype, target: OrtTarget) -> bool:
    if node.target in (aten.mm.default, aten.addmm.default):
        return dtype is torch.bfloat16 and target.bfloat16_products and product_in_bfloat16(*product_sizes(*node.args[-2:]))
    return size >= _FAR_LARGER and (bool(node.meta.get(SELECTS)) or measured_ratio(node, size, dtype, target) is not None)
