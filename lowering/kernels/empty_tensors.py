"""Kernels of ONNX Runtime that are not for tensors without elements, such as the features of no detection."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.lowering.symbolic import may_be_zero

# Kernels that go wrong where nothing is, and the dimensions that count. ConvGrad and TopK divide by a number of elements, which ends the
# process (1.19.2). Conv, as the gradient of a weight, does not write a sum over an empty batch (1.19.2 and 1.31.1).
_REFUSED = {"Conv": slice(0, 1), "ConvGrad": slice(0, 1), "TopK": slice(None)}
# On CUDA, reductions of nothing are errors, and cuDNN takes none of its tensors (1.19.2, seen on an H200 and an H100).
_WHOLE = slice(None)
_REFUSED_ON_DEVICE = {
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ArgMax", "ArgMin"), _WHOLE),
    **dict.fromkeys(("MaxPool", "AveragePool", "ConvTranspose", "BatchNormalization", "BatchNormInternal", "BatchNormalizationGrad"), _WHOLE),
    **dict.fromkeys(("Conv", "ConvGrad", "TopK", "Softmax", "LogSoftmax", "SoftmaxGrad_13"), _WHOLE),
    # These start as many blocks as there are rows or elements, which CUDA refuses of none.
    **dict.fromkeys(("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad", "DropoutGrad"), _WHOLE),
}


def not_for_empty(node: fx.Node, written: Iterable[ir.Node], *, on_device: bool = False) -> str | None:
    """The kind of ONNX node among those `written` for `node` that may not see an empty tensor, where one of the node's may be; else None."""
    refused = _REFUSED_ON_DEVICE if on_device else _REFUSED
    for new in written:
        dims = refused.get(new.op_type)
        if dims is not None and any(may_be_zero(size) for fake in _tensors(node) for size in fake.shape[dims]):
            return new.op_type
    return None


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    fakes = [source.meta.get("val") for source in node.all_input_nodes]
    return [fake for fake in fakes if isinstance(fake, torch.Tensor)]
