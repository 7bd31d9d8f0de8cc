"""Attention whose backward reads the probabilities that the forward computed.

PyTorch's operators of attention hand the backward a sum for each row, and it computes the probabilities again. In one session they can stay, where
they are few beside what a block keeps anyway: a product, a mask and a softmax less for each layer.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ort_backend.lowering import registry
from ort_backend.lowering.fx_nodes import REFERENCES, arguments_of, source_of
from ort_backend.lowering.kernels.attention_blocks import causal_ends
from ort_backend.lowering.kernels.attention_choice import bounds_scores, few_probabilities
from ort_backend.lowering.kernels.kernel_choice import faster_in_pytorch
from ort_backend.lowering.ops.attention import ATTENTION, ATTENTION_BACKWARD, flash_attention_backward_fused, flash_attention_fused
from ort_backend.lowering.passes.recompute import has_budget
from ort_backend.lowering.symbolic import may_be_zero
from ort_backend.target import OrtTarget

aten = torch.ops.aten

_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# What they stand for.
_LOWERINGS = {_FORWARD: flash_attention_fused, _BACKWARD: flash_attention_backward_fused}


def keep_probabilities(graph: fx.Graph, target: OrtTarget) -> int:
    """Replaces, in place, attention and its backward by operators that hand the probabilities from one to the other.

    Not in a checkpoint, nor where a memory budget is set (`torch._functorch.config.activation_memory_budget`): PyTorch's partitioner, which decides
    there what is kept, does not count them.

    Args:
        graph: A joint graph of ATen operators with fake tensors in their metadata, nodes that are computed again written as such.
        target: The ONNX Runtime that the graph is for.

    Returns:
        How many pairs there were.
    """
    if not target.whole_graphs or has_budget(graph) or not all(_is_first(overload, lowering, target) for overload, lowering in _LOWERINGS.items()):
        return 0
    pairs = [(node, backwards) for node in graph.nodes if node.target is _FORWARD and (backwards := _backwards(node, target))]
    for forward, backwards in pairs:
        _replace(graph, forward, backwards, target)
    return len(pairs)


def _is_first(overload: torch._ops.OpOverload, lowering: Any, target: OrtTarget) -> bool:
    """Whether nothing else lowers an operator first, such as what a user has registered."""
    return next((one.function for one in registry.find(overload, target)), None) is lowering


def _backwards(forward: fx.Node, target: OrtTarget) -> list[fx.Node]:
    """The backwards that alone read the sums of the rows of `forward`, where ONNX Runtime runs all of it and the probabilities are few."""
    given = arguments_of(forward)
    if "recompute" in forward.meta or not _is_for_us(given):
        return []
    if not few_probabilities(given["query"].meta["val"].shape[-2], *given["key"].meta["val"].shape[-2:]):
        return []
    backwards = [reader for item in _items(forward, 1) for reader in _readers(item)]
    if any(one.target is not _BACKWARD or _same_arguments(one) != _same_arguments(forward) for one in backwards):
        return []
    return [] if any(faster_in_pytorch(one, target) for one in (forward, *backwards)) else backwards


def _is_for_us(given: dict[str, Any]) -> bool:
    """Float32, of a known number of heads of a known width, none of the sizes 0, no dropout, the scale a number."""
    tensors = [given[name].meta["val"] for name in ("query", "key", "value")]
    return (
        all(one.dtype == torch.float32 and isinstance(one.shape[1], int) and isinstance(one.shape[3], int) for one in tensors)
        and not any(may_be_zero(size) for one in tensors for size in one.shape)
        and not given["dropout_p"]
        and (given["scale"] is None or isinstance(given["scale"], float))
    )


def _same_arguments(node: fx.Node) -> list[Any]:
    """What a forward and its backward have in common."""
    given = arguments_of(node)
    tensors = [source_of(given[name]) for name in ("query", "key", "value", "attn_mask")]
    return [*tensors, given["dropout_p"], given["is_causal"], given["scale"]]


def _items(node: fx.Node, index: int) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == index]


def _readers(node: fx.Node) -> list[fx.Node]:
    return [reader for user in node.users for reader in (_readers(user) if user.target in REFERENCES else [user])]


def _replace(graph: fx.Graph, forward: fx.Node, backwards: list[fx.Node], target: OrtTarget) -> None:
    given = arguments_of(forward)
    query, key, value, mask, scale = (given[name] for name in ("query", "key", "value", "attn_mask", "scale"))
    is_plainly_causal = given["is_causal"] and mask is None
    bounded = bounds_scores(target) and is_plainly_causal
    ends = causal_ends(query.meta["val"].shape[-2], key.meta["val"].shape[-2]) if is_plainly_causal else []
    arguments = (query, key, value, given["is_causal"], mask, scale, bounded, ends)
    fakes = [forward.meta["val"][0], *ATTENTION(*fx.map_arg(arguments, lambda node: node.meta["val"]))[1:]]
    with graph.inserting_before(forward):
        made = graph.call_function(ATTENTION, arguments)
        output, *probabilities = (graph.call_function(operator.getitem, (made, i)) for i in range(len(fakes)))
    made.meta = {**forward.meta, "val": fakes}
    for item, fake in zip((output, *probabilities), fakes):
        item.meta = {**forward.meta, "val": fake}
    for backward in backwards:
        grad_out = arguments_of(backward)["grad_out"]
        backward.target, backward.kwargs = ATTENTION_BACKWARD, {}
        backward.args = (grad_out, query, key, value, probabilities, mask, scale, ends)
    for item in _items(forward, 0):
        item.replace_all_uses_with(output)
    _erase(graph, forward)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Takes out a node whose results nobody uses."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
