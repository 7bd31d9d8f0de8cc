"""Matrix products that a library of PyTorch's computes faster than ONNX Runtime become its own, with their transposes and bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import untransposed
from ort_backend.lowering.kernels.dense_products import BFLOAT16_MM, MKL_MM, ONEDNN_MM
from ort_backend.lowering.kernels.kernel_choice import pytorch_may_run
from ort_backend.lowering.kernels.operator_class import product_sizes
from ort_backend.lowering.kernels.product_choice import product_by_mkl, product_by_onednn, product_in_bfloat16
from ort_backend.lowering.symbolic import have_same_sizes
from ort_backend.target import OrtTarget

aten = torch.ops.aten


def choose_products(graph: fx.Graph, target: OrtTarget) -> None:
    """Replaces, in place, `mm` and `addmm` in float32 or bfloat16 where MKL's or oneDNN's product is the faster one.

    Args:
        graph: Of ATen operators with fake tensors in their metadata. Symbolic sizes count as their example.
        target: The ONNX Runtime that the graph is for.
    """
    for node in graph.nodes:
        if operator := faster_product(node, target):
            *bias, left, right = node.args
            (left, trans_left), (right, trans_right) = untransposed(left), untransposed(right)
            node.target, node.args, node.kwargs = operator, (left, right, *(bias or [None]), trans_left, trans_right), {}


def faster_product(node: fx.Node, target: OrtTarget) -> Any:
    """The operator that takes less time for a node than ONNX Runtime's product; None if there is none, or the node is no product."""
    if not pytorch_may_run(target) or (dtype := _product_of(node)) is None:
        return None
    return _faster(node.args[-2], node.args[-1], dtype, target)


def _product_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of left @ right of dense matrices, or of that and a number for each column; None for another node."""
    if node.target not in (aten.mm.default, aten.addmm.default) or any(factor != 1 for factor in node.kwargs.values()):
        return None
    dtype = node.meta["val"].dtype
    if any(fake.dtype != dtype or fake.layout != torch.strided for fake in (one.meta["val"] for one in node.all_input_nodes)):
        return None
    return dtype if node.target is aten.mm.default or have_same_sizes(_shape(node.args[0]), _shape(node)[1:]) else None


def _faster(left: Any, right: Any, dtype: torch.dtype, target: OrtTarget) -> Any:
    """The operator that is faster than ONNX Runtime's product; None if there is none."""
    rows, depth, columns = product_sizes(left, right)
    if dtype is torch.bfloat16:
        return BFLOAT16_MM if target.bfloat16_products and product_in_bfloat16(rows, depth, columns) else None
    if dtype is not torch.float32:
        return None
    transposed = untransposed(left)[1]
    if target.mkl and product_by_mkl(rows, depth, columns, transposed=transposed):
        return MKL_MM
    by_onednn = target.onednn and product_by_onednn(rows, depth, columns, transposed=transposed)
    return (MKL_MM if target.mkl else ONEDNN_MM) if by_onednn else None


def _shape(node: Any) -> torch.Size:
    return node.meta["val"].shape
