"""Classes and sizes of operators: under what the table of measured kernels has them (`kernel_table`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import Convolution, convolution_of
from ort_backend.lowering.symbolic import hint

aten = torch.ops.aten

# Operators along one dimension, and which argument says so.
_ALONG = {
    aten._softmax.default: 1, aten._log_softmax.default: 1, aten._softmax_backward_data.default: 2, aten._log_softmax_backward_data.default: 2,
}  # fmt: skip

# Normalizations over batches, and which argument is the batch.
_OF_BATCHES = {
    aten._native_batch_norm_legit_functional.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten.native_batch_norm_backward.default: 1,
}

# What takes or puts an element for each index, and which argument has these: their number is the size.
_BY_INDEX = {aten.gather.default: 2, aten.scatter_add.default: 2, aten.scatter.src: 2}

# Normalizations of which onnxruntime-training has CUDA kernels in float32 for every step only, none in bfloat16; which argument is normalized.
NORMALIZATIONS = {**_OF_BATCHES, aten._native_batch_norm_legit_no_training.default: 0, aten.native_group_norm_backward.default: 1}

# Elements along a dimension up to which they are few for a softmax.
_FEW = 24

# Elements behind the dimension of a flip that are copied at once, from which on it is no matter of single ones.
_BLOCK = 16

# Exponents of powers that are written as products, roots and quotients.
_PRODUCTS_AND_ROOTS = (0, 1, 2, 3, -1, -2, 0.5, -0.5)

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def operator_class(node: fx.Node) -> str:
    """The operator's name, behind it the class of its shapes where these decide: `aten::convolution.default depthwise 3x3`."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name = str(node.target)
    if (convolution := convolution_of(node)) is not None:
        return f"{name} {_class_of(convolution)}"
    if node.target in (aten.gelu.default, aten.gelu_backward.default):
        return f"{name} {node.kwargs.get('approximate', 'none')}"
    if node.target is aten.pow.Tensor_Scalar:
        return f"{name} {_power(node.args[1])}"
    if node.target in _ALONG:
        dim, shape = node.args[_ALONG[node.target]], node.meta["val"].shape
        return f"{name} rows" if dim in (-1, len(shape) - 1) else f"{name} few" if shape and hint(shape[dim]) < _FEW else name
    if node.target in _OF_BATCHES:
        batch: Any = node.args[_OF_BATCHES[node.target]]
        return f"{name} vectors" if all(size == 1 for size in batch.meta["val"].shape[2:]) else name
    if node.target is aten.flip.default:
        dims: Any = node.args[1]
        shape = node.meta["val"].shape
        behind = math.prod(map(hint, shape[max((dim % len(shape) for dim in dims if shape), default=-1) + 1 :]))
        return f"{name} rows" if behind < _BLOCK else name
    if node.target is aten.index_add.default:
        return f"{name} first" if node.args[1] in (0, -node.meta["val"].dim()) else name
    if node.target is aten.slice_backward.default:
        return f"{name} strided" if node.args[5] != 1 else name
    if node.target is aten.div.Tensor_mode:
        return f"{name} {node.kwargs.get('rounding_mode')}"
    if node.target is aten._to_copy.default:
        return f"{name} to {dtype_name(node.meta['val'].dtype)}"
    return name


def _power(exponent: Any) -> str:
    """An exponent for which there are other operators than ONNX's Pow, as a float; `any` of the others."""
    return str(float(exponent)) if isinstance(exponent, (int, float)) and exponent in _PRODUCTS_AND_ROOTS else "any"


def dense_multiplications(node: fx.Node) -> int | None:
    """Multiplications of a convolution of images without groups, in one of three products if it is a backward; None for any other node."""
    if (one := convolution_of(node)) is None or one.groups != 1:
        return None
    pixels = (one.image if one.transposed else one.result).shape
    return math.prod(hint(size) for size in (pixels[0], *pixels[2:], *one.weight.shape))


def product_sizes(left: Any, right: Any) -> tuple[int, int, int]:
    """Rows, depth and columns of the product of two nodes' matrices; a symbolic size counts as its example."""
    (rows, depth), columns = left.meta["val"].shape, right.meta["val"].shape[1]
    return hint(rows), hint(depth), hint(columns)


def _class_of(one: Convolution) -> str:
    """Such as `dense 3x3 strided by 16`: oneDNN's kernels take 16 channels at once, and have others for a few of them (`thin`)."""
    shape = one.weight.shape
    if one.transposed or len(shape) not in (3, 4) or not all(isinstance(size, int) for size in shape):
        return "other"
    kind = "dense" if one.groups == 1 else "depthwise" if shape[1] == 1 and one.groups == shape[0] else "grouped"
    strided = "" if all(step == 1 for step in one.stride) else " strided"
    channels = "" if kind != "dense" else " thin" if min(shape[:2]) < 16 else " by 16" if shape[0] % 16 == shape[1] % 16 == 0 else ""
    # ONNX Runtime's time over oneDNN's: 1.2 to 2.2 for 7 x 7, 1.1 to 2.2 for 9 x 9, 1.6 to 2.0 for 11 x 11 (gradients last)
    large = kind == "dense" and not strided and len(shape) == 4 and shape[2] == shape[3] > 7
    return f"{kind} {'7x7' if large else _measured_size(kind, *shape[2:])}{strided}{channels}"


def _measured_size(kind: str, *sizes: int) -> str:
    """The size of a filter, or that of a measured one that stands for it: in one dimension, and where each channel has its own."""
    if len(sizes) == 1 and sizes[0] > 1:
        return "3" if sizes[0] < 5 else "31" if kind == "depthwise" and sizes[0] > 15 else "9"
    if kind == "depthwise" and len(sizes) == 2 and sizes[0] == sizes[1] > 3:
        return "3x3" if sizes[0] < 7 else "7x7"
    return "x".join(map(str, sizes))


def table_key(node: fx.Node, dtype: torch.dtype) -> str:
    """Under which the table has an operator: its class, and behind it another dtype than float32."""
    return class_key(operator_class(node), dtype)


def class_key(name: str, dtype: torch.dtype) -> str:
    """The key of a class of operators in the table."""
    return name + ("" if dtype is torch.float32 else f" in {dtype_name(dtype)}")


def dtype_name(dtype: torch.dtype) -> str:
    """Such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def size_of(node: fx.Node) -> tuple[int, torch.dtype] | None:
    """Elements of the largest tensor among the node's inputs and results, and the dtype of the large ones among its floating point inputs.

    Small ones may have another dtype, as the parameters of a normalization under autocast. A node without any large ones counts as one of float32.
    What takes an element for each index counts these, and the dtype of all. None where a size is unknown, and for dtypes not in the table.
    """
    if node.target in _BY_INDEX:
        source, indices = (node.args[i].meta["val"] for i in (0, _BY_INDEX[node.target]))  # type: ignore[union-attr]
        count = elements_of(indices)
        return None if count is None or source.dtype not in _DTYPES else (count, source.dtype)
    leaves = torch.utils._pytree.tree_leaves([one.meta.get("val") for one in (*node.all_input_nodes, node)])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sizes = [elements_of(tensor) for tensor in tensors]
    if not sizes or None in sizes or any(tensor.is_complex() for tensor in tensors):
        return None
    largest = max(size for size in sizes if size is not None)
    given = [one.meta["val"] for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    dtypes = {one.dtype for one in given if one.is_floating_point() and 16 * (elements_of(one) or 0) >= largest}
    dtype = dtypes.pop() if dtypes else torch.float32
    return None if dtypes or dtype not in _DTYPES else (largest, dtype)


def elements_of(tensor: torch.Tensor) -> int | None:
    """Elements of a tensor, of the example where its sizes are symbolic; None where they follow from values."""
    hints = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
    return None if None in hints else math.prod(hints)


def normalizes_bfloat16(node: fx.Node) -> bool:
    """Whether a node is a normalization of a tensor in bfloat16, on a GPU, that ONNX Runtime would write as ten kernels between casts."""
    if node.target not in NORMALIZATIONS:
        return False
    tensor: Any = node.args[NORMALIZATIONS[node.target]]
    return tensor.meta["val"].dtype is torch.bfloat16
