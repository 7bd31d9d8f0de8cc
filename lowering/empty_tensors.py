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


def not_for_empty(node: fx.Node, written: Iterable[ir.Node]) -> str | None:
    """The kind of ONNX node among those `written` for `node` that may not see an empty tensor, where one of the node's may be; else None."""
    for new in written:
        dims = _REFUSED.get(new.op_type)
        if dims is not None and any(may_be_zero(size) for fake in _tensors(node) for size in fake.shape[dims]):
            return new.op_type
    return None


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    fakes = [source.meta.get("val") for source in node.all_input_nodes]
    return [fake for fake in fakes if isinstance(fake, torch.Tensor)]
