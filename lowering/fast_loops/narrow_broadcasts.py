"""Tensors that are repeated along short rows, on the CPU: repeated in front of the operator, by what is fast at it.

ONNX Runtime's pointwise operators go from one stretch to the next in which each operand is whole, or one number, and each stretch takes them 10 ns.
`(65536, 3) * (65536, 1)` takes 700 us, as many as `(65536, 3) * (3,)`, `(256, 1, 3) - (1, 256, 3)` 800, and Where three times as many; operands of
the same shape take 33. Distances, directions, boxes, colours and the scales of channels that come last are such tensors.

What is repeated                          becomes                                                                   up to numbers in a row
a row: (n,) beside (R, n)                 some rows in one, (R / k, k n), and the row k times: nothing is copied    128
a row or block: (R, 1, n), (n,)           Expand, which copies rows                                                 16
a number a row: (R, 1)                    Expand to (n, R), and a Transpose                                         8
the same, in a product in float32         a MatMul with ones; the sign of a zero is lost, it is a zero in any case  32

Measured on an AMD EPYC of family 25, model 17, for 1024 to 65,536 rows; 1.19.2 and 1.32.0 alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.constants import int64s
from ort_backend.lowering.fast_loops.rewriting import (
    BROADCASTING,
    EXPANDED,
    are_fixed,
    are_named,
    attributes_of,
    insert,
    replace,
    row_of_ones,
    shape_with_unknown,
)
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.symbolic import example, vector_of_sizes

# Stretches from which on two more nodes are worth it.
_MANY = 1024
# Numbers in a row up to which what is repeated is worth each of the ways above.
_WIDE, _COPIED, _TRANSPOSED, _MULTIPLIED = 128, 16, 8, 32
# Numbers in a row that is made of several.
_LONG = 1024
_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "Conv")

Dims = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The result of a pointwise operator as rows, in each of which every operand is whole, or one number.

    Attributes:
        shape: The result's shape.
        operands: The operands' shapes, with as many dimensions.
        first: The first of the dimensions that are a row.
        width: Numbers in a row; the example of it where sizes are symbolic.
    """

    shape: Dims
    operands: Sequence[Dims]
    first: int
    width: int

    def is_single(self, i: int) -> bool:
        """Whether operand `i` is one number."""
        return all(size == 1 for size in self.operands[i])

    def is_whole(self, i: int) -> bool:
        """Whether operand `i` is not repeated."""
        return _same(self.operands[i], self.shape)

    def is_row(self, i: int) -> bool:
        """Whether operand `i` is one row."""
        return all(size == 1 for size in self.operands[i][: self.first]) and self.has_rows(i)

    def has_rows(self, i: int) -> bool:
        """Whether the rows of operand `i` are whole."""
        return _same(self.operands[i][self.first :], self.shape[self.first :])

    def is_column(self, i: int) -> bool:
        """Whether operand `i` has a number for each row, or for each of those that follow one another, and how long a row is will not change."""
        if not are_fixed(self.shape[self.first :]):
            return False
        lead = [(size, whole) for size, whole in zip(self.operands[i], self.shape[: self.first]) if whole != 1]
        return all(size == 1 for size in self.operands[i][self.first :]) and bool(lead) and lead[-1][0] == lead[-1][1]

    def repeated(self, i: int) -> Dims:
        """The shape of operand `i` where its rows are whole."""
        return [*self.operands[i][: self.first], *self.shape[self.first :]]


def repeat_narrow(op: Any, graph: ir.Graph, hints: Mapping[str, int | None]) -> None:
    """Repeats what pointwise operators would repeat along short rows, in a finished graph, in place.

    Args:
        op: The builder of the graph.
        graph: The finished graph.
        hints: The examples of symbolic sizes, by name; None where a size follows from values.
    """
    repeated: dict[Any, ir.Value] = {}
    for node in list(graph):
        if node.op_type == "YieldOp":
            repeated.clear()  # what is made in front of it would be kept for what is behind it
        if node.op_type == "Expand" and not node.domain:
            _repeat_fast(op, graph, node, hints)
        if node.domain or node.op_type not in BROADCASTING or any(value is None or value.shape is None for value in node.inputs):
            continue
        shapes: list[Any] = [value.shape for value in node.inputs]  # type: ignore[union-attr]
        rows = _rows(shapes, hints)
        if rows is None or (node.op_type == "Add" and any(_is_product(value) for value in node.inputs)):  # a bias: one node with its product
            continue
        if (count := _rows_in_one(node, rows)) > 1:
            replace(graph, node, "rows", _of_long_rows, op, node, rows, count)
        else:
            _repeat(op, graph, node, rows, repeated)


def _repeat_fast(op: Any, graph: ir.Graph, node: ir.Node, hints: Mapping[str, int | None]) -> None:
    """Writes an Expand of a number a row as what is fast at it."""
    value, shape = node.inputs[0], node.outputs[0].shape
    if value is None or value.shape is None or shape is None or value.const_value is not None or sum(not isinstance(size, int) for size in shape) > 1:
        return  # a Reshape can find out one size alone
    rows = _rows([value.shape, shape], hints)
    if rows is None or not rows.is_column(0) or not _same(rows.repeated(0), rows.shape):
        return
    if not (value.dtype in EXPANDED if rows.width <= _TRANSPOSED else value.dtype == ir.DataType.FLOAT):
        return
    write = _transposed if rows.width <= _TRANSPOSED else _multiplied
    replace(graph, node, "repeated", write, op, value, rows, shape_with_unknown(op, shape))


def _is_product(value: ir.Value | None) -> bool:
    maker = value.producer() if value is not None else None
    return maker is not None and maker.op_type in _PRODUCTS


def _rows(shapes: Sequence[ir.Shape], hints: Mapping[str, int | None]) -> _Rows | None:
    """How the result consists of rows; None where there are few, or long ones, or nothing is repeated along them."""
    if not all(map(are_named, shapes)):
        return None
    whole, *others = sorted(map(list, shapes), key=len, reverse=True)
    rank = len(whole)
    if all(other == whole or all(size == 1 for size in other) for other in others):
        return None
    operands: list[Dims] = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    shape = [next((size for size in sizes if size != 1), 1) for sizes in zip(*operands)]
    if any(size not in (1, whole) for operand in operands for size, whole in zip(operand, shape)):
        return None  # equal only by what is not known here
    patterns = [tuple(size == 1 for size in sizes) if whole != 1 else None for sizes, whole in zip(zip(*operands), shape)]
    last = next((pattern for pattern in reversed(patterns) if pattern is not None), None)
    first = next((at + 1 for at in reversed(range(rank)) if patterns[at] not in (None, last)), 0)
    width, count = (math.prod(example(size, hints, unknown=_MANY) for size in sizes) for sizes in (shape[first:], shape[:first]))
    if last is None or first == 0 or count < _MANY or not 0 < width <= _WIDE:
        return None
    return _Rows(shape, operands, first, width)


def _same(sizes: Dims, others: Dims) -> bool:
    return all(size == other for size, other in zip(sizes, others))


def _rows_in_one(node: ir.Node, rows: _Rows) -> int:
    """How many rows are made one, where all that is repeated is rows; 1 where they are not."""
    operands = range(len(rows.operands))
    kinds = [rows.is_whole(i) or rows.is_single(i) or rows.is_row(i) for i in operands]
    lead, row = rows.shape[: rows.first], rows.shape[rows.first :]
    is_known = sum(not isinstance(size, int) for size in lead) <= 1 and are_fixed(row)
    if not is_known or not all(kinds) or not any(rows.is_whole(i) for i in operands) or node.outputs[0].is_graph_output():
        return 1  # a Reshape can find out one size alone, and one that makes an output copies it
    count, most = math.prod(size for size in lead if isinstance(size, int)), max(_LONG // rows.width, 2)
    fitting = next(divisor for divisor in range(min(most, count), 0, -1) if count % divisor == 0)
    return fitting if 4 * rows.width * fitting >= _LONG else 1


def _of_long_rows(op: Any, node: ir.Node, rows: _Rows, count: int) -> ir.Value:
    lead = rows.shape[: rows.first]
    wide = [math.prod(lead) // count if are_fixed(lead) else -1, count * rows.width]
    operands = []
    for i, value in enumerate(node.inputs):
        assert value is not None
        if rows.is_whole(i):
            value = _of_width(value, wide[1]) or op.Reshape(value, int64s(op, wide))
        elif not rows.is_single(i):
            copies = op.Expand(op.Reshape(value, int64s(op, [1, rows.width])), int64s(op, [count, rows.width]))
            value = op.Reshape(copies, int64s(op, [1, wide[1]]))
        elif len(value.shape) > 2:  # type: ignore[arg-type]
            value = op.Reshape(value, int64s(op, [1, 1]))
        operands.append(value)
    made = getattr(op, node.op_type)(*operands, **attributes_of(node))
    return op.Reshape(typed(made, node.outputs[0].dtype, wide if -1 not in wide else [None, wide[1]]), shape_with_unknown(op, rows.shape))


def _of_width(value: ir.Value, width: int) -> ir.Value | None:
    """What `value` is made of by a Reshape, if that has the long rows wanted already."""
    maker = value.producer()
    if maker is None or maker.op_type != "Reshape" or (source := maker.inputs[0]) is None or source.shape is None or len(source.shape) != 2:
        return None
    return source if source.shape[1] == width else None


def _repeat(op: Any, graph: ir.Graph, node: ir.Node, rows: _Rows, repeated: dict[Any, ir.Value]) -> None:
    """Gives the operator operands that are repeated already, if it can have them all."""
    ways = {i: _way(node, rows, i) for i in range(len(rows.operands)) if not rows.is_whole(i) and not rows.is_single(i)}
    if None in ways.values():
        return
    for i, way in ways.items():
        key = (node.inputs[i], way, rows.first, tuple(map(str, rows.shape)))
        if key not in repeated:
            repeated[key] = insert(graph, node, f"repeated_{i}", _repeated, op, node, rows, i, way)
        node.replace_input_with(i, repeated[key])


def _repeated(op: Any, node: ir.Node, rows: _Rows, i: int, way: Callable[..., ir.Value]) -> ir.Value:
    value: Any = node.inputs[i]
    wanted = rows.shape if way is _copied else rows.repeated(i)
    return typed(way(op, value, rows, _shape_of(op, node, rows, wanted)), value.dtype, wanted)


def _shape_of(op: Any, node: ir.Node, rows: _Rows, wanted: Dims) -> ir.Value:
    """A shape, from the operands where it is not known."""
    values: Sequence[Any] = node.inputs
    rank = len(wanted)
    whole = next((value for value, operand in zip(values, rows.operands) if len(value.shape) == rank and _same(operand, wanted)), None)
    if whole is not None and not are_fixed(wanted):
        return op.Shape(whole)

    def size(d: int) -> int | tuple[ir.Value, int]:
        if isinstance(wanted[d], int):
            return wanted[d]
        return next(value for value, operand in zip(values, rows.operands) if operand[d] == wanted[d]), d - rank

    return vector_of_sizes(op, [size(d) for d in range(rank)])


def _way(node: ir.Node, rows: _Rows, i: int) -> Callable[..., ir.Value] | None:
    """How operand `i` is repeated, None if it is not."""
    dtype = node.inputs[i].dtype  # type: ignore[union-attr]
    if dtype in EXPANDED and rows.has_rows(i) and rows.width <= _COPIED:
        return _copied
    if dtype in EXPANDED and rows.is_column(i) and rows.width <= _TRANSPOSED:
        return _transposed
    if dtype == ir.DataType.FLOAT and node.op_type == "Mul" and rows.is_column(i) and rows.width <= _MULTIPLIED:
        return _multiplied
    return None


def _copied(op: Any, value: ir.Value, rows: _Rows, shape: ir.Value) -> ir.Value:
    return op.Expand(value, shape)


def _transposed(op: Any, value: ir.Value, rows: _Rows, shape: ir.Value) -> ir.Value:
    columns = op.Expand(op.Reshape(value, int64s(op, [1, -1])), int64s(op, [rows.width, 1]))
    return op.Reshape(op.Transpose(columns, perm=[1, 0]), shape)


def _multiplied(op: Any, value: ir.Value, rows: _Rows, shape: ir.Value) -> ir.Value:
    ones = row_of_ones(op, rows.width, value.dtype)  # type: ignore[arg-type]
    return op.Reshape(op.MatMul(op.Reshape(value, int64s(op, [-1, 1])), ones), shape)
