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
from ort_backend.lowering.partition import ancestors, is_random
from ort_backend.lowering.passes.effects import has_effect

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
    values, dropped, unused = _Values(), 0, set()
    for node, given in masked:
        mask, sizes = given["attn_mask"], (given["query"].meta["val"].shape[-2], given["key"].meta["val"].shape[-2])
        needed = ancestors([mask])
        if given["is_causal"] or len(needed) > _MOST_NODES or not all(map(_is_known, needed)):
            continue
        values.compute(sorted(needed, key=order.__getitem__))
        is_causal = values.is_causal(mask, sizes)
        if is_causal or values.is_zero(mask):
            _set(node, {**given, "attn_mask": None, "is_causal": is_causal})
            unused.update(needed)
            dropped += 1
    for node in sorted(unused, key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)
    return dropped


class _Values:
    """What nodes give. Those that are written alike, as each layer's mask, are computed once."""

    def __init__(self) -> None:
        self._number: dict[fx.Node, int] = {}
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = []

    def compute(self, nodes: list[fx.Node]) -> None:
        """Computes `nodes`, which are in order and known."""
        with unset_fake_temporarily(), torch.no_grad():
            for node in nodes:
                arguments = (node.args, node.kwargs)
                key = (node.target, str(fx.map_arg(arguments, lambda one: f"%{self._number[one]}")))
                if key not in self._numbers:
                    self._numbers[key] = len(self._values)
                    self._values.append(self._run(node, *fx.map_arg(arguments, self._of)))
                self._number[node] = self._numbers[key]

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        return _attribute(node) if node.op == "get_attr" else node.target(*args, **kwargs)  # type: ignore[operator]

    def _of(self, node: fx.Node) -> Any:
        return self._values[self._number[node]]

    def is_causal(self, mask: fx.Node, sizes: tuple[Any, Any]) -> bool:
        """Whether a mask that is added to scores lets each query see the keys up to its own number, and hides all others.

        Args:
            mask: A node that was computed.
            sizes: How many queries and keys there are.
        """
        value = self._of(mask)
        if value.shape[-2:] != sizes or not value.is_floating_point():
            return False
        with unset_fake_temporarily():
            above = torch.ones(sizes, dtype=torch.bool, device="cpu").triu(1)
            hides = value != 0
            return bool(above.any() and (hides == above).all() and (value[hides] <= torch.finfo(value.dtype).min).all())

    def is_zero(self, mask: fx.Node) -> bool:
        """Whether a mask that was computed hides nothing, and adds nothing."""
        with unset_fake_temporarily():
            return not bool(self._of(mask).any())


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
