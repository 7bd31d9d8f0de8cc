"""Batches of products of tiny matrices, as rotations and cameras are: by PyTorch, whose loop over them costs less than ONNX Runtime's calls.

ONNX Runtime takes 125 to 155 ns for each product, however small it is. PyTorch has a loop of its own for those of less than 400 multiplications:
13 ns for (3 x 3) (3 x 1), 44 for (3 x 3) (3 x 3), 92 for (4 x 4) (4 x 4), 115 for (3 x 3) (3 x 8), 195 for (8 x 1) (1 x 8). A step that turned 40,000
points by as many matrices took 0.29 of its time, one of 4,000 points 0.39, one of 1,000 0.7 (onnxruntime-training 1.19.2, torch 2.13; AMD EPYC of
family 25, model 17).
"""

from __future__ import annotations

import torch
from torch import fx

from ort_backend.lowering.symbolic import hint

aten = torch.ops.aten

_CALL = 0.13  # microseconds of ONNX Runtime's for a product
_STEP = 0.0006  # of PyTorch's for a multiplication, and for a sixth of what a number of the result costs beside those


def is_faster_in_pytorch(node: fx.Node, margin: float) -> bool:
    """Whether a node is a batch of products, in float32 or float64, for which PyTorch takes less time, by more than `margin` microseconds.

    A symbolic size counts as its example.
    """
    if node.target is not aten.bmm.default or node.meta["val"].dtype not in (torch.float32, torch.float64):
        return False
    left, right = (one.meta["val"].shape for one in node.args)  # type: ignore[union-attr]
    batch, rows, depth, columns = map(hint, (*left, right[2]))
    return batch * (_CALL - _STEP * rows * columns * (depth + 6)) > margin
