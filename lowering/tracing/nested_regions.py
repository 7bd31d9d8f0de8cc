"""`torch.compiler.nested_compile_region`: compiled where it is called, as ONNX Runtime optimises and splits whole graphs."""

from __future__ import annotations

import torch
from torch import fx

from ort_backend.errors import LoweringError
from ort_backend.lowering.functions.autograd_function import call
from ort_backend.lowering.functions.function_site import Site


def inline_regions(gm: fx.GraphModule) -> None:
    """Writes the body of each nested region at each of its calls in Dynamo's graph, in place.

    Raises:
        LoweringError: this version of PyTorch has regions and no pass that inlines them.
    """
    target = getattr(torch.ops.higher_order, "invoke_subgraph", None)
    # Also in the bodies of other higher-order operators, such as a checkpoint's; what is inside comes first.
    modules = [one for one in reversed(list(gm.modules())) if isinstance(one, fx.GraphModule)]
    calling = [one for one in modules if target is not None and one.graph.find_nodes(op="call_function", target=target)]
    if not calling:
        return
    try:
        from torch._higher_order_ops.passes.inline_invoke_subgraph import inline_invoke_subgraph
    except ImportError as error:
        raise LoweringError(
            f"torch.compiler.nested_compile_region: torch {torch.__version__} cannot inline it, which 2.13 can; leave the decorator out"
        ) from error
    for module in calling:
        inline_invoke_subgraph(module)
        _tell_calls_apart(module.graph)
        module.recompile()


def _tell_calls_apart(graph: fx.Graph) -> None:
    """Each call of an `autograd.Function` is a site of its own, which holds what its forward keeps for its backward."""
    seen = set()
    for node in graph.nodes:
        site = getattr(node.target, "site", None)
        if not isinstance(site, Site):
            continue
        if site.id in seen:
            site = site.again()
            node.target = call(site)
        seen.add(site.id)
