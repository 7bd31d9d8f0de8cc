"""Calls of lowerings: arguments of the dtypes that they compute in, results of the dtypes and shapes that FX knows; complex tensors part by part."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.errors import LoweringError, OrtBackendError
from ort_backend.lowering import symbolic, torchlib
from ort_backend.lowering.complex_numbers import (
    Complex,
    Part,
    as_complex,
    from_real,
    has_imaginary_part,
    is_complex,
    linear_arguments,
    part_of,
    take_part,
    zeros_like,
)
from ort_backend.lowering.constants import as_bool, constant
from ort_backend.lowering.dtypes import carrier, compute_dtype, to_ir, to_torch
from ort_backend.lowering.fx_nodes import values_read
from ort_backend.lowering.lowered import FaultyLowering
from ort_backend.lowering.promotion import check_storage, promoted_dtype
from ort_backend.lowering.provenance import operator_name, user_line
from ort_backend.lowering.registry import Lowering, Unsupported
from ort_backend.target import OrtTarget


class Calls:
    """Calls lowerings that write with one builder."""

    def __init__(self, op: Any, target: OrtTarget) -> None:
        self._op, self._target = op, target

    def call(self, lowering: Lowering, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls one lowering with values of the dtypes that it computes in, and casts its results to the node's.

        Raises:
            Unsupported: it declines, or is one of this package's and returns what the operator does not (whose result may depend on strides).
            FaultyLowering: it raises something else, or is somebody else's and returns that.
        """
        check_storage(lowering, node)
        if lowering.linear is not None:
            return self._call_for_each_part(lowering, node, args, kwargs)
        if not lowering.any_dtype:
            args, kwargs = self._promote(lowering, node, args, kwargs)
        with _naming(lowering, node):
            return self._results(lowering.function(self._op, *args, **kwargs), node.meta["val"], node)

    def _call_for_each_part(self, lowering: Lowering, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a lowering of real numbers for the real and for the imaginary parts, or for the real ones alone where all others are zeros."""
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        linear = lowering.linear or frozenset()
        fake = torch.utils._pytree.tree_map(part_of, node.meta["val"])
        is_real = not any(has_imaginary_part(one) for one in linear_arguments(names, linear, args, kwargs))

        def part(name: str) -> list[ir.Value]:
            mine, keywords = take_part(self._op, name, names, linear, args, kwargs)
            if not lowering.any_dtype:
                mine, keywords = self._promote(lowering, node, mine, keywords)
            with _naming(lowering, node):
                results = self._results(lowering.function(self._op, *mine, **keywords), fake, node)
            return results if isinstance(results, list) else [results]

        real = part("real")
        if not any(is_complex(one) for one in torch.utils._pytree.tree_leaves(node.meta["val"])):
            return real if isinstance(node.meta["val"], (tuple, list)) else real[0]
        imag = [zeros_like(self._op, one) for one in real] if is_real else part("imag")
        made = [Complex(a, b, is_real) for a, b in zip(real, imag, strict=True)]
        return made if isinstance(node.meta["val"], (tuple, list)) else made[0]

    def call_torchlib(self, function: Callable[..., Any], node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        plain = Lowering(node.target, function)  # type: ignore[arg-type]
        args, kwargs = self._promote(plain, node, args, kwargs)
        return self._results(torchlib.call(function, self._op, args, kwargs), node.meta["val"], node)

    def _promote(self, lowering: Lowering, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        promoted = promoted_dtype(lowering, node)
        wanted = None if promoted is None else self._compute(promoted)
        # What PyTorch has cast before it computes, where that loses digits which the wider dtype of the computation would keep.
        is_narrow = promoted is not None and promoted != wanted
        rounds = is_narrow and (lowering.promote == "inputs" or not promoted.is_floating_point)  # type: ignore[union-attr]
        numbers = {argument.name for argument in node.target._schema.arguments if _takes_number(argument)} if rounds else set()  # type: ignore[union-attr]

        def cast(name: str, value: Any) -> Any:
            if name in numbers and name not in lowering.keep and isinstance(value, (int, float)) and not isinstance(value, bool):
                return torch.tensor(value).to(promoted).item()
            if isinstance(value, (list, tuple)):
                return type(value)(cast(name, part) for part in value)
            if isinstance(value, Complex):
                return value.map(functools.partial(cast, name))
            if not isinstance(value, ir.Value) or name in lowering.keep or (wanted is None and "symbol" in value.meta):
                return value
            assert value.dtype is not None
            if is_narrow and value.dtype != to_ir(promoted) and (rounds or value.dtype.is_integer()):  # type: ignore[arg-type]
                value = self._cast(value, promoted)  # type: ignore[arg-type]
            return self._cast(value, wanted if wanted is not None else self._compute(to_torch(value.dtype)))

        parameters = node.target._schema.arguments  # type: ignore[union-attr]
        positional = [cast(parameter.name, arg) for parameter, arg in zip(parameters, args)]
        if wanted is not None and not node.all_input_nodes:  # numbers alone, where it takes tensors: `torch.add(2, 0.5)`
            for i, parameter in enumerate(parameters[: len(positional)]):
                if isinstance(positional[i], (int, float)) and isinstance(parameter.type, torch.TensorType):
                    positional[i] = constant(self._op, positional[i], to_ir(wanted))
        return positional, {name: cast(name, arg) for name, arg in kwargs.items()}

    def _compute(self, dtype: torch.dtype) -> torch.dtype:
        return compute_dtype(dtype, has_half_kernels=self._target.has_half_kernels)

    def _cast(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        wanted = to_ir(dtype)
        if value.dtype == wanted:
            return value
        return as_bool(self._op, value) if wanted == ir.DataType.BOOL else self._op.Cast(value, to=wanted)

    def _results(self, results: Any, fake: Any, node: fx.Node) -> Any:
        """The lowering's results with the dtypes and shapes of the node's; what nobody reads may have another shape."""
        if isinstance(fake, (tuple, list)):
            results = [results] if isinstance(results, (ir.Value, Complex)) else list(results)
            if len(results) != len(fake):
                raise _Returned(f"{len(results)} results instead of {len(fake)}")
            triples = zip(results, fake, values_read(node, len(fake)))
            return [None if value is None else self._result(value, one, is_read=is_read) for value, one, is_read in triples]
        return self._result(results, fake)

    def _result(self, value: Any, fake: Any, *, is_read: bool = True) -> Any:
        if is_complex(fake):
            return self._complex_result(value, part_of(fake))
        if isinstance(value, Complex):
            value = value.real
        if not isinstance(value, (ir.Value, int, float)):
            raise _Returned(f"{type(value).__name__} instead of a value of the graph")
        if isinstance(fake, (torch.Tensor, Part)):
            if isinstance(value, (int, float)):  # of a number for a tensor, such as `vmap` hands to a cast
                value = constant(self._op, value, to_ir(fake.dtype))
            if value.dtype is None:
                value.type = ir.TensorType(to_ir(self._compute(fake.dtype)))
            value = self._cast(value, fake.dtype)
            if is_read:
                _check_shape(value, self.type_of(fake)[1])
        return self.stamp(value, fake)

    def _complex_result(self, value: Any, part: Part) -> Complex:
        """The result of a complex dtype; one that is real arrives as `ir.Value`, a constant as a number."""
        if isinstance(value, ir.Value):
            return from_real(self._op, self._result(value, part))
        if not isinstance(value, Complex):
            return as_complex(self._op, value, to_ir(part.dtype))
        together = value.together if to_ir(part.dtype) == value.dtype else None
        return Complex(self._result(value.real, part), self._result(value.imag, part), value.is_real, together)

    def stamp(self, value: ir.Value, fake: Any) -> ir.Value:
        """Writes what the fake value knows about dtype and shape on an ONNX value."""
        dtype, shape = self.type_of(fake)
        if value.producer() is not None:
            value.type, value.shape = ir.TensorType(dtype), shape
        return value

    def type_of(self, fake: Any) -> tuple[ir.DataType, ir.Shape]:
        if isinstance(fake, (torch.Tensor, Part)):
            kind = carrier(fake.dtype)
            if kind is None:
                raise LoweringError(f"tensors of dtype {fake.dtype} cannot be handed to ONNX Runtime")
            shape = symbolic.shape(fake.shape, kind.extra_dims)
            for size, one in zip(fake.shape, shape):
                if isinstance(one, ir.SymbolicDim) and one.value is not None:
                    self._op.builder.hints[one.value] = size.node.hint  # type: ignore[union-attr]
            return kind.dtype, shape
        if isinstance(fake, (torch.SymBool, bool)):
            return ir.DataType.BOOL, ir.Shape([])
        return (ir.DataType.DOUBLE if isinstance(fake, (torch.SymFloat, float)) else ir.DataType.INT64), ir.Shape([])


class _Returned(Unsupported):
    """A lowering returned what its operator does not."""

    def __init__(self, what: str) -> None:
        super().__init__(f"its lowering returned {what}")


@contextlib.contextmanager
def _naming(lowering: Lowering, node: fx.Node) -> Iterator[None]:
    """What goes wrong in a lowering is an error that names it, the operator and the user's line."""
    is_ours = lowering.function.__module__.startswith(f"{__package__}.")
    try:
        yield
    except _Returned as error:
        if is_ours:
            raise
        said = str(error).removeprefix("its lowering ")
        raise FaultyLowering(lowering.function, operator_name(node.target), said, user_line(node)) from error
    except (Unsupported, OrtBackendError):
        raise
    except Exception as error:
        raise FaultyLowering(lowering.function, operator_name(node.target), f"failed: {type(error).__name__}: {error}", user_line(node)) from error


def _check_shape(value: ir.Value, expected: ir.Shape) -> None:
    """Whether a shape that ONNX has inferred can be the operator's."""
    if value.shape is None:
        return
    fits = len(value.shape) == len(expected) and all(a == b for a, b in zip(value.shape, expected) if isinstance(a, int) and isinstance(b, int))
    if not fits:
        raise _Returned(f"a value of shape {value.shape} instead of {expected}")


def _takes_number(argument: Any) -> bool:
    """Whether an argument of a schema is a tensor or a number to compute with, and not a dimension or the like."""
    kind = argument.type.getElementType() if argument.type.kind() == "OptionalType" else argument.type
    return kind.kind() in ("TensorType", "NumberType")
