"""FX nodes that compute symbolic numbers: written when something first asks for one, once for each expression."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.errors import LoweringError
from ort_backend.lowering import symbolic
from ort_backend.lowering.axes import element_count
from ort_backend.lowering.calls import Calls
from ort_backend.lowering.complex_numbers import Complex
from ort_backend.lowering.constants import constant
from ort_backend.lowering.provenance import at, operator_name, user_line

aten = torch.ops.aten


def is_symbolic_number(node: fx.Node) -> bool:
    """Whether a node computes a symbolic number."""
    return "val" in node.meta and symbolic.is_symbolic(node.meta["val"]) and node.op == "call_function"


class SymbolicNumbers:
    """The values of one ONNX graph's symbolic numbers, by the name of their expression."""

    def __init__(self, op: Any, graph: ir.Graph, calls: Calls) -> None:
        self._op, self._graph, self._calls = op, graph, calls
        self._known: dict[str, ir.Value] = {}

    def remember(self, fake: torch.SymInt, value: ir.Value) -> None:
        """Says that `value` is the number `fake`."""
        name = symbolic.dim(fake)
        if isinstance(name, str):
            value.meta["symbol"] = name
            self._known.setdefault(name, value)

    def lower(self, node: fx.Node, operand: Callable[[fx.Node], Any]) -> Any:
        """The number that `node` computes: a Python number where it is known, else an ONNX scalar.

        Args:
            node: The node.
            operand: What stands for the node of an argument.

        Raises:
            LoweringError: it is no symbolic number, or one that has no ONNX form.
        """
        fake = node.meta.get("val")
        if not is_symbolic_number(node):
            raise LoweringError(f"{node.format_node()} is used before it is computed")
        if not isinstance(fake, torch.SymInt):
            known = isinstance(fake, (int, float, bool))
            return fake if known else self._calls.stamp(self._write(node, operand), fake)
        name = symbolic.dim(fake)
        if isinstance(name, int):
            return name
        if name not in self._known:
            value = self._calls.stamp(self._write(node, operand), fake)
            self.remember(fake, value)
            return value
        return self._known[name]

    def number(self, fake: int | torch.SymInt, reader: fx.Node) -> Any:
        """The same for a number that no node computes, and `reader` asks for: written out from the sizes that it is made of.

        Raises:
            LoweringError: it is made of others.
        """
        if isinstance(fake, int):
            return fake
        written = symbolic.of_expression(self._op, fake.node.expr, self._named)
        if not isinstance(written, ir.Value):
            raise LoweringError(f"{fake} follows from no size of the graph, and {operator_name(reader.target)} needs it{at(user_line(reader))}")
        return self._calls.stamp(written, fake)

    def _write(self, node: fx.Node, operand: Callable[[fx.Node], Any]) -> Any:
        args: list[Any] = [fx.map_arg(arg, operand) for arg in node.args]
        if isinstance(args[0], Complex):
            args[0] = args[0].real
        if node.target is aten.sym_size.int:
            return symbolic.size_of(self._op, *args)
        if node.target is aten.sym_numel.default:
            return element_count(self._op, args[0])
        if node.target is aten._local_scalar_dense.default:
            dtype, _ = self._calls.type_of(node.meta["val"])
            return self._op.Reshape(self._op.Cast(args[0], to=dtype), constant(self._op, [], ir.DataType.INT64))
        if node.target is operator.getitem:
            return args[0][args[1]]
        if node.target in symbolic.FUNCTIONS:
            return symbolic.write(self._op, node.target, args)
        fake = node.meta["val"]  # a stride, an offset: written out from the sizes that it is made of
        written = symbolic.of_expression(self._op, fake.node.expr, self._named) if isinstance(fake, torch.SymInt) else None
        if isinstance(written, ir.Value):
            return written
        raise LoweringError(f"{operator_name(node.target)} of symbolic numbers has no ONNX form{at(user_line(node))}")

    def _named(self, name: str) -> ir.Value | None:
        """The value of a size by the name of its expression, if it has been computed or is the size of a graph input."""
        if name not in self._known:
            for value in self._graph.inputs:
                for axis, part in enumerate(value.shape or ()):
                    if getattr(part, "value", None) == name:
                        self._known[name] = symbolic.size_of(self._op, value, axis)
        return self._known.get(name)
