"""`torch.bernoulli(x, p)`, whose result is contiguous whatever `x` is, told apart from `x.bernoulli_(p)`, which fills the memory of `x` in its order.

In AOTAutograd's graph both are the same operator (read in torch 2.13). What the first gets is made contiguous in Dynamo's graph, so that all of them
draw in order of memory.
"""

from __future__ import annotations

import torch
from torch import fx


def draw_contiguous(gm: fx.GraphModule) -> None:
    """Makes the argument of each `torch.bernoulli` with a probability contiguous, in place, also in the bodies of higher-order operators."""
    for module in [one for one in gm.modules() if isinstance(one, fx.GraphModule)]:
        graph = module.graph
        calls = [*graph.find_nodes(op="call_function", target=torch.bernoulli), *graph.find_nodes(op="call_method", target="bernoulli")]
        for node in calls:
            source = node.args[0] if node.args else None
            if isinstance(source, fx.Node) and (len(node.args) > 1 or "p" in node.kwargs):
                with graph.inserting_before(node):
                    contiguous = graph.call_method("contiguous", (source,))
                contiguous.meta = dict(source.meta)
                node.update_arg(0, contiguous)
        if calls:
            module.recompile()
