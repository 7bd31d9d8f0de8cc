"""The dtypes that normalizations of tensors in half precision have, where PyTorch's fake tensors have others (seen in torch 2.13).

Beside parameters or running statistics in float32, as under autocast, the kernels on the CPU keep mean and deviation in float32, and take no others
in the backward; the fake ones have the dtype of the input, and a group norm's gradient of the input that of the parameters. New running statistics
have the dtype of the old ones; the fake ones are float32. For CUDA the fake ones are otherwise right: statistics are float32, but those of groups.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import REFERENCES

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)

# Normalizations, and where parameters and running statistics stand among their arguments. Results are the normalized tensor, mean, deviation.
_FORWARD = {
    aten.native_layer_norm.default: slice(2, 4), aten.native_group_norm.default: slice(1, 3), aten._native_batch_norm_legit.no_stats: slice(1, 3),
    aten._native_batch_norm_legit_functional.default: slice(1, 5), aten._native_batch_norm_legit.default: slice(1, 5),
    aten._native_batch_norm_legit_no_training.default: slice(1, 5), aten.native_batch_norm.default: slice(1, 5),
}  # fmt: skip


def correct_statistics(graph: fx.Graph) -> None:
    """Writes the dtypes of the kernels into the fake values of normalizations, in place."""
    for node in graph.nodes:
        if node.target in _FORWARD and _is_mixed(node.args[0], node.args[_FORWARD[node.target]]):
            _set(node, {1: torch.float32, 2: torch.float32})
        elif node.target is aten.native_group_norm_backward.default and _is_mixed(node.args[1], node.args[4:5]):
            _set(node, {0: node.args[1].meta["val"].dtype})
        if node.target is aten._native_batch_norm_legit_functional.default:
            _set(node, {3: node.args[3].meta["val"].dtype, 4: node.args[4].meta["val"].dtype})


def _is_mixed(tensor: object, others: Iterable[object]) -> bool:
    if not isinstance(tensor, fx.Node):
        return False
    value = tensor.meta["val"]
    is_half = value.device.type == "cpu" and value.dtype in _HALF
    return is_half and any(isinstance(other, fx.Node) and other.meta["val"].dtype == torch.float32 for other in others)


def _set(node: fx.Node, dtypes: dict[int, torch.dtype]) -> None:
    values = list(node.meta["val"])
    for place, dtype in dtypes.items():
        if isinstance(values[place], torch.Tensor) and values[place].dtype != dtype:
            values[place] = values[place].to(dtype)
    node.meta["val"] = tuple(values)
    for user in node.users:
        if user.target is operator.getitem:
            _set_references(user, values[user.args[1]])  # type: ignore[index]


def _set_references(node: fx.Node, value: torch.Tensor) -> None:
    node.meta["val"] = value
    for user in node.users:
        if user.target in REFERENCES:
            _set_references(user, value)
