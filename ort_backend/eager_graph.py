"""Dynamo's graph in eager PyTorch: what `verify` compares with, and what runs where a session cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import graph_modules


def eager_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph, to be called in eager PyTorch.

    Bodies of `torch.utils.checkpoint` are called once: as Dynamo writes it, the backward would run them again with other random numbers, which is for
    AOTAutograd to set right (seen with `backend="eager"` in torch 2.13).
    """
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    if not any(module.graph.find_nodes(op="call_function", target=checkpoint) for module in graph_modules(gm)):
        return gm
    made = copied(gm)
    for module in graph_modules(made):
        for node in module.graph.find_nodes(op="call_function", target=checkpoint):
            node.target, node.kwargs = _called, {}
        module.recompile()
    return made


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph again, with those inside it, on the same tensors."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    made = fx.GraphModule(gm, graph)
    for name, module in gm.named_children():
        if isinstance(module, fx.GraphModule):
            setattr(made, name, copied(module))
    return made


def _called(body: Any, *args: Any) -> Any:
    return body(*args)
