"""Pictures between convolutions stay in the order of memory (N, H, W, C) where the program around them is written for it.

In transformers with convolutions, and in ConvNeXt, linear layers and normalizations take rows of channels, and convolutions (N, C, H, W): the program
permutes there and back. In eager PyTorch a permutation copies nothing, and the convolution follows its argument's strides. ONNX Runtime's tensors
have one order, so that each permutation is a Transpose. Here the graph is written anew, with the channels as the last dimension, for whole parts
that are connected by operators that do not care: there the permutations cancel each other, 1 x 1 convolutions and patches are products of matrices,
and oneDNN's kernels take the rest of the convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx

from ort_backend.lowering.kernels.channels_last import to_first, to_last
from ort_backend.lowering.memory_order import order_of
from ort_backend.lowering.passes.picture_forms import REASONS, Form, form_of
from ort_backend.lowering.passes.picture_writer import Writer, dims_of, permutation
from ort_backend.lowering.registry import has_lowerings_of_users
from ort_backend.lowering.symbolic import hint
from ort_backend.target import OrtTarget


def put_channels_last(graph: fx.Graph, target: OrtTarget) -> int:
    """Rewrites, in place, the parts of a graph that move fewer elements in this order; returns how many nodes.

    Args:
        graph: Of ATen operators, with fake tensors in their metadata. Symbolic sizes count as their example.
        target: The ONNX Runtime that the graph is for. On a GPU nothing is done, nor where a user has a lowering for convolutions.
    """
    reasons = [one for one in REASONS if graph.find_nodes(op="call_function", target=one)]
    if target.device_type != "cpu" or not target.whole_graphs or not reasons or has_lowerings_of_users(*reasons):
        return 0
    forms: dict[fx.Node, Form] = {}
    for node in graph.nodes:
        if (form := form_of(node, forms, target)) is not None:
            forms[node] = form
    chosen = {node for part in _parts(forms) if _moves_less(part, forms) for node in part}
    if chosen:
        Writer(graph, {node: forms[node].write for node in chosen}, {node for node in chosen if forms[node].is_picture}).write()
    return len(chosen)


def _parts(forms: dict[fx.Node, Form]) -> Iterable[set[fx.Node]]:
    """The nodes that have a form, by what is connected through pictures."""
    part_of: dict[fx.Node, set[fx.Node]] = {}
    for node, form in forms.items():
        part = {node}
        for picture in form.pictures:
            if picture in forms and forms[picture].is_picture and part_of[picture] is not part:
                other = part_of[picture]
                part, other = (part, other) if len(part) > len(other) else (other, part)
                part |= other
                part_of.update(dict.fromkeys(other, part))
        part_of[node] = part
    return {id(part): part for part in part_of.values()}.values()


def _moves_less(part: set[fx.Node], forms: dict[fx.Node, Form]) -> bool:
    """Whether a part with a convolution, or what pools or resizes, permutes fewer elements at its border with the channels last than as it is."""
    if not any(forms[node].is_reason for node in part):
        return False
    as_it_is = sum(forms[node].gain for node in part)
    changed = 0
    for border in {picture for node in part for picture in forms[node].pictures} - part:
        if permutation(border) == to_first(dims_of(border)):
            as_it_is += _elements(border) * (border.users.keys() <= part)
        elif _lies_last(border):
            as_it_is += _elements(border)
        else:
            changed += _elements(border)
    for node in part:
        if forms[node].is_picture and isinstance(node.meta["val"], torch.Tensor):
            users = [user for user in node.users if user not in part]
            last = [user for user in users if permutation(user) == to_last(dims_of(node)) or (user.op == "output" and _lies_last(node))]
            as_it_is += _elements(node) * len(last)
            changed += _elements(node) * (len(last) < len(users))
    return changed < as_it_is


def _lies_last(node: fx.Node) -> bool:
    """Whether a tensor outside of the graph, an argument or a result, has the channels last in its memory."""
    return (node.op == "placeholder" or any(user.op == "output" for user in node.users)) and order_of(node.meta["val"]) == tuple(
        to_last(dims_of(node))
    )


def _elements(node: fx.Node) -> int:
    return math.prod(map(hint, node.meta["val"].shape))
