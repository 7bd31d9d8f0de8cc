"""The backward of `torch.nn.attention.flex_attention`, by PyTorch, on tensors that autograd knows nothing of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import attribute

FLEX_BACKWARD = torch.ops.higher_order.flex_attention_backward
# Places of `joint_graph` and `score_mod_other_buffers` among the arguments, and of the gradients of these in what the first returns (torch 2.13).
_JOINT, _CAPTURED, _GRADIENTS = 8, 12, slice(5, None)


def backward_of(node: fx.Node) -> Callable[..., Any]:
    """What computes `node`: PyTorch's kernel gives a gradient of what `score_mod` captures only where that has `requires_grad` (torch 2.13)."""
    (output,) = attribute(node.args[_JOINT]).graph.find_nodes(op="output")  # type: ignore[arg-type]
    return functools.partial(_backward, tuple(one is not None for one in output.args[0][_GRADIENTS]))


def _backward(has_gradient: tuple[bool, ...], *args: Any) -> Any:
    captured = tuple(one.detach().requires_grad_() if is_asked else one for one, is_asked in zip(args[_CAPTURED], has_gradient, strict=True))
    with torch.no_grad():
        return FLEX_BACKWARD(*args[:_CAPTURED], captured, *args[_CAPTURED + 1 :])
