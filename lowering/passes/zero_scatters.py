"""Zeros that elements are put into, and nothing else reads: the two as one call of PyTorch's, where that is to put them in any case."""

from __future__ import annotations

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of, call_beside
from ort_backend.lowering.kernels.kernel_choice import faster_in_pytorch
from ort_backend.lowering.kernels.zero_scatter import PUT_INTO_ZEROS
from ort_backend.target import OrtTarget

aten = torch.ops.aten

_SCATTERS = {aten.scatter.src: False, aten.scatter_add.default: True}


def put_into_zeros(graph: fx.Graph, target: OrtTarget) -> int:
    """Rewrites, in place, `scatter` and `scatter_add` of new zeros on the CPU; returns how many."""
    if target.device_type != "cpu":
        return 0
    rewritten = 0
    for node in list(graph.nodes):
        if node.target not in _SCATTERS:
            continue
        given = arguments_of(node)
        zeros, index, src, fake = given["self"], given["index"], given["src"], node.meta["val"]
        if zeros.target is not aten.new_zeros.default or len(zeros.users) > 1 or src.meta["val"].dtype != fake.dtype:
            continue
        if faster_in_pytorch(node, target) is None:
            continue
        with graph.inserting_before(node), fake.fake_mode:
            new = call_beside(graph, node, PUT_INTO_ZEROS, index, src, zeros.args[1], given["dim"], _SCATTERS[node.target])
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        graph.erase_node(zeros)
        rewritten += 1
    return rewritten
