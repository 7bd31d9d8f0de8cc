"""The dtypes that normalizations have in mixed precision, where PyTorch's fake tensors have others.

Of an input in half precision and parameters in float32, as under autocast, the kernels on the CPU keep mean and deviation in float32, and take no
others in the backward; the fake ones have the dtype of the input, and a group norm's gradient of the input that of the parameters (seen in torch
2.13).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import REFERENCES

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)

# Normalizations and the place of the weight among their arguments. Results are the normalized tensor, mean, deviation.
_FORWARD = {
    aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1,
    aten._native_batch_norm_legit_functional.default: 1, aten._native_batch_norm_legit.default: 1, aten._native_batch_norm_legit.no_stats: 1,
    aten._native_batch_norm_legit_no_training.default: 1, aten.native_batch_norm.default: 1,
}  # fmt: skip


def correct_statistics(graph: fx.Graph) -> None:
    """Writes the dtypes of the kernels into the fake values of normalizations in mixed precision on the CPU, in place."""
    for node in graph.nodes:
        if node.target in _FORWARD and _is_mixed(node.args[0], node.args[_FORWARD[node.target]]):
            _set(node, {1: torch.float32, 2: torch.float32})
        elif node.target is aten.native_group_norm_backward.default and _is_mixed(node.args[1], node.args[4]):
            _set(node, {0: node.args[1].meta["val"].dtype})


def _is_mixed(tensor: object, weight: object) -> bool:
    if not isinstance(tensor, fx.Node) or not isinstance(weight, fx.Node):
        return False
    value = tensor.meta["val"]
    return value.device.type == "cpu" and value.dtype in _HALF and weight.meta["val"].dtype == torch.float32


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
