"""The caller's own tensors, in the places of those over the same memory that a user's Function got.

Autograd goes by which tensor it is. A Function that gets a module and its parameters, as those of implicit layers, adjoint solvers and checkpoints
do, calls the module in its backward, and asks for gradients of the parameters that it saved: `torch.autograd.grad(module(x), parameters)`. They
must be those of the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ort_backend.lowering.functions.function_site import Context, held_tensors, replace_held

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Original(NamedTuple):
    """A tensor that a `ctx` holds, the caller's tensor that it stands for, and where that one's memory is."""

    stand_in: torch.Tensor
    tensor: weakref.ref[torch.Tensor]
    address: int


def originals(ctx: Context, pairs: Iterable[tuple[torch.Tensor, Any]]) -> list[Original]:
    """Those of the pairs of a stand-in and the caller's tensor that matter: the `ctx` holds the one, autograd knows the other."""
    known = [(one, tensor) for one, tensor in pairs if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    held = {id(tensor) for tensor in held_tensors(ctx)} if known else ()
    # Weak: a tensor that is written to behind the forward leads back to it.
    return [Original(one, weakref.ref(tensor), tensor.data_ptr()) for one, tensor in known if id(one) in held]


def put_in(ctx: Context, found: Sequence[Original]) -> None:
    """Gives the `ctx` the caller's tensors. One that has other memory by now has other values than the forward read, and stays out."""
    swap = {id(one): tensor for one, ref, address in found if (tensor := ref()) is not None and tensor.data_ptr() == address}
    if swap:
        replace_held(ctx, lambda tensor: swap.get(id(tensor), tensor))


def input_of(node: Any, inputs: Sequence[fx.Node]) -> int | None:
    """Which of a graph's inputs a node is, None for what the graph computes."""
    while node.op == "call_function" and node.target in _SAME:
        node = node.args[0]
    return inputs.index(node) if node in inputs else None
