"""autograd.Functions that Dynamo has traced into two bodies, made opaque again, for a torch that has no place for `dynamo_hook`.

The class is gone there, and with it all that tracing does not see; the bodies run in eager PyTorch inside one pair of nodes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ort_backend.lowering.functions.autograd_function import call
from ort_backend.lowering.functions.function_behaviour import UnknownBehaviour, behaviour_of
from ort_backend.lowering.functions.function_site import Site, Slot, TensorResult

_APPLY = torch.ops.higher_order.autograd_function_apply


def make_opaque(gm: fx.GraphModule) -> int:
    """Replaces, in place, each `autograd_function_apply` of Dynamo's graph that it can by one opaque call.

    Returns:
        How many it replaced; those that write to their arguments stay.
    """
    replaced = 0
    for node in list(gm.graph.find_nodes(op="call_function", target=_APPLY)):
        site = None if node.kwargs.get("dirty_idx") else _site(gm, node)
        if site is None:
            continue
        inputs = node.args[2:]
        tensors = [arg for arg in inputs if isinstance(_example(arg), torch.Tensor)]
        ints = [arg for arg in inputs if isinstance(_example(arg), torch.SymInt)]
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(call(site), (*tensors, *ints))
            made.meta = dict(node.meta)
            _hand_on(gm.graph, node, made, site)
        gm.graph.erase_node(node)
        replaced += 1
    if replaced:
        gm.recompile()
    return replaced


def _site(gm: fx.GraphModule, node: fx.Node) -> Site | None:
    template: list[Any] = []
    tensors: list[torch.Tensor] = []
    ints: list[Any] = []
    for arg in node.args[2:]:
        example = _example(arg)
        if isinstance(example, torch.Tensor):
            template.append(Slot("tensor", len(tensors)))
            tensors.append(example)
        elif isinstance(example, torch.SymInt):
            template.append(Slot("int", len(ints)))
            ints.append(example)
        else:
            template.append(example)
    mode = next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)
    if mode is None:
        return None
    needs = tuple(isinstance(arg, Slot) and arg.kind == "tensor" and tensors[arg.index].requires_grad for arg in template)
    site = Site(_function(gm, node), tuple(template), needs)
    site.inputs = tuple((tensor.dim(), tensor.dtype, tensor.device) for tensor in tensors)
    site.signature = tuple(str(size) for tensor in tensors for size in tensor.shape)
    try:
        site.behaviour = behaviour_of(site, tensors, ints, mode)
    except UnknownBehaviour:
        return None
    return None if site.behaviour.mutated else site


def _function(gm: fx.GraphModule, node: fx.Node) -> type[torch.autograd.Function]:
    """A Function over the two traced bodies."""
    forward_body, backward_body = (getattr(gm, body.target) for body in node.args[:2])  # type: ignore[union-attr, arg-type]
    non_differentiable = node.kwargs.get("non_differentiable_idx") or ()

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results, saved = forward_body(*args)
            ctx.mark_non_differentiable(*[results[i] for i in non_differentiable])  # type: ignore[union-attr]
            ctx.saved = saved
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            made = backward_body(*gradients, *ctx.saved)
            return tuple(made) if isinstance(made, (tuple, list)) else made

    Traced.__qualname__ = f"Traced.{node.name}"
    return Traced


def _hand_on(graph: fx.Graph, node: fx.Node, made: fx.Node, site: Site) -> None:
    """Gives the users of the traced call the results of the opaque one, which hands out the tensors only."""
    places = {i: n for n, i in enumerate(i for i, result in enumerate(site.behaviour.results) if isinstance(result, TensorResult))}
    for user in list(node.users):
        assert user.target is operator.getitem
        index = user.args[1]
        if index in places:
            item = graph.call_function(operator.getitem, (made, places[index]))  # type: ignore[index]
            item.meta = dict(user.meta)
            user.replace_all_uses_with(item)
        else:
            user.replace_all_uses_with(site.behaviour.results[index])  # type: ignore[index]
        graph.erase_node(user)


def _example(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value
