"""Writes the nodes of a graph anew with the channels of their pictures as the last dimension: (N, ..., C) for (N, C, ...)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.kernels.channels_last import to_first, to_last

aten = torch.ops.aten


def permutation(node: fx.Node) -> list[int] | None:
    """The dimensions that a node permutes; None if it is something else."""
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return [d % dims_of(node) for d in dims]
    if node.target is aten.transpose.int:
        order = [*range(dims_of(node))]
        a, b = node.args[1:]
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
        return order
    return None


def dims_of(node: fx.Node) -> int:
    """How many dimensions a node's tensor has."""
    return len(node.meta["val"].shape)


Write = Callable[["Writer", fx.Node], Any]


class Writer:
    """Writes the chosen nodes anew.

    Attributes:
        last: What stands for a node with the channels last; for a backward, a tuple of its results.
    """

    def __init__(self, graph: fx.Graph, writes: Mapping[fx.Node, Write], pictures: Collection[fx.Node]) -> None:
        """
        Args:
            graph: What is rewritten.
            writes: For each chosen node, what makes it anew and returns what then stands for it.
            pictures: Those of them whose value has the channels last then; that of the others is the same.
        """
        self._graph, self._writes, self._pictures = graph, writes, pictures
        self.last: dict[fx.Node, Any] = {}

    def write(self) -> None:
        """All of them, in the order of the graph; then what reads them from outside."""
        written = [node for node in self._graph.nodes if node in self._writes]
        for node in written:
            with self._graph.inserting_before(node):
                self.last[node] = self._writes[node](self, node)
        for node in written:
            self._hand_out(node)
        for node in reversed(written):
            self._graph.erase_node(node)

    def _hand_out(self, node: fx.Node) -> None:
        last: Any = self.last[node]
        if isinstance(last, tuple):
            self._replace({user: last[user.args[1]] for user in node.users if user not in self._writes})  # type: ignore[index]
            return
        if node not in self._pictures:
            node.replace_all_uses_with(last, lambda user: user not in self._writes)
            return
        dims = dims_of(node)
        for user in [user for user in node.users if user not in self._writes and permutation(user) == to_last(dims)]:
            last.meta["val"] = user.meta["val"]  # in the trace's order of memory
            self._replace({user: last})
        if rest := [user for user in node.users if user not in self._writes]:
            with self._graph.inserting_after(last):
                first = self._graph.call_function(aten.permute.default, (last, to_first(dims)))
            first.meta = dict(node.meta)
            for user in rest:
                user.replace_input_with(node, first)

    def _replace(self, nodes: dict[fx.Node, Any]) -> None:
        for node, other in nodes.items():
            if node.users:
                node.replace_all_uses_with(other)
            self._graph.erase_node(node)

    def call(self, like: fx.Node, target: Any, *args: Any, shape: Sequence[Any]) -> fx.Node:
        """A call in the place of the node `like`, with its metadata; the result has the first argument's dtype.

        Args:
            like: The node that is written.
            target: The operator.
            args: Its arguments.
            shape: Of the result, sizes or nodes of sizes: to infer it from the operator takes longer.
        """
        return self._made(like, self._graph.call_function(target, args), shape, args[0].meta["val"].dtype)

    def again(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call that gives what `node` gave, with the channels last if it is a picture."""
        value = node.meta["val"]
        shape = [value.shape[d] for d in to_last(value.dim())] if node in self._pictures else value.shape
        return self._made(node, self._graph.call_function(target, args, kwargs), shape, value.dtype)

    def items(
        self, node: fx.Node, call: fx.Node, shapes: Sequence[Sequence[Any] | None], dtypes: Sequence[torch.dtype] = ()
    ) -> tuple[fx.Node | None, ...]:
        """The results of `call` that somebody reads of `node`'s; None for the others, and for those without a shape. `dtypes`: else the call's."""
        read = {user.args[1] for user in node.users}
        kinds = dtypes or [call.meta["val"].dtype] * len(shapes)
        made = [
            None if shape is None else self._made(node, self._graph.call_function(operator.getitem, (call, i)), shape, dtype)
            for i, (shape, dtype) in enumerate(zip(shapes, kinds, strict=True))
        ]
        call.meta["val"] = tuple(None if one is None else one.meta["val"] for one in made)
        for i, one in enumerate(made):
            if one is not None and i not in read:
                self._graph.erase_node(one)
        return tuple(one if i in read else None for i, one in enumerate(made))

    def _made(self, like: fx.Node, node: fx.Node, shape: Sequence[Any], dtype: torch.dtype) -> fx.Node:
        fake: Any = next(value for one in like.all_input_nodes if isinstance(value := one.meta.get("val"), torch.Tensor))
        with fake.fake_mode:
            value = torch.empty([one.meta["val"] if isinstance(one, fx.Node) else one for one in shape], dtype=dtype, device=fake.device)
        node.meta = {**like.meta, "val": value}
        return node

    def permute(self, node: fx.Node, dims: list[int], like: fx.Node) -> fx.Node:
        """The same elements with the dimensions in another order."""
        return self.call(like, aten.permute.default, node, dims, shape=[node.meta["val"].shape[d] for d in dims])

    def view(self, node: fx.Node, sizes: list[Any], like: fx.Node) -> fx.Node:
        """The same elements in other sizes. They lie in the one order of ONNX Runtime's tensors, whatever it is in the trace."""
        others = [one.meta["val"] if isinstance(one, fx.Node) else one for one in sizes if one != -1]
        missing = node.meta["val"].numel() // max(1, math.prod(others)) if -1 in sizes else -1
        return self.call(like, aten.view.default, node, sizes, shape=[missing if one == -1 else one for one in sizes])

    def picture(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """A tensor of at least three dimensions with the channels last."""
        if node not in self.last:
            is_permuted = permutation(node) == to_first(dims_of(node))
            made: Any = node.args[0] if is_permuted else self.permute(node, to_last(dims_of(node)), like)
            self.last[node] = made
        return self.last[node]

    def spread(self, node: fx.Node, dims: int, like: fx.Node) -> fx.Node:
        """What is added to, or multiplied with, pictures of so many dimensions."""
        if node.meta["val"].dim() == 0:
            return node
        if dims_of(node) == dims:
            return self.picture(node, like)
        for _ in range(dims - dims_of(node)):
            node = self.call(like, aten.unsqueeze.default, node, 0, shape=[1, *node.meta["val"].shape])
        return self.permute(node, to_last(dims), like)

    def sizes(self, node: fx.Node) -> list[Any]:
        """A tensor's sizes, as numbers or nodes."""
        shape = node.meta["val"].shape
        return [n if isinstance(n, int) else self._size(node, d) for d, n in enumerate(shape)]

    def _size(self, node: fx.Node, dim: int) -> fx.Node:
        made = self._graph.call_function(aten.sym_size.int, (node, dim))
        made.meta["val"] = node.meta["val"].shape[dim]
        return made
