"""Pointwise nodes as a program for `kernels.pointwise_steps`: in place, with as few passes over memory as PyTorch's fused functions allow."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import nodes_in
from ort_backend.lowering.kernels.pointwise_steps import FUNCTIONS, Program

aten = torch.ops.aten

# Nodes whose value is an argument's -> which.
_SAME = {aten.clone.default: 0, aten.detach.default: 0, aten.alias.default: 0, aten.copy.default: 1}
_OVERLOADS = {"default", "self", "Tensor", "Scalar", "Tensor_Scalar"}


class NoProgram(Exception):
    """Something is none of the functions that a program may call."""


class _Call(NamedTuple):
    node: fx.Node
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Product(NamedTuple):
    """`number` times `factors`, by `divisors`; `number` may be the node of a scalar."""

    number: Any
    factors: tuple[Any, ...]
    divisors: tuple[Any, ...]
    nodes: frozenset[fx.Node]  # that compute it, and nothing else


def program_of(nodes: Sequence[fx.Node], new: Mapping[fx.Node, fx.Node], read: Sequence[fx.Node]) -> tuple[Program, tuple[fx.Node, ...]]:
    """The program of new values of arguments, and the scalars that it takes.

    Args:
        nodes: What has the shape of the arguments, in order.
        new: The arguments, and the nodes of their new values.
        read: What has the shape, too, and is neither.

    Raises:
        NoProgram: A node is none of the functions that a program may call, or no call gives a new value.
    """
    finals, calls = _Calls(nodes).of(new)
    return _in_places(calls, finals, read)


def _is_scalar(one: Any) -> bool:
    return isinstance(one, fx.Node) and not one.meta["val"].dim()


class _Calls:
    """The calls for some nodes, without those of which another call takes the work."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._same: dict[Any, Any] = {node: node.args[_SAME[node.target]] for node in nodes if node.target in _SAME}
        self._nodes = [node for node in nodes if node not in self._same]
        self._inner: set[fx.Node] = set()  # what one of them reads, once

    def of(self, new: Mapping[fx.Node, fx.Node]) -> tuple[dict[fx.Node, fx.Node], list[_Call]]:
        """What makes the new value of each argument, and the calls in order."""
        finals = {argument: self._source(value) for argument, value in new.items()}
        if len(set(finals.values()) & set(self._nodes)) < len(finals):
            raise NoProgram
        reads = collections.Counter(self._source(one) for node in self._nodes for one in nodes_in((node.args, node.kwargs)))
        self._inner = {node for node in self._nodes if reads[node] == 1} - set(finals.values())
        calls: list[_Call] = []
        folded: set[fx.Node] = set()
        for node in reversed(self._nodes):
            if node not in folded:
                call, inside = self._call(node)
                folded |= inside
                calls.insert(0, call)
        return finals, calls

    def _source(self, node: fx.Node) -> fx.Node:
        while node in self._same:
            node = self._same[node]
        return node

    def _call(self, node: fx.Node) -> tuple[_Call, frozenset[fx.Node]]:
        """The call for a node, and the nodes of which it takes the work, of those that nothing else reads."""
        target: Any = node.target
        name, overload = str(target).split(".")[1:]
        args = tuple(self._source(one) if isinstance(one, fx.Node) else one for one in node.args)
        kwargs = dict(node.kwargs)
        if overload not in _OVERLOADS or (name not in FUNCTIONS and name not in ("clamp_min", "clamp_max")):
            raise NoProgram
        if name in ("add", "sub") and isinstance(args[1], fx.Node):
            return self._sum(node, name, args, kwargs.get("alpha", 1))
        if name in ("addcmul", "addcdiv"):
            product = self._product(args[1])
            value = _times(kwargs.get("value", 1), product.number)
            if value is not None and len(product.factors) == 1 and not product.divisors:
                return _Call(node, name, (args[0], product.factors[0], args[2]), {"value": value}), product.nodes
        if name == "lerp":
            args, kwargs = (args[:2], {"weight": args[2]}) if _is_scalar(args[2]) else (args, {})
        if name.startswith("clamp"):
            least = args[1] if name != "clamp_max" else None
            most = args[-1] if name == "clamp_max" or len(args) > 2 else None
            args, kwargs, name = args[:1], {"min": least, "max": most}, "clamp"
        if (
            not isinstance(args[0], fx.Node)
            or (name == "where" and not _is_scalar(args[0]))
            or any(isinstance(one, fx.Node) and name == "clamp" for one in kwargs.values())
        ):
            raise NoProgram
        return _Call(node, name, args, kwargs), frozenset()

    def _sum(self, node: fx.Node, name: str, args: tuple[Any, ...], alpha: Any) -> tuple[_Call, frozenset[fx.Node]]:
        """A sum of two, or a difference: one of them may be a product that is made on the way."""
        best: tuple[_Call, frozenset[fx.Node]] = _Call(node, name, args, {"alpha": alpha}), frozenset()
        second = (args[0], self._product(args[1]), alpha if name == "add" else -alpha)
        first = (args[1], self._product(args[0]), 1)
        for other, product, sign in (second, first)[: 2 if name == "add" and alpha == 1 else 1]:
            number = _times(sign, product.number)
            if number is None or _is_scalar(other) or len(product.nodes) <= len(best[1]):
                continue
            if product.divisors:
                if (len(product.factors), len(product.divisors)) == (1, 1):
                    best = _Call(node, "addcdiv", (other, *product.factors, *product.divisors), {"value": number}), product.nodes
            elif len(product.factors) == 2:
                best = _Call(node, "addcmul", (other, *product.factors), {"value": number}), product.nodes
            elif len(product.factors) == 1:
                best = _Call(node, "add", (other, *product.factors), {"alpha": number}), product.nodes
        return best

    def _product(self, one: Any) -> _Product:
        """What a number or a node is a product of, where nothing else reads what it is made of."""
        if not isinstance(one, fx.Node) or _is_scalar(one):
            return _Product(one, (), (), frozenset())
        one = self._source(one)
        whole = _Product(1, (one,), (), frozenset())
        if one not in self._inner:
            return whole
        if one.target is aten.neg.default:
            left, right = self._product(one.args[0]), _Product(-1, (), (), frozenset())
        elif one.target is aten.mul.Tensor:
            left, right = self._product(one.args[0]), self._product(one.args[1])
        elif one.target is aten.div.Tensor and isinstance(one.args[1], fx.Node) and not _is_scalar(one.args[1]):
            left, right = self._product(one.args[0]), _Product(1, (), (self._source(one.args[1]),), frozenset())
        else:
            return whole
        number = _times(left.number, right.number)
        factors, divisors = left.factors + right.factors, left.divisors + right.divisors
        if number is None or not factors or len(factors) + len(divisors) > 2 or any(map(_is_scalar, factors)):
            return whole
        return _Product(number, factors, divisors, left.nodes | right.nodes | {one})


def _times(left: Any, right: Any) -> Any:
    """The product of two numbers; of a scalar's node and 1 that node; else None."""
    if isinstance(left, fx.Node) or isinstance(right, fx.Node):
        return right if left == 1 else left if right == 1 else None
    return left * right


def _in_places(calls: Sequence[_Call], finals: Mapping[fx.Node, fx.Node], read: Sequence[fx.Node]) -> tuple[Program, tuple[fx.Node, ...]]:
    """Says where each call's result goes: where an argument lies of which the old value is not needed any more, or in a tensor in between."""
    last = {one: i for i, call in enumerate(calls) for one in (*call.args, *call.kwargs.values()) if isinstance(one, fx.Node)}
    own = {final: f"w{i}" for i, final in enumerate(finals.values())}
    place = {argument: f"w{i}" for i, argument in enumerate(finals)} | {one: f"r{i}" for i, one in enumerate(read)}
    holds = {f"w{i}": argument for i, argument in enumerate(finals)}  # place that may be written to -> what is there
    scalars: dict[fx.Node, int] = {}
    program: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = []
    free: list[str] = []
    between = 0

    def named(one: Any, kind: str) -> Any:
        if _is_scalar(one):
            return f"{kind}{scalars.setdefault(one, len(scalars))}"
        return place[one] if isinstance(one, fx.Node) else one

    for now, (node, name, args, kwargs) in enumerate(calls):
        given = tuple(named(one, "s") for one in args), {key: named(one, "n") for key, one in kwargs.items()}
        left = [where for where, held in holds.items() if last.get(held, -1) <= now and held not in own and where not in free]
        read_here = [where for where in dict.fromkeys(given[0]) if where in left]
        if own.get(node) in left:
            out = own[node]
        elif node not in own and read_here:
            out = read_here[0]
        elif free:
            out = free.pop()
        else:
            out, between = f"t{between}", between + 1
        free += [where for where in left if where[0] == "t" and where != out and where not in free]
        place[node], holds[out] = out, node
        program.append((name, *given, out))
    copies: list[Any] = [("clone", (place[final],), {}, where) for final, where in own.items() if place[final] != where]
    return Program((*program, *copies), len(finals), len(read), len(scalars), between), tuple(scalars)
