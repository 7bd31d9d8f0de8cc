"""Masks of attention that follow from the sizes of a graph alone: causal ones, and those that hide nothing.

A model that gets no mask may still write one down: Hugging Face's decoders compute theirs out of `arange`, since what they look at to leave it out is
not there while Dynamo traces them. Attention that knows itself to be causal needs no mask, and computes half as much.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ort_backend.lowering.fx_nodes import arguments_of
from ort_backend.lowering.passes.effects import has_effect
from ort_backend.lowering.splitting.partition import ancestors, is_random

aten = torch.ops.aten

_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)

# What is computed while compiling: nodes of a mask, elements of a tensor.
_MOST_NODES = 256
_MOST_ELEMENTS = 1 << 24


def drop_known_masks(graph: fx.Graph) -> int:
    """Takes, in place, masks from attention that is causal without them, or masks nothing, and what computed these masks.

    A mask is known where it depends on no input of the graph, draws nothing, and has no symbolic size. It is computed, once, on the CPU.

    Args:
        graph: A graph of ATen operators with fake tensors in their metadata.

    Returns:
        From how many nodes a mask was taken.
    """
    masked = [(node, given) for node in graph.nodes if node.target in _ATTENTION and (given := arguments_of(node))["attn_mask"] is not None]
    if not masked:
        return 0
    order = {node: i for i, node in enumerate(graph.nodes)}
    masks, dropped, unused = _Masks(), 0, set()
    for node, given in masked:
        mask = given["attn_mask"]
        lengths = (given[name].meta["val"].shape[-2] for name in ("query", "key"))
        sizes = tuple(length if isinstance(length, int) else None for length in lengths)
        needed = ancestors([mask])
        if given["is_causal"] or len(needed) > _MOST_NODES or not all(map(_is_known, needed)):
            continue
        is_causal, is_zero = masks.judge(sorted(needed, key=order.__getitem__), mask, sizes)
        is_causal &= given["scale"] is None or (isinstance(given["scale"], (int, float)) and given["scale"] > 0)
        if is_causal or is_zero:
            _set(node, {**given, "attn_mask": None, "is_causal": is_causal})
            unused.update(needed)
            dropped += 1
    for node in sorted(unused, key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)
    return dropped


class _Masks:
    """What known masks are. Those that are written alike, as each layer's, are computed once, and nothing of them is kept."""

    def __init__(self) -> None:
        self._number: dict[fx.Node, int] = {}
        self._numbers: dict[Any, int] = {}
        self._verdicts: dict[Any, tuple[bool, bool]] = {}

    def judge(self, nodes: list[fx.Node], mask: fx.Node, sizes: tuple[int | None, ...]) -> tuple[bool, bool]:
        """Whether a mask that is added to scores lets each query see the keys up to its own number and hides all others; whether it adds nothing.

        Args:
            nodes: What the mask is computed by, in order, itself last. They are known.
            mask: The mask.
            sizes: How many queries and keys there are; None where that is symbolic.
        """
        for node in nodes:
            key = (node.target, str(fx.map_arg((node.args, node.kwargs), lambda one: f"%{self._number[one]}")))
            self._number[node] = self._numbers.setdefault(key, len(self._numbers))
        case = (self._number[mask], sizes)
        if case not in self._verdicts:
            with unset_fake_temporarily(), torch.no_grad():
                value = _computed(nodes)
                self._verdicts[case] = (_is_causal(value, sizes), not bool(value.any()))
        return self._verdicts[case]


def _computed(nodes: list[fx.Node]) -> Any:
    """What the last of some nodes gives. Each other value goes with the last node that reads it."""
    last_reader = {source: node for node in nodes for source in node.all_input_nodes}
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = _attribute(node) if node.op == "get_attr" else node.target(*args, **kwargs)  # type: ignore[operator]
        for source in node.all_input_nodes:
            if last_reader[source] is node:
                del values[source]
    return values[nodes[-1]]


def _is_causal(value: Any, sizes: tuple[int | None, ...]) -> bool:
    if value.shape[-2:] != sizes or not value.is_floating_point():
        return False
    above = torch.ones(value.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
    hides = value != 0
    return bool(above.any() and (hides == above).all() and (value[hides] <= torch.finfo(value.dtype).min).all())


def _is_known(node: fx.Node) -> bool:
    """Whether a node gives the same in every run, if what it reads does, and may run now."""
    if node.op == "get_attr":
        return isinstance(_attribute(node), torch.Tensor) and _is_small(_attribute(node))
    if node.op != "call_function" or has_effect(node):
        return False
    if node.target is not operator.getitem and (not isinstance(node.target, torch._ops.OpOverload) or not _is_pure(node)):
        return False
    results = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return bool(results) and all(_is_small(one) for one in results)


def _is_pure(node: fx.Node) -> bool:
    overload: Any = node.target
    return overload.namespace in ("aten", "prims") and not overload._schema.is_mutable and not is_random(node)


def _is_small(value: Any) -> bool:
    """Whether this is a tensor on the CPU, of known sizes."""
    is_plain = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided
    return is_plain and all(isinstance(size, int) for size in value.shape) and value.numel() <= _MOST_ELEMENTS


def _attribute(node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def _set(node: fx.Node, given: dict[str, Any]) -> None:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    node.args = tuple(given[one.name] for one in schema if not one.kwarg_only)
    node.kwargs = {one.name: given[one.name] for one in schema if one.kwarg_only}
