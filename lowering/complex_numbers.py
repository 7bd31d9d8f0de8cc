"""Complex tensors in an ONNX graph: two real tensors each, for ONNX has no complex numbers.

At the border of a graph, and of a `PythonOp`, real and imaginary part stand side by side in a last dimension of 2 (`dtypes.Carrier`), as they do
in PyTorch's memory. Inside they are tensors of their own: a lowering that moves data, or adds it, then serves complex tensors as it is, once
for each part (`registry.register_linear`), and products run over contiguous memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.microsoft import typed

_pytree = torch.utils._pytree


@dataclasses.dataclass
class Complex:
    """A complex tensor.

    Attributes:
        real: The real parts.
        imag: The imaginary parts, of the same dtype and shape.
        is_real: Whether the imaginary parts are known to be zeros.
        together: Both side by side in a last dimension of 2, if that has been written.
    """

    real: ir.Value
    imag: ir.Value
    is_real: bool = False
    together: ir.Value | None = None

    @property
    def dtype(self) -> ir.DataType:
        """The dtype of the parts."""
        assert self.real.dtype is not None
        return self.real.dtype

    def pairs(self, op: Any) -> ir.Value:
        """Both parts side by side in a last dimension of 2."""
        if self.together is None:
            last = int64s(op, [-1])
            joined = op.Concat(op.Unsqueeze(self.real, last), op.Unsqueeze(self.imag, last), axis=-1)
            self.together = typed(joined, self.dtype, [*self.real.shape, 2])  # type: ignore[misc]
        return self.together

    def map(self, function: Callable[[ir.Value], ir.Value]) -> Complex:
        """A function of real tensors that is linear, applied to both parts."""
        real, imag = function(self.real), function(self.imag)
        return self if real is self.real and imag is self.imag else Complex(real, imag, self.is_real)


@dataclasses.dataclass(frozen=True)
class Part:
    """What one part of a complex tensor is: what a fake tensor would say of it."""

    dtype: torch.dtype
    shape: tuple[int | torch.SymInt, ...]


def part_of(fake: Any) -> Any:
    """What one part of a fake complex tensor is; other fake values as they are."""
    return Part(fake.dtype.to_real(), tuple(fake.shape)) if is_complex(fake) else fake


def is_complex(fake: Any) -> bool:
    """Whether a fake value is a complex tensor."""
    return isinstance(fake, torch.Tensor) and fake.is_complex()


def has_complex(node: fx.Node) -> bool:
    """Whether an argument or a result of a call is complex."""
    fakes = [one.meta.get("val") for one in (*node.all_input_nodes, node)]
    return any(is_complex(fake) for fake in _pytree.tree_leaves(fakes))


def from_pairs(op: Any, pairs: ir.Value) -> Complex:
    """A tensor whose last dimension holds real and imaginary part."""
    shape = pairs.shape[:-1]  # type: ignore[index]
    last = int64s(op, [-1])
    real, imag = (typed(op.Squeeze(one, last), pairs.dtype, shape) for one in op.Split(pairs, axis=-1, num_outputs=2, _outputs=2))
    return Complex(real, imag, together=pairs)


def from_real(op: Any, real: ir.Value) -> Complex:
    """A real tensor as a complex one."""
    return Complex(real, zeros_like(op, real), is_real=True)


def zeros_like(op: Any, value: ir.Value) -> ir.Value:
    """Zeros of a tensor's dtype and shape."""
    assert value.dtype is not None
    return typed(op.Expand(constant(op, 0, value.dtype), op.Shape(value)), value.dtype, value.shape)


def as_complex(op: Any, value: Any, dtype: ir.DataType) -> Complex:
    """A complex tensor, a real one, or a number (0-d), with parts of `dtype`."""

    def cast(part: ir.Value) -> ir.Value:
        return part if part.dtype == dtype else typed(op.Cast(part, to=dtype), dtype, part.shape)

    if isinstance(value, Complex):
        return value.map(cast)
    if isinstance(value, ir.Value):
        return from_real(op, cast(value))
    number = complex(value)
    real, imag = (typed(constant(op, part, dtype), dtype, []) for part in (number.real, number.imag))
    return Complex(real, imag, is_real=number.imag == 0)


# -- calls of lowerings of real numbers, once for each part


def linear_arguments(names: Sequence[str], linear: frozenset[str], args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """What of a call has a real and an imaginary part: `args` are called `names`, in order."""
    for name, value in (*zip(names, args), *kwargs.items()):
        if name in linear:
            yield from _pytree.tree_leaves(value, is_leaf=_is_leaf)


def take_part(
    op: Any, part: str, names: Sequence[str], linear: frozenset[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call for the `"real"` or for the `"imag"` parts. Of a complex one that is not linear, the shape and dtype matter alone."""

    def take(name: str, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return value.to_real() if value.is_complex else value
        if name not in linear:
            return value.real if isinstance(value, Complex) else value
        return _pytree.tree_map(lambda one: _part(op, one, part), value, is_leaf=_is_leaf)

    return [take(name, value) for name, value in zip(names, args)], {name: take(name, value) for name, value in kwargs.items()}


def has_imaginary_part(value: Any) -> bool:
    """Whether an argument is complex and not known to be real."""
    return not value.is_real if isinstance(value, Complex) else isinstance(value, complex) and value.imag != 0


def _part(op: Any, value: Any, part: str) -> Any:
    if isinstance(value, (Complex, complex)):
        return getattr(value, part)
    if part == "real" or value is None:
        return value
    return zeros_like(op, value) if isinstance(value, ir.Value) else 0.0


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Complex) or value is None
