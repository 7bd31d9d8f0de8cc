"""Activations that are written out, as the GELUs of Hugging Face's GPT-2 and CLIP are, become one operator.

That GELU is eight operators in the forward and twelve in the backward, of which each passes over memory, and two tensors of its size wait for the
backward; a `gelu` is one, its gradient is one, and its argument alone waits. With the operator a step of GPT-2 (3 layers, 768 wide, 512 tokens) takes
0.97 of the time, and the process of GPT-2 small 55 MB less at its peak, with the plain package 180 (AMD EPYC of family 26). CLIP's has no operator of
its own; as a SiLU of a product it takes 0.9 to 1.08 of the time, and one tensor waits instead of two.

There are many ways to write one. So a function is known here by its values: expressions of one tensor and of numbers, between a `tanh`, `erf` or
`sigmoid` and where it is used, are computed in Python for some arguments, and compared. With `dynamic=True` a number may be an input of Dynamo's
graph, as `math.pi` is: it is compiled in, with a guard on its value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ort_backend.lowering.fx_nodes import graph_modules

# What an expression may consist of, for one number: functions, and methods by their names.
_BENDS: dict[Any, Callable[..., float]] = {
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), math.tanh),
    **dict.fromkeys((torch.erf, torch.special.erf, "erf"), math.erf),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, torch.special.expit, "sigmoid"), lambda x: 1 / (1 + math.exp(-x))),
}
_RULES: dict[Any, Callable[..., float]] = {
    **_BENDS,
    **dict.fromkeys((operator.add, torch.add, "add"), operator.add),
    **dict.fromkeys((operator.sub, torch.sub, "sub"), operator.sub),
    **dict.fromkeys((operator.mul, torch.mul, "mul"), operator.mul),
    **dict.fromkeys((operator.truediv, torch.div, torch.true_divide, "div"), operator.truediv),
    **dict.fromkeys((operator.pow, torch.pow, "pow"), operator.pow),
    **dict.fromkeys((operator.neg, torch.neg, "neg"), operator.neg),
    **dict.fromkeys((torch.square, "square"), lambda x: x * x),
}

_QUICK = 1.702  # of CLIP's GELU

# A function of one number, and what writes it with PyTorch's operators.
_KNOWN: tuple[tuple[Callable[[float], float], Callable[[fx.Graph, fx.Node], fx.Node]], ...] = (
    (
        lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        lambda graph, x: graph.call_function(F.gelu, (x,), {"approximate": "tanh"}),
    ),
    (lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))), lambda graph, x: graph.call_function(F.gelu, (x,))),
    (lambda x: x / (1 + math.exp(-x)), lambda graph, x: graph.call_function(F.silu, (x,))),
    (lambda x: x / (1 + math.exp(-_QUICK * x)), lambda graph, x: _scaled_silu(graph, x)),
)

_ARGUMENTS = [i / 8 + 1 / 16 for i in range(-48, 48)]  # no zero, by which an expression might divide
_LONGEST = 16  # nodes of an expression

# Constants are written with some 10 digits (0.7978845608): no more than is lost in float32 anyway. In float64 they must be right.
_TOLERANCES = {torch.float64: {"rel_tol": 1e-13, "abs_tol": 1e-14}}
_TOLERANCE = {"rel_tol": 1e-7, "abs_tol": 1e-8}
_HALVES = (torch.bfloat16, torch.float16)


def fold_activations(gm: fx.GraphModule) -> int:
    """Makes `gelu` and `silu` of what is written out, in place; returns how many.

    Args:
        gm: Dynamo's graph, with fake tensors as `example_value` in its metadata.
    """
    folded = 0
    for module in graph_modules(gm):
        here = sum(_fold(module.graph, node) for node in list(module.graph.nodes) if _rule(node, _BENDS) is not None)
        if here:
            module.recompile()
        folded += here
    return folded


def _fold(graph: fx.Graph, bend: fx.Node) -> bool:
    """Puts an operator in the place of the expression around a bend, if it is a known one."""
    for end in _ends(bend):
        for x in _before(bend):
            expression = _expression(x, end)
            if expression is None or not _is_floating(x, end):
                continue
            for known, write in _KNOWN:
                if _is_equal(known, x, expression):
                    take_numbers(expression)
                    before = expression[0].prev
                    with graph.inserting_before(expression[0]):
                        made = write(graph, _widened(graph, x, end))
                    while (before := before.next) is not made:
                        before.meta = {name: one for name, one in end.meta.items() if name != "example_value"}
                    made.meta = dict(end.meta)
                    end.replace_all_uses_with(made)
                    for node in reversed(expression):
                        graph.erase_node(node)
                    return True
    return False


def _ends(bend: fx.Node) -> Iterator[fx.Node]:
    """The nodes behind a bend that use it, and each other, alone."""
    node = bend
    for _ in range(_LONGEST):
        if len(node.users) != 1 or _rule(node := next(iter(node.users))) is None:
            return
        yield node


def _before(bend: fx.Node) -> list[fx.Node]:
    """What a bend is computed from: arguments of the expression, maybe."""
    found = dict.fromkeys(_tensors(bend))
    for node in (seen := list(found)):
        if len(seen) < _LONGEST and _rule(node) is not None:
            new = [source for source in _tensors(node) if source not in found]
            found.update(dict.fromkeys(new))
            seen.extend(new)
    return list(found)


def _expression(x: fx.Node, end: fx.Node) -> list[fx.Node] | None:
    """The nodes from `x` to `end`, in their order; None if others have a part in it, lie between them, or read what is computed on the way."""
    inside, waiting = {end}, [end]
    while waiting:
        for source in _tensors(waiting.pop()):
            if source is x or source in inside:
                continue
            if _rule(source) is None or len(inside) == _LONGEST:
                return None
            inside.add(source)
            waiting.append(source)
    if any(user not in inside for node in inside if node is not end for user in node.users):
        return None
    expression, node = [end], end.prev
    while node in inside or number_of(node) is not None:  # another operator in between may write to `x`
        if node in inside:
            expression.append(node)
        node = node.prev
    return expression[::-1] if len(expression) == len(inside) else None


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if number_of(source) is None]


def number_of(argument: Any) -> float | None:
    """The value of a number, which may be an input of Dynamo's graph, or computed from such ones; None for anything else."""
    if isinstance(argument, fx.Node):
        number = argument.meta.get("example_value")
        return number.node.hint if isinstance(number, torch.SymFloat) else None
    return argument if isinstance(argument, (int, float)) and not isinstance(argument, bool) else None


def take_numbers(nodes: Iterable[fx.Node]) -> None:
    """Compiles in the numbers that these nodes read: with others Dynamo compiles again."""
    for number in {source for node in nodes for source in node.all_input_nodes if number_of(source) is not None}:
        number.meta["example_value"].node.guard_float(__file__, 0)


def _rule(node: fx.Node, rules: dict[Any, Callable[..., float]] = _RULES) -> Callable[..., float] | None:
    """How a node is computed for one number; None if it is none of the rules, or has other arguments than tensors and numbers."""
    if node.op not in ("call_function", "call_method") or node.kwargs:
        return None
    is_plain = all(isinstance(one, fx.Node) or number_of(one) is not None for one in node.args)
    return rules.get(node.target) if is_plain else None


def _is_floating(x: fx.Node, end: fx.Node) -> bool:
    """Whether both are of a floating dtype, and the result of no narrower one."""
    before, behind = (node.meta.get("example_value") for node in (x, end))
    if not isinstance(before, Tensor) or not isinstance(behind, Tensor) or not before.is_floating_point():
        return False
    return before.dtype is behind.dtype or (before.dtype in _HALVES and behind.dtype is torch.float32)


def _widened(graph: fx.Graph, x: fx.Node, end: fx.Node) -> fx.Node:
    """The argument in the result's dtype: on CUDA autocast computes powers in float32, and so what they are added to."""
    if x.meta["example_value"].dtype is (dtype := end.meta["example_value"].dtype):
        return x
    return graph.call_method("to", (x, dtype))


def _scaled_silu(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """`x * sigmoid(1.702 * x)`, of which nothing but `x` has to be kept: products cost little to compute again."""
    return graph.call_function(operator.truediv, (graph.call_function(F.silu, (graph.call_function(operator.mul, (x, _QUICK)),)), _QUICK))


def _is_equal(known: Callable[[float], float], x: fx.Node, expression: list[fx.Node]) -> bool:
    tolerance = _TOLERANCES.get(x.meta["example_value"].dtype, _TOLERANCE)
    try:
        return all(math.isclose(_computed(x, expression, one), known(one), **tolerance) for one in _ARGUMENTS)
    except (ArithmeticError, TypeError, ValueError):  # a root of a number below zero, say
        return False


def _computed(x: fx.Node, expression: list[fx.Node], argument: float) -> float:
    values: dict[Any, float] = {x: argument}
    for node in expression:
        rule: Any = _rule(node)
        values[node] = rule(*(values[one] if one in values else number_of(one) for one in node.args))
    return values[expression[-1]]
