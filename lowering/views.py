"""Results that are views of other results or of arguments: taken by PyTorch from the tensor that the user gets, as in eager."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.sizes import evaluator

aten = torch.ops.aten

# Makes a view of a base tensor; the sizes in it come from the graph's arguments.
View = Callable[[torch.Tensor, Sequence[Any]], torch.Tensor]


def replay(node: fx.Node, base: fx.Node, placeholders: Sequence[fx.Node]) -> View | None:
    """The chain of views from `base` to `node` as a function of the tensor `base`; None if it needs more than the graph's arguments.

    A view that is taken by addresses (`as_strided`) needs a tensor that lies in memory as that of the trace.
    """
    steps: list[View] = []
    while node is not base:
        step = _item(node) if node.target is operator.getitem else _step(node, placeholders)
        if step is None:
            return None
        steps.append(step)
        node = node.args[0]  # type: ignore[assignment]
    steps.reverse()

    def view(tensor: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
        for step in steps:
            tensor = step(tensor, args)
        return tensor

    return view


def _item(node: fx.Node) -> View:
    index = node.args[1]
    return lambda parts, args: parts[index]  # type: ignore[index]


def _step(node: fx.Node, placeholders: Sequence[fx.Node]) -> View | None:
    flat, spec = torch.utils._pytree.tree_flatten((node.args[1:], dict(node.kwargs)))
    fakes = [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in flat]
    places = [i for i, fake in enumerate(fakes) if isinstance(fake, torch.SymInt)]
    sizes = evaluator([fakes[i] for i in places], placeholders)
    if sizes is None or any(isinstance(fake, (torch.Tensor, torch.SymFloat, torch.SymBool)) for fake in fakes):
        return None
    target: Any = node.target
    constants = [None if isinstance(fake, torch.SymInt) else fake for fake in fakes]
    arguments, named = torch.utils._pytree.tree_unflatten(constants, spec)

    def step(tensor: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
        leaves = list(constants)
        for i, size in zip(places, sizes(args), strict=True):
            leaves[i] = size
        positional, keywords = torch.utils._pytree.tree_unflatten(leaves, spec)
        return target(tensor, *positional, **keywords)

    def constant_step(tensor: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
        return target(tensor, *arguments, **named)

    return step if places else constant_step
