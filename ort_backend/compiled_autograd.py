"""PyTorch's compiled autograd, `torch._dynamo.config.compiled_autograd = True`: whole backwards as graphs, hooks and accumulated gradients included.

It traces each backward that runs inside a compiled function, with the operators of AOTAutograd's backward graphs in it, and hands the result to the
backend as a graph without gradients. A backward that is the second half of a session has no operators, so that forward and backward become
graphs of their own here. Read in torch 2.13: `torch/_dynamo/compiled_autograd.py`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.errors import LoweringError, OrtBackendError

_MODULE = "torch._dynamo.compiled_autograd"


def is_on() -> bool:
    """Whether what is compiled now may have its backward traced. Not what is compiled of a traced backward."""
    return torch._dynamo.compiled_autograd.compiled_autograd_enabled


def off() -> contextlib.AbstractContextManager[None]:
    """While backwards are not to be traced."""
    return torch._dynamo.compiled_autograd._disable() if is_on() else contextlib.nullcontext()


def untraceable() -> OrtBackendError:
    """What to raise where it traces a backward that has no operators to trace."""
    return OrtBackendError(
        "compiled autograd traces a backward whose forward was compiled without it, as one session: set "
        "torch._dynamo.config.compiled_autograd = True before the first call, or call torch._dynamo.reset()"
    )


def has_lists(example_inputs: Sequence[Any]) -> bool:
    """Whether a graph takes lists of tensors, as those of traced backwards do, and no others."""
    return any(isinstance(value, (list, tuple)) for value in example_inputs)


def has_own_operators(gm: fx.GraphModule) -> bool:
    """Whether a graph calls what is made for one traced backward, so that no program can name it."""
    return any(_MODULE in (getattr(node.target, "__module__", None), type(node.target).__module__) for node in gm.graph.nodes)


def spread(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """The graph with a placeholder for each element of the lists that it takes, and its example inputs in a row.

    Raises:
        LoweringError: it uses such a list otherwise than by its elements.
    """
    graph = fx.Graph()
    row: list[Any] = []
    copies: dict[fx.Node, Any] = {}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        parts = value if isinstance(value, (list, tuple)) else [value]
        made = []
        for i, one in enumerate(parts):
            made.append(graph.placeholder(f"{node.name}_{i}" if parts is value else node.name))
            made[-1].meta = {**node.meta, "example_value": one}
        row.extend(parts)
        copies[node] = made[0] if made else None
        if parts is not value:
            continue
        for user in node.users:
            if user.target is not operator.getitem:
                raise LoweringError(f"a graph of compiled autograd uses the list {node.name!r} otherwise than by its elements")
            copies[user] = made[user.args[1]]
    results = graph.graph_copy(gm.graph, copies)
    graph.output(results)
    flat = fx.GraphModule(gm, graph)
    return flat, row


def with_lists(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, called with lists. They are emptied: what a backward reads goes as soon as it has been read."""

    def call(*args: Any) -> Any:
        row: list[Any] = []
        for arg in args:
            row.extend(arg if isinstance(arg, (list, tuple)) else [arg])
            if isinstance(arg, list):
                arg.clear()
        return compiled(*row)

    return call
