"""Gradients of large vocabularies, tall products `left^T right` with a transposed left side, block by block of rows where they divide into such.

ONNX Runtime's product reads and writes all rows once for every 128 columns and 128 numbers that it sums, and those of a tall one stay in no cache.
The product the other way round (`fast_loops.transposed_products`) takes two thirds of the time, but makes the result once more, transposed. Without
that, blocks of some 500 rows take 1.00 to 1.08 of it, and 1.2 those of 1,733 that GPT-2's vocabulary divides into (AMD EPYC of family 26).
"""

from __future__ import annotations

import math

from torch import fx

from ort_backend.lowering.fx_nodes import aten, call_beside, untransposed
from ort_backend.lowering.kernels.session_choice import far_faster_in_pytorch
from ort_backend.lowering.ops.matmul import TALL_MM
from ort_backend.lowering.passes.products import faster_product
from ort_backend.lowering.symbolic import hint, may_be_zero
from ort_backend.target import OrtTarget

# Numbers of the result from which on the memory matters, and how many are summed for each: for more, the way round saves more time.
_LARGE, _DEPTHS = 1 << 23, range(256, 1025)
# Rows of a block, and how many are best.
_ROWS, _BEST = range(256, 2049), 512


def divide_tall_products(graph: fx.Graph, target: OrtTarget) -> int:
    """Rewrites, in place, on one thread of the CPU, products in float32.

    Returns:
        How many there were.
    """
    if target.device_type != "cpu" or target.threads != 1 or "com.microsoft::FusedMatMul" not in target.contrib_ops:
        return 0
    found = 0
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        left, is_transposed = untransposed(node.args[0])
        if not is_transposed or (blocks := _blocks(node, left)) is None or faster_product(node, target) or far_faster_in_pytorch(node, target):
            continue
        with graph.inserting_before(node):
            product = call_beside(graph, node, TALL_MM, left, node.args[1], blocks)
        node.target, node.args = aten.view.default, (product, list(node.meta["val"].shape))
        found += 1
    return found


def _blocks(node: fx.Node, left: fx.Node) -> int | None:
    """How many blocks the product's rows divide into; None where it is to be one."""
    fake, (depth, rows) = node.meta["val"], left.meta["val"].shape
    if str(fake.dtype) != "torch.float32" or not all(isinstance(size, int) for size in fake.shape) or may_be_zero(depth):
        return None
    if math.prod(fake.shape) < _LARGE or hint(depth) not in _DEPTHS:
        return None
    sizes = [size for size in _ROWS if size < rows and rows % size == 0]
    return rows // min(sizes, key=lambda size: abs(size - _BEST)) if sizes else None
