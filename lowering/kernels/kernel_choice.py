"""Which kernel runs an operator that both ONNX Runtime and PyTorch have: the faster, as measured.

The table is `kernel_table.FASTER_IN_PYTORCH`, written by `python -m benchmarks.kernel_choice --write`. It holds for the CPU provider and one thread.
An operator is looked up by its name, shape class and dtype, and chosen by its size: the elements of its largest tensor. Small tensors always stay
with ONNX Runtime, where a node costs less than the call into Python. In half precision ONNX Runtime computes between casts to float32, so that
most of PyTorch's kernels are faster from some 65,536 elements on.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import convolution_of
from ort_backend.lowering.kernels import (
    bag_choice,
    channels_last,
    channels_last_pooling,
    cudnn,
    dense_convolutions,
    depthwise,
    fused_attention,
    intel_kernels,
    selections,
    tiny_products,
    zero_scatter,
)
from ort_backend.lowering.kernels.attention_choice import ATTENTION, ATTENTION_BACKWARD, long_attention
from ort_backend.lowering.kernels.dense_products import BFLOAT16_MM, MKL_MM, ONEDNN_MM
from ort_backend.lowering.kernels.device_kernels import faster_on_device
from ort_backend.lowering.kernels.kernel_table import FASTER_IN_PYTORCH
from ort_backend.lowering.kernels.onednn import ONEDNN_LSTM, ONEDNN_LSTM_BACKWARD
from ort_backend.lowering.kernels.operator_class import (
    class_key,
    dense_multiplications,
    dtype_name,
    elements_of,
    size_of,
    table_key,
)
from ort_backend.lowering.kernels.pair_choice import TRANSFORMS, is_large_transform, large_transform, multiplies_pairs
from ort_backend.lowering.kernels.part_writes import WRITE_PARTS
from ort_backend.lowering.kernels.product_choice import product_in_bfloat16
from ort_backend.lowering.kernels.write_back import IMPLEMENTATIONS as WRITES_HERE
from ort_backend.lowering.passes.selected_gradients import SELECTS
from ort_backend.lowering.symbolic import hint
from ort_backend.lowering.tracing.cumulative_products import CUMPROD_BACKWARD
from ort_backend.target import OrtTarget

aten = torch.ops.aten

# What ONNX Runtime computes step by step, or in hundreds of small nodes: from how many elements on PyTorch's kernel is faster, for any dtype.
# ONNX Runtime's time over PyTorch's in a PythonOp (`python -m benchmarks.kernel_choice --only steps`): running extremes of 1024 to a million elements
# 4 to 17 along rows of 256, up to 29 along one row; the gradient of Dirichlet samples 5 to 7; Cholesky factors 0.5 to 1.1 for 4 x 4 to 16 x 16, then
# 1.8 (32 x 32), 3.3 (64 x 64), 5 (128 x 128), triangular systems 0.4 to 0.9, then 1.4, 2.3, 3.6. Medians of
# 2048 elements 1.0 to 1.7, of 8192 2 to 15, of 65,536 3 to 9. Elements of a mask, of which each is put where so many before it are set, 9 to 20 from
# 16,384 on; numbers looked for among 64 bounds 1.9 to 2.5.
IN_STEPS = {
    aten.cummax.default: 0, aten.cummin.default: 0, aten._dirichlet_grad.default: 0, CUMPROD_BACKWARD: 0,
    aten.median.default: 8192, aten.nanmedian.default: 8192, aten.median.dim: 8192, aten.nanmedian.dim: 8192,
    aten.masked_scatter.default: 16384, aten.bucketize.Tensor: 8192, aten.searchsorted.Tensor: 8192,
    aten.linalg_cholesky_ex.default: 1024, aten.linalg_solve_triangular.default: 1024, aten.cholesky_solve.default: 1024,
}  # fmt: skip

# Of these, what ONNX Runtime writes as a few nodes, all of which have kernels for a GPU.
_OF_SEVERAL_NODES = {aten.masked_scatter.default, aten.bucketize.Tensor, aten.searchsorted.Tensor}

# Which of several equal elements they take is not specified (`sort` is stable if told so only), but the gradient goes there, and tokens go to the
# experts that a router takes. PyTorch's kernels take what they take in eager PyTorch; a call costs some 15 us more than a node of ONNX Runtime's.
_SELECTIONS = {aten.topk.default, aten.kthvalue.default, aten.sort.default}

# Channels up to which PyTorch samples an image by a grid faster: ONNX Runtime gathers and scatters a row of channels for each pixel beside a sample,
# and takes as long for 3 channels as for 64. Its time over PyTorch's in a PythonOp, from 4096 elements to a million, for 3, 16, 32 and 64 channels
# (`python -m benchmarks.kernel_choice --only steps`): planes 4 to 10, 2.8 to 3.9, 2.2 to 3.3, 1.4 to 2.0; their gradients 3.7 to 10, 1.2 to 2.2,
# 1.3 to 1.8, 0.5 to 1.9; volumes 2.1 to 3.5, 0.9 to 2.1, 0.8 to 1.7, 0.6 to 2.2; their gradients 2.9 to 3.9, 0.9 to 1.8, 0.7 to 1.5, 0.5 to 2.3.
SAMPLED = {
    aten.grid_sampler_2d.default: math.inf, aten.grid_sampler_2d_backward.default: 32,
    aten.grid_sampler_3d.default: 16, aten.grid_sampler_3d_backward.default: 16,
}  # fmt: skip

# Elements from which on a kernel of PyTorch's in a PythonOp is faster than ONNX Runtime's Where (`kernel_table`).
_LARGE_SELECTION = 16384

# Microseconds that a node of PyTorch's costs inside a session where its Python is in no cache, beyond what it costs where it is.
_NODE = 30.0

# What oneDNN has kernels in bfloat16 for, where the processor has instructions.
_PRODUCTS = {aten.convolution.default, aten.convolution_backward.default, aten.bmm.default}

# Elements up to which ONNX Runtime normalizes layers in float32, whatever the table says: that is of loops, in which Python and the C library's
# heap, where results of kernels without a variant for given memory lie, stay in the processor's caches. Steps of a BERT (196,608 elements), a ViT and
# GPTs took 0.97 to 1.01 of the time with both directions on ONNX Runtime, and 19 MB less at the peak, of 170 (BERT) and 154 (a GPT). Not so on a
# processor of Intel's, where ONNX Runtime's gradient takes 1.1 ms of 262,144 elements and PyTorch's 0.4: there they took 1.02 to 1.04 of the time.
# Of wide rows it normalizes more: beside products of that width steps of GPT-2 small (393,216 elements, rows of 768) and ViT-B (605,184) take 1 %
# longer, and 41 and 73 MB less at the peak, of 2014 and 1338: each of PyTorch's results leaves a hole in that heap. Beyond the caches, at 1.5
# million, ONNX Runtime's gradient takes twice the time for an element.
_NORMALIZED = 262144
_WIDE_NORMALIZED, _WIDE = 655360, 512
_ROWS_OF: dict[Any, int] = {aten.native_layer_norm.default: 1, aten.native_layer_norm_backward.default: 2}  # the argument with a row's shape

# Elements of the largest tensors that were measured, or a little less; what holds for them holds beyond (at twice as many the ratios are the same).
_LARGEST = 15_000_000

# Multiplications from which on oneDNN's dense convolutions in bfloat16, and their gradients, are faster than ONNX Runtime's between casts, whatever
# their shape: 32 shapes of images took 1.1 to 2.9 times oneDNN's time from there on, apart from some gradients of 1 x 1, patches and transposed ones
# (0.85 to 0.9), below 0.1 to 1.4 (AMD EPYC of family 26).
_MANY = 2e7
# Of windows of several pixels and channels: 1.04 to 1.8 of oneDNN's time from there on, 0.56 at 2.4 million; single pixels, and pictures with three
# channels, 0.7 to 0.9 (13 shapes, forward and backward; AMD EPYC of family 25, model 17).
_MANY_OF_WINDOWS, _CHANNELS = 7e6, 8
_ONEDNN_BFLOAT16 = 1.6  # the median

# Channels and elements from which on a max pooling goes to PyTorch for its positions (`faster_calls`): 0.15 to 0.55 of ONNX Runtime's time.
_SIDE_BY_SIDE = 8
_LARGE_POOLING = 65536

# For a GPU. How many rows a group has follows from data, and ONNX Runtime's Split takes sizes from the host: a copy, and a wait, for each product.
_GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"}


def pytorch_may_run(target: OrtTarget) -> bool:
    """Whether a kernel of PyTorch may take the place of one of ONNX Runtime's."""
    return target.whole_graphs and slow_kernels_may_go(target)


def onednn_may_run_layers(target: OrtTarget, *, strict: bool) -> bool:
    """Whether recurrent layers may run by oneDNN's kernels; between sessions (`strict`: which nothing may do) where there is no `PythonOp`."""
    return target.onednn and slow_kernels_may_go(target) and (target.whole_graphs or not strict)


def slow_kernels_may_go(target: OrtTarget) -> bool:
    """Whether PyTorch may run, on the CPU, what ONNX Runtime has slow kernels for: inside a session or between two."""
    return target.device_type == "cpu" and target.kernels != "onnxruntime"


def faster_in_pytorch(node: fx.Node, target: OrtTarget) -> str | None:
    """Why PyTorch's kernel runs this node; None where ONNX Runtime's does.

    Args:
        node: A call of an operator, with fake tensors in its metadata. Symbolic sizes count as their example.
        target: The ONNX Runtime that the graph is for.
    """
    if node.target in (ONEDNN_LSTM, ONEDNN_LSTM_BACKWARD):
        return "oneDNN's kernels, as in eager PyTorch"
    if node.target in cudnn.IMPLEMENTATIONS:
        return "cuDNN's kernels, as in eager PyTorch"
    if node.target is ONEDNN_MM:
        return "oneDNN's product is faster at this size"
    if node.target is MKL_MM:
        return "MKL's product is faster at this size"
    if node.target is zero_scatter.PUT_INTO_ZEROS:
        return zero_scatter.REASON
    if node.target is WRITE_PARTS or node.target in WRITES_HERE:
        return "PyTorch writes to parts of a tensor where they lie"
    if node.target in channels_last.IMPLEMENTATIONS:
        return "oneDNN's kernels take pictures with the channels last as they lie"
    if node.target in channels_last_pooling.IMPLEMENTATIONS:
        return "PyTorch's kernels take pictures with the channels last as they lie"
    if node.target is BFLOAT16_MM or _adds_to_product_in_bfloat16(node, target):
        return "oneDNN's product in bfloat16 is faster than one in float32"
    if not target.whole_graphs or target.kernels == "onnxruntime":
        return None
    if node.target in fused_attention.KERNELS:
        return fused_attention.REASON
    if selects_any(node, target):
        return "PyTorch's kernel takes the same of equal elements as in eager PyTorch"
    if slow_in_steps(node, target):
        return "PyTorch's kernel is faster than steps at this size"
    if target.device_type != "cpu":
        return "the sizes of the groups are on the device" if _is_grouped(node) else faster_on_device(node)
    if target.kernels == "pytorch":
        return "asked for"
    if node.target is aten._to_copy.default:
        return None  # chosen in the finished graph, which has more of them (`casts`)
    if node.target in (ATTENTION, ATTENTION_BACKWARD):
        return long_attention(node, target)
    if node.target in TRANSFORMS:
        return large_transform(node)
    if is_volume_convolution(node):
        return "oneDNN's convolutions of volumes are faster, and ONNX Runtime has no kernel for their gradients"
    if multiplies_pairs(node):
        return "PyTorch's kernel takes pairs of real and imaginary parts as they lie in memory"
    if target.onednn and depthwise.is_faster_in_pytorch(node):
        return "oneDNN's kernels take the channels of all images side by side"
    if target.onednn and (dense := dense_convolutions.is_faster_in_pytorch(node, _NODE)) is not None:
        return "oneDNN's kernels read each filter once for all images" if dense else None
    if tiny_products.is_faster_in_pytorch(node, _NODE):
        return "PyTorch has a loop for products of tiny matrices"
    if finds_positions(node):
        return "PyTorch's kernel for channels side by side is faster at this size"
    if bag_choice.is_faster_in_pytorch(node, _NODE):
        return "PyTorch's kernel reads each row of a bag once"
    if selections.is_faster_in_pytorch(node):
        return "PyTorch selects by the bits of elements, without a branch for each"
    if (found := size_of(node)) is None:
        return None
    size, dtype = found
    if node.meta.get(SELECTS) and size >= _LARGE_SELECTION:
        return "PyTorch's kernel selects zeros, for which ONNX Runtime has Where alone"
    ratio = measured_ratio(node, size, dtype, target)
    return None if ratio is None else f"PyTorch's kernel is {ratio:.1f} times as fast at this size"


def _adds_to_product_in_bfloat16(node: fx.Node, target: OrtTarget) -> bool:
    """Whether a node multiplies in bfloat16, and adds a matrix or has factors, which is no plain product (`passes.products`).

    Of Muon's steps (`torch.optim.Muon`: powers of a matrix) two thirds of the products are such: with ONNX Runtime's they took 3.1 of eager's time.
    """
    if node.target not in (aten.addmm.default, aten.baddbmm.default) or node.meta["val"].dtype is not torch.bfloat16 or not pytorch_may_run(target):
        return False
    left, right = (one.meta["val"].shape for one in node.args[1:3])  # type: ignore[union-attr]
    batch = hint(left[0]) if len(left) == 3 else 1
    return target.bfloat16_products and product_in_bfloat16(batch * hint(left[-2]), hint(left[-1]), hint(right[-1]))


def measured_ratio(node: fx.Node, size: int, dtype: torch.dtype, target: OrtTarget) -> float | None:
    """ONNX Runtime's time over PyTorch's, where the table has PyTorch's kernel as the faster one."""
    if dtype is torch.bfloat16 and node.target in _PRODUCTS and not target.bfloat16_products:
        return None
    if dtype is torch.bfloat16 and (multiplications := dense_multiplications(node)) is not None:
        return _ONEDNN_BFLOAT16 if multiplications >= (_MANY_OF_WINDOWS if _has_wide_windows(node) else _MANY) else None
    if dtype is torch.float32 and not target.mkl and node.target in _ROWS_OF and size <= _normalized(node):
        return None
    key = table_key(node, dtype)
    return ratio_of(key, size, intel_kernels.FASTER_IN_PYTORCH) if target.mkl and key in intel_kernels.FASTER_IN_PYTORCH else ratio_of(key, size)


def _has_wide_windows(node: fx.Node) -> bool:
    """Whether a convolution's windows have several pixels, of several channels."""
    one = convolution_of(node)
    if one is None or one.transposed:
        return False
    _, channels, *window = map(hint, one.weight.shape)
    return channels >= _CHANNELS and math.prod(window) > 1


def _normalized(node: fx.Node) -> int:
    """Up to how many elements ONNX Runtime's kernel is to run a layer normalization, or its gradient."""
    row: Any = node.args[_ROWS_OF[node.target]]
    return _WIDE_NORMALIZED if math.prod(size for size in row if isinstance(size, int)) >= _WIDE else _NORMALIZED


def ratio_of(key: str, size: int, table: dict[str, tuple[tuple[int, int, float], ...]] | None = None) -> float | None:
    """ONNX Runtime's time over PyTorch's for what the table has under `key` at this size; None where PyTorch's kernel is not the faster one."""
    known = (FASTER_IN_PYTORCH if table is None else table).get(key, ())
    return next((ratio for low, high, ratio in known if low <= size and (size <= high or high >= _LARGEST)), None)


def faster_cast(source: torch.dtype, wanted: torch.dtype, size: int) -> float | None:
    """ONNX Runtime's time over PyTorch's for a cast of `size` elements from one dtype to another, where PyTorch's kernel is the faster one."""
    return ratio_of(class_key(f"{aten._to_copy.default} to {dtype_name(wanted)}", source), size)


def selects_any(node: fx.Node, target: OrtTarget) -> bool:
    """Whether which elements a node takes, of equal ones, is its kernel's choice, so that PyTorch's runs it on the CPU, as in eager PyTorch."""
    return node.target in _SELECTIONS and slow_kernels_may_go(target)


def slow_in_steps(node: fx.Node, target: OrtTarget) -> bool:
    """Whether ONNX Runtime would take many steps for what a kernel of PyTorch's does at once, and longer than that.

    On a GPU each step starts several kernels, so that it always would.
    """
    if node.target not in {*IN_STEPS, *SAMPLED} or target.kernels == "onnxruntime":
        return False
    if target.device_type != "cpu":
        return node.target not in _OF_SEVERAL_NODES
    if node.target in SAMPLED:
        return hint(node.args[0].meta["val"].shape[1]) <= SAMPLED[node.target]  # type: ignore[union-attr]
    shapes = [one.meta["val"].shape for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    return max(math.prod(map(hint, shape)) for shape in shapes) >= IN_STEPS[node.target]


def slow_as_products(node: fx.Node, target: OrtTarget) -> bool:
    """Whether a Fourier transform takes ONNX Runtime, which writes it as products with matrices, longer than PyTorch's kernel takes."""
    return slow_kernels_may_go(target) and is_large_transform(node)


def is_volume_convolution(node: fx.Node) -> bool:
    """Whether a node is a convolution in three dimensions, or its backward: up to seven times eager's time in ONNX Runtime's operators."""
    one = convolution_of(node)
    return one is not None and one.weight.dim() == 5


def finds_positions(node: fx.Node) -> bool:
    """Whether a node is a max pooling in float32 whose positions somebody reads: ONNX Runtime's without them is 20 times as fast as with them."""
    if node.target is not aten.max_pool2d_with_indices.default:
        return False
    x = node.all_input_nodes[0].meta["val"]
    is_large = x.dim() == 4 and hint(x.shape[1]) >= _SIDE_BY_SIDE and (elements_of(x) or 0) >= _LARGE_POOLING
    return is_large and x.dtype is torch.float32 and any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)


def _is_grouped(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() in _GROUPED


def lstm_by_onednn(length: int, batch: int, hidden: int, *, trains: bool) -> bool:
    """Whether an LSTM layer runs by oneDNN's kernels inside PythonOps, and not as a Scan.

    oneDNN's products of few rows with a wide matrix are slower than ONNX Runtime's, and two PythonOps cost as much as some steps of a Scan. Time of a
    step as a Scan by that with oneDNN, at 16 steps: 0.8 for a hidden size of 64, of 256 0.5 (one row) and 0.8 (8 rows), of 512 0.3 and 0.9; at 64
    steps and one row: 1.1 for 64, 0.9 for 256, 0.6 for 512; of 8 rows 1.0, 1.2, 1.6 (`python -m benchmarks.recurrent`). With a gradient, at 24 to
    32 steps of 16 to 64 rows: 0.83 to 0.97 for 16 to 128; at 16 and 24 steps of 16 rows 0.84 and 0.89 for 256; of 128 rows 1.0 to 1.1. Without one
    1.0 to 1.2 (AMD EPYC of family 25).

    Args:
        length: Steps; a symbolic number counts as its example, as do the others.
        batch: Rows of a step.
        hidden: Hidden units.
        trains: Whether there is a gradient, in float32.
    """
    if trains and ((length <= 32 and batch <= 64 and hidden <= 128) or (length <= 24 and batch <= 16 and hidden <= 256)):
        return False
    return not ((length <= 16 and batch <= 8) or (length <= 64 and batch == 1 and hidden >= 256))
