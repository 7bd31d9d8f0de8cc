"""What an FX node was given, and what it stands for."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Results that are their first argument.
REFERENCES = {aten.detach.default, aten.alias.default}


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an operator by their names in its schema, with the defaults of those that are left out."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return {**{one.name: one.default_value for one in schema}, **dict(zip((one.name for one in schema), node.args)), **node.kwargs}


def source_of(value: Any) -> Any:
    """The node that a node refers to; anything else as it is."""
    while isinstance(value, fx.Node) and value.target in REFERENCES:
        value = value.args[0]
    return value


def nodes_in(tree: Any) -> list[fx.Node]:
    """The nodes in nested arguments, in order, each as often as it stands there."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, fx.Node)]
