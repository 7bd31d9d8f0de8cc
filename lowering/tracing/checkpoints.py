"""`torch.utils.checkpoint` in graphs that have no backward."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import graph_modules

# Where PyTorch's pass over graphs without a backward of their own is (read in torch 2.13; older ones have none).
_PLACE, _NAME = "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass", "remat_using_tags_for_fwd_loss_bwd_graph"


@contextlib.contextmanager
def nothing_to_compute_again(gm: fx.GraphModule) -> Iterator[None]:
    """While AOTAutograd traces Dynamo's graph: what a checkpoint marks is left alone in graphs of which no part is a backward.

    PyTorch looks in such graphs, too, for a backward that is to compute marked nodes again, and before that raises an error where one of them draws
    random numbers: where nothing needs a gradient, and where what needs one is not handed out, as behind `detach`.
    """
    modules = graph_modules(gm)
    if not any(one.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint) for one in modules):
        yield
        return
    try:
        place = importlib.import_module(_PLACE)
    except ImportError:
        yield
        return
    known = getattr(place, _NAME)

    def where_there_is_a_backward(gm: fx.GraphModule) -> fx.GraphModule:
        made: fx.GraphModule = known(gm) if any(map(_is_backward, gm.graph.nodes)) else gm
        return made

    with mock.patch.object(place, _NAME, where_there_is_a_backward):
        yield


def _is_backward(node: fx.Node) -> bool:
    """As PyTorch's pass finds it: by a note of Dynamo's, or of the user's."""
    custom: dict[str, Any] = node.meta.get("custom") or {}
    return bool(node.meta.get("autograd_backward")) or custom.get("phase") == "backward"
