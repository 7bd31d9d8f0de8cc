"""Symbolic integers of dynamic shapes as int64 scalars of the ONNX graph."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ort_backend.lowering.constants import constant, int64s

Number = int | float | ir.Value


_LEAST = "least"


def is_symbolic(value: object) -> bool:
    """Whether a fake value (`node.meta["val"]`) is a number instead of a tensor."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def dim(size: int | torch.SymInt) -> int | str:
    """One dimension for an `ir.Shape`: the number, or the expression as its name.

    An expression that a guard holds to 1 is 1: PyTorch drops such dimensions and stretches them, but goes on writing the expression.
    """
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        return 1 if size.node.hint == 1 and statically_known_true(size == 1) else str(expression)
    return int(size)


def hint(size: int | torch.SymInt) -> int:
    """A size, or the example of a symbolic one (1 if there is none, as of the ragged dimension of a nested tensor)."""
    if not isinstance(size, torch.SymInt):
        return size
    known = size.node.hint
    return known if isinstance(known, int) else 1


def example(size: int | ir.SymbolicDim, hints: Mapping[str, int | None], unknown: int = 0) -> int:
    """A dimension of an ONNX value, or the example of a symbolic one by its name; `unknown` where there is none."""
    return size if isinstance(size, int) else hints.get(size.value or "") or unknown


def may_be_zero(size: int | torch.SymInt) -> bool:
    """Whether a size may be 0: what a slice leaves of a changing one, or one that depends on values (rows under a mask), beside 0 itself."""
    return not statically_known_true(size > 0)


def with_sign(value: Any, fake: Any) -> Any:
    """The value of a number in the graph, after it was noted whether PyTorch knows it to be positive, as sizes are, or not to be negative."""
    if isinstance(fake, torch.SymInt) and isinstance(value, ir.Value):
        if not may_be_zero(fake):
            value.meta[_LEAST] = 1
        elif statically_known_true(fake >= 0):
            value.meta[_LEAST] = 0
    return value


def is_positive(value: ir.Value) -> bool:
    """Whether this is a number that is known to be positive."""
    return value.meta.get(_LEAST) == 1


def may_be_negative(value: ir.Value) -> bool:
    """Whether this is a number that is not known to be 0 or more."""
    if value.const_value is not None:
        return bool(value.const_value.numpy() < 0)
    return _LEAST not in value.meta


def have_same_sizes(sizes: Sequence[int | torch.SymInt], others: Sequence[int | torch.SymInt]) -> bool:
    """Whether shapes are known to be equal. Nothing is assumed: of sizes that follow from values nobody could."""
    return len(sizes) == len(others) and all(statically_known_true(size == other) for size, other in zip(sizes, others))


class SymbolicSize(ir.SymbolicDim):
    """A dimension of a dynamic shape under its expression's name, with what torch knows of it.

    Attributes:
        size: The fake value's symbolic size.
    """

    __slots__ = ("size",)

    def __init__(self, size: torch.SymInt, name: str) -> None:
        super().__init__(name)
        self.size = size


def shape(sizes: Sequence[int | torch.SymInt], extra: tuple[int, ...] = ()) -> ir.Shape:
    """The ONNX shape of fake sizes."""
    return ir.Shape([*map(_size, sizes), *extra])


def _size(size: int | torch.SymInt) -> int | SymbolicSize:
    name = dim(size)
    return SymbolicSize(size, name) if isinstance(size, torch.SymInt) and isinstance(name, str) else int(name)


def name_of(size: Number) -> int | str | None:
    """What `dim` would call this size argument of a lowering: the number, the name of its expression, or None if it has none."""
    if isinstance(size, ir.Value):
        return size.meta.get("symbol")
    return int(size)


def _floor_div(op: Any, a: ir.Value, b: ir.Value) -> ir.Value:
    if a.dtype == ir.DataType.DOUBLE:
        return op.Floor(op.Div(a, b))
    if may_be_negative(a) or may_be_negative(b):  # ONNX's division truncates; its remainder has the sign of the divisor, as Python's has
        return op.Div(op.Sub(a, op.Mod(a, b)), b)
    return op.Div(a, b)


def _mod(op: Any, a: ir.Value, b: ir.Value) -> ir.Value:
    if a.dtype == ir.DataType.DOUBLE:  # of which ONNX's remainder has the sign of the dividend
        return op.Sub(a, op.Mul(_floor_div(op, a, b), b))
    return op.Mod(a, b)


def _pow(op: Any, a: Number, b: Number) -> ir.Value:
    return op.Pow(a, b)


def _true_div(op: Any, a: Number, b: Number) -> ir.Value:
    return op.Div(as_double(op, a), as_double(op, b))


def as_double(op: Any, value: Number) -> ir.Value:
    """`value` as a float64 scalar, Python's own float."""
    if isinstance(value, ir.Value):
        return value if value.dtype == ir.DataType.DOUBLE else op.Cast(value, to=ir.DataType.DOUBLE)
    return constant(op, float(value), ir.DataType.DOUBLE)


def _fold(write: Callable[..., ir.Value]) -> Callable[..., ir.Value]:
    """Takes any number of arguments from left to right."""

    def fold(op: Any, *values: Number) -> ir.Value:
        result: Any = values[0]
        for value in values[1:]:
            result = write(op, result, value)
        return result

    return fold


def _rounded(kind: str) -> Callable[..., ir.Value]:
    def round_(op: Any, value: Number) -> ir.Value:
        if isinstance(value, ir.Value) and value.dtype == ir.DataType.INT64:
            return value
        return op.Cast(getattr(op, kind)(as_double(op, value)), to=ir.DataType.INT64)

    return round_


def _truncated(op: Any, value: ir.Value) -> ir.Value:
    return value if value.dtype == ir.DataType.INT64 else op.Cast(value, to=ir.DataType.INT64)


def _round(op: Any, value: ir.Value, digits: Number | None = None) -> ir.Value:
    """Python's `round`, which takes what lies in the middle to the even neighbour, as ONNX does."""
    if digits is None:
        return _rounded("Round")(op, value)
    scale = op.Pow(as_double(op, 10), as_double(op, digits))
    result = op.Div(op.Round(op.Mul(as_double(op, value), scale)), scale)
    return result if value.dtype == ir.DataType.DOUBLE else _truncated(op, result)


def _log2(op: Any, value: Number) -> ir.Value:
    """The logarithm, exact of powers of 2: programs round it up, for the next of them."""
    value = as_double(op, value)
    logarithm = op.Div(op.Log(value), as_double(op, math.log(2)))
    nearest = op.Round(logarithm)
    return op.Where(op.Equal(op.Pow(as_double(op, 2), nearest), value), nearest, logarithm)


def _cos(op: Any, value: Number) -> ir.Value:
    return op.Sin(op.Add(as_double(op, value), as_double(op, math.pi / 2)))  # ONNX Runtime has no cosine of float64


def _half_of_exponentials(join: str) -> Callable[..., ir.Value]:
    def write(op: Any, value: Number) -> ir.Value:
        value = as_double(op, value)
        return op.Div(getattr(op, join)(op.Exp(value), op.Exp(op.Neg(value))), as_double(op, 2))

    return write


def _of_bits(kind: str) -> Callable[..., ir.Value]:
    """A function of truth values that Python has for the bits of integers, too."""

    def write(op: Any, a: ir.Value, b: ir.Value) -> ir.Value:
        return getattr(op, kind if a.dtype == ir.DataType.BOOL else f"Bitwise{kind}")(a, b)

    return write


# Functions of numbers that Dynamo and AOTAutograd put into graphs -> how they are written in ONNX.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    operator.add: lambda op, a, b: op.Add(a, b),
    operator.sub: lambda op, a, b: op.Sub(a, b),
    operator.mul: lambda op, a, b: op.Mul(a, b),
    operator.floordiv: _floor_div,
    operator.truediv: _true_div,
    operator.mod: _mod,
    operator.pow: _pow,
    operator.neg: lambda op, a: op.Neg(a),
    operator.eq: lambda op, a, b: op.Equal(a, b),
    operator.lt: lambda op, a, b: op.Less(a, b),
    operator.le: lambda op, a, b: op.LessOrEqual(a, b),
    operator.gt: lambda op, a, b: op.Greater(a, b),
    operator.ge: lambda op, a, b: op.GreaterOrEqual(a, b),
    operator.ne: lambda op, a, b: op.Not(op.Equal(a, b)),
    operator.and_: _of_bits("And"),
    operator.or_: _of_bits("Or"),
    operator.xor: _of_bits("Xor"),
    operator.lshift: lambda op, a, b: op.Mul(a, op.Pow(constant(op, 2, ir.DataType.INT64), b)),
    operator.rshift: lambda op, a, b: _floor_div(op, a, op.Pow(constant(op, 2, ir.DataType.INT64), b)),
    torch.sym_float: as_double,
    torch.sym_int: _truncated,
    torch.sym_not: lambda op, a: op.Not(a),
    torch.sym_max: _fold(lambda op, a, b: op.Max(a, b)),
    torch.sym_min: _fold(lambda op, a, b: op.Min(a, b)),
    torch.sym_ite: lambda op, c, a, b: op.Where(c, a, b),
    math.floor: _rounded("Floor"),
    math.ceil: _rounded("Ceil"),
    math.trunc: _truncated,
    round: _round,
    operator.abs: lambda op, a: op.Abs(a),
}
if hasattr(torch, "sym_sum"):
    FUNCTIONS[torch.sym_sum] = lambda op, values: _fold(lambda op, a, b: op.Add(a, b))(op, *values)
_OF_FRACTIONS: dict[str, Callable[..., ir.Value]] = {
    "_sym_sqrt": lambda op, a: op.Sqrt(as_double(op, a)),
    "sym_sqrt": lambda op, a: op.Sqrt(as_double(op, a)),
    "_sym_log2": _log2,
    "_sym_sin": lambda op, a: op.Sin(as_double(op, a)),
    "_sym_cos": _cos,
    "_sym_tan": lambda op, a: op.Div(op.Sin(as_double(op, a)), _cos(op, a)),
    "_sym_sinh": _half_of_exponentials("Sub"),
    "_sym_cosh": _half_of_exponentials("Add"),
    "_sym_tanh": lambda op, a: op.Tanh(as_double(op, a)),
}
for _name, _write in _OF_FRACTIONS.items():
    if hasattr(torch, _name):
        FUNCTIONS[getattr(torch, _name)] = _write


# Kinds of sympy expressions that sizes and strides are made of (sympy's own and torch.utils._sympy's, read in torch 2.13) -> their function.
_EXPRESSIONS: dict[str, Any] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def of_expression(op: Any, expression: Any, known: Callable[[str], ir.Value | None]) -> Number | None:
    """A sympy expression of integers, written out from the parts whose value is `known`; None where it cannot be."""
    if expression.is_Integer:
        return int(expression)
    if (value := known(str(expression))) is not None:
        return value
    function = _EXPRESSIONS.get(type(expression).__name__)
    if function is None:
        return None
    result, *rest = [_with_sign_of(part, of_expression(op, part, known)) for part in expression.args]
    for part in rest:
        if result is None or part is None:
            return None
        result = write(op, function, [result, part])
    return result


def _with_sign_of(expression: Any, value: Number | None) -> Number | None:
    if isinstance(value, ir.Value) and expression.is_nonnegative:
        value.meta.setdefault(_LEAST, 1 if expression.is_positive else 0)
    return value


def size_of(op: Any, tensor: ir.Value, axis: int) -> ir.Value:
    """`tensor.shape[axis]` as an int64 scalar."""
    return op.Squeeze(_size_as_vector(op, tensor, axis), [0])


def as_vector(op: Any, size: Sequence[Number]) -> ir.Value:
    """`size` as a 1-d int64 tensor, constant where it can be."""
    return _joined(op, [op.Unsqueeze(part, [0]) if isinstance(part, ir.Value) else int(part) for part in size])


def vector_of_sizes(op: Any, sizes: Sequence[int | tuple[ir.Value, int]]) -> ir.Value:
    """Sizes as a 1-d int64 tensor: numbers, or those that tensors have in a dimension."""
    return _joined(op, [one if isinstance(one, int) else _size_as_vector(op, *one) for one in sizes])


def _size_as_vector(op: Any, tensor: ir.Value, axis: int) -> ir.Value:
    axis %= tensor.shape.rank()  # type: ignore[union-attr]
    return op.Shape(tensor, start=axis, end=axis + 1)


def _joined(op: Any, parts: Sequence[int | ir.Value]) -> ir.Value:
    """Numbers and 1-d int64 tensors as one of these."""
    made: list[ir.Value] = []
    for is_number, group in itertools.groupby(parts, lambda part: isinstance(part, int)):
        run: list[Any] = list(group)
        made += [int64s(op, run)] if is_number else run
    return made[0] if len(made) == 1 else op.Concat(*made, axis=0) if made else int64s(op, [])


def reshape(op: Any, tensor: ir.Value, size: Sequence[Number]) -> ir.Value:
    """`tensor` with new sizes (a -1 among them is inferred).

    Symbolic sizes need no arithmetic in the graph as long as one of them is unknown at most: ONNX's Reshape copies a size from the
    same place of the input where it is written as 0, and infers the one that is written as -1.
    """
    source = list(tensor.shape) if tensor.shape is not None else []
    empty = any(part == 0 for part in size if not isinstance(part, ir.Value)) or 0 in source
    wanted: list[int] = []
    for i, part in enumerate(size):
        name = name_of(part)
        if isinstance(name, int):
            wanted.append(name)
        elif i < len(source) and name is not None and getattr(source[i], "value", None) == name:
            wanted.append(0)
        else:
            wanted.append(-1)
    if empty and not any(isinstance(part, ir.Value) for part in size):
        return op.Reshape(tensor, as_vector(op, size), allowzero=1)
    if empty or wanted.count(-1) > 1:
        return op.Reshape(tensor, as_vector(op, size), allowzero=int(-1 not in [p for p in size if not isinstance(p, ir.Value)]))
    elements = math.prod(part for part in source if isinstance(part, int)) if all(isinstance(part, int) for part in source) else None
    if elements is not None and 0 not in wanted:
        wanted = [part if part > 0 else elements // -math.prod(wanted) for part in wanted]
        tensor = _before_reshapes(tensor)
        if tensor.shape is not None and list(tensor.shape) == wanted:
            return tensor
    return op.Reshape(tensor, as_vector(op, wanted))


def _before_reshapes(tensor: ir.Value) -> ir.Value:
    """What `tensor` is a reshape of, with sizes that are all constants (others may be there to keep an order)."""
    maker = tensor.producer()
    while maker is not None and maker.op_type == "Reshape" and not maker.domain:
        source, size = maker.inputs
        if source is None or size is None or size.const_value is None or source.dtype is None or source.shape is None or not source.shape.is_static():
            break
        tensor, maker = source, source.producer()
    return tensor


def write(op: Any, function: Any, args: Sequence[Any]) -> ir.Value:
    """One of `FUNCTIONS` applied to numbers, at least one of which is an `ir.Value`: in float64 if one of them is a fraction."""
    leaves = torch.utils._pytree.tree_leaves(list(args))
    fractions = function is operator.truediv or any(isinstance(leaf, float) or getattr(leaf, "dtype", None) == ir.DataType.DOUBLE for leaf in leaves)
    # Truth values among numbers are 0 and 1 to Python.
    as_integers = function is not torch.sym_ite and not all(map(_is_truth, leaves))

    def operand(number: Number | None) -> ir.Value | None:
        if number is None:  # `round` to no digits
            return None
        if as_integers and _is_truth(number):
            number = op.Cast(number, to=ir.DataType.INT64) if isinstance(number, ir.Value) else int(number)
        if isinstance(number, ir.Value):
            return as_double(op, number) if fractions and number.dtype == ir.DataType.INT64 else number
        if isinstance(number, bool):
            return constant(op, number, ir.DataType.BOOL)
        return constant(op, number, ir.DataType.DOUBLE if fractions else ir.DataType.INT64)

    return FUNCTIONS[function](op, *torch.utils._pytree.tree_map(operand, list(args)))


def _is_truth(number: Number | None) -> bool:
    return isinstance(number, bool) or (isinstance(number, ir.Value) and number.dtype == ir.DataType.BOOL)
