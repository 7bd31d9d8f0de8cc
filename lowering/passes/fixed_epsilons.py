"""Under a root, numbers that Dynamo made inputs of its graph are compiled in, with a guard on their values.

With `dynamic=True` every number that a module holds is an input. Where PyTorch's operators take a number only, as layer normalizations do theirs,
Dynamo compiles it in (torch 2.13); the epsilon of a root mean square norm that is written out stays an input, and the norm is none that is known.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_SUMS = {operator.add, operator.iadd, torch.add}


def fix_epsilons(gm: fx.GraphModule) -> int:
    """Compiles in the numbers that are added in front of an `rsqrt` and used for nothing else, in place; returns how many.

    Args:
        gm: Dynamo's graph. Its shape environment gets a guard for each number: with another value Dynamo compiles again.
    """
    fixed = 0
    for item in gm.graph.find_nodes(op="call_method", target="item"):
        number: Any = item.meta.get("example_value")
        if isinstance(number, torch.SymFloat) and number.node.hint is not None and item.users and all(map(_is_under_root, item.users)):
            item.replace_all_uses_with(number.node.guard_float(__file__, 0))
            gm.graph.erase_node(item)
            fixed += 1
    if fixed:
        gm.recompile()
    return fixed


def _is_under_root(node: fx.Node) -> bool:
    """Whether it is a sum of which only the reciprocal of its root is read."""
    is_sum = node.target in _SUMS if node.op == "call_function" else node.op == "call_method" and node.target == "add"
    return is_sum and len(node.users) == 1 and all(user.target in (torch.rsqrt, "rsqrt") for user in node.users)
