"""What the passes over finished graphs share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_backend.lowering.constants import int64s, named_constant
from ort_backend.lowering.provenance import move_before, newest, take_place

# Operators that broadcast their operands, element by element.
BROADCASTING = {
    "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod",
    "Mul", "Or", "Pow", "Sub", "Where", "Xor",
}  # fmt: skip

# What the CPU provider has an Expand for, among the dtypes of graphs.
EXPANDED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL)


def replace(graph: ir.Graph, node: ir.Node, part: str, write: Callable[..., ir.Value], *args: Any) -> None:
    """Puts what `write(*args)` writes in the place of `node`, which has one result; the nodes are called after it and `part`."""
    before = len(graph)
    result = write(*args)
    take_place(graph, node, newest(graph, len(graph) - before), result, f"{node.outputs[0].name}/{part}")


def insert(graph: ir.Graph, node: ir.Node, part: str, write: Callable[..., ir.Value], *args: Any) -> ir.Value:
    """Puts what `write(*args)` writes in front of `node`, named likewise, and gives the result back."""
    before = len(graph)
    result = write(*args)
    move_before(graph, node, newest(graph, len(graph) - before), f"{node.outputs[0].name}/{part}")
    return result


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """A node's attributes as a builder takes them."""
    return {name: attribute.value for name, attribute in node.attributes.items() if isinstance(attribute, ir.Attr)}


def are_fixed(sizes: Iterable[Any]) -> bool:
    """Whether sizes are all numbers."""
    return all(isinstance(size, int) for size in sizes)


def are_named(sizes: Iterable[Any]) -> bool:
    """Whether sizes are all numbers or expressions: of two without a name nobody knows whether they are equal."""
    return all(isinstance(size, int) or size.value is not None for size in sizes)


def product(sizes: Sequence[Any]) -> int:
    """The product of sizes, -1 where one is not a number: for a Reshape, which finds out one."""
    return math.prod(sizes) if are_fixed(sizes) else -1


def shape_with_unknown(op: Any, sizes: Iterable[Any]) -> ir.Value:
    """Sizes for a Reshape, at most one of which is not a number."""
    return int64s(op, [size if isinstance(size, int) else -1 for size in sizes])


def row_of_ones(op: Any, length: int, dtype: ir.DataType) -> ir.Value:
    """The constant (1, length) of ones."""
    return named_constant(op, f"{length} ones", np.ones((1, length)), dtype)


def sum_axes(node: ir.Node) -> list[int] | None:
    """The axes of a sum of floating point numbers, from the front; None where they or the shape are unknown, or there are none."""
    value, given = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if value is None or value.shape is None or value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    if given is None:
        return list(range(len(value.shape))) or None
    if given.const_value is None:
        return None
    return sorted(int(axis) % len(value.shape) for axis in given.const_value.numpy()) or None


def keeps_dims(node: ir.Node) -> bool:
    """Whether a reduction leaves dimensions of size 1."""
    return bool(node.attributes["keepdims"].as_int() if "keepdims" in node.attributes else 1)
