"""Kernels of ONNX Runtime that are not for tensors without elements, such as the features of no detection."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

# A division by zero ends the process (1.19.2): of these where the batch is empty, of the others where anything is.
_OF_A_BATCH = {"Conv", "ConvTranspose", "ConvGrad"}
_OF_ANYTHING = {"TopK"}
# Gradients of pooling: what is reshaped before it is scattered has sizes that do not follow from the elements.
_OF_KNOWN_SIZE = {"ScatterElements"}


def not_for_empty(node: fx.Node, written: Iterable[ir.Node]) -> str | None:
    """The kind of ONNX node among those `written` for `node` that may not see an empty tensor, where one of the node's may be; else None."""
    kinds = {new.op_type for new in written}
    for refused, dims in ((_OF_A_BATCH, slice(0, 1)), (_OF_ANYTHING, slice(None))):
        if not kinds.isdisjoint(refused) and any(not statically_known_true(size > 0) for fake in _tensors(node) for size in fake.shape[dims]):
            return min(kinds & refused)
    if not kinds.isdisjoint(_OF_KNOWN_SIZE) and any(isinstance(size, int) and size == 0 for fake in _tensors(node) for size in fake.shape):
        return min(kinds & _OF_KNOWN_SIZE)
    return None


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    fakes = [source.meta.get("val") for source in node.all_input_nodes]
    return [fake for fake in fakes if isinstance(fake, torch.Tensor)]
