"""Complex numbers: their parts, sums, products, quotients, sizes and angles.

As in PyTorch, products are sums of four real products, without the cases that C makes for infinities; unlike there, what is known to be real
has no imaginary part that would turn an infinity into NaN.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.complex_numbers import Complex, as_complex, from_pairs, from_real
from ort_backend.lowering.constants import negated, scalar_like
from ort_backend.lowering.later import BEHIND
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.ops.norms import linalg_vector_norm as real_vector_norm
from ort_backend.lowering.ops.ordering import behind as real_behind
from ort_backend.lowering.ops.powers import atan2, hypot
from ort_backend.lowering.registry import register, register_complex

aten = torch.ops.aten

Operand = Complex | ir.Value | complex


def dtype_of(*operands: Any) -> ir.DataType:
    """The dtype of the parts of what is a tensor; `promote` has made it one."""
    return next(one.dtype for one in operands if isinstance(one, (Complex, ir.Value)) and one.dtype is not None)


def complexes(op: Any, *operands: Operand) -> list[Complex]:
    """All of them complex, with parts of one dtype."""
    dtype = dtype_of(*operands)
    return [as_complex(op, one, dtype) for one in operands]


# -- parts


@register_complex(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(op: Any, self: Complex) -> ir.Value:
    """view_as_real(Tensor self) -> Tensor"""
    return self.pairs(op)


@register_complex(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(op: Any, self: ir.Value) -> Complex:
    """view_as_complex(Tensor self) -> Tensor"""
    return from_pairs(op, self)


@register_complex(aten.complex.default)
def complex_(op: Any, real: ir.Value, imag: ir.Value) -> Complex:
    """complex(Tensor real, Tensor imag) -> Tensor"""
    shape = op.Shape(op.Add(real, imag))
    return Complex(op.Expand(real, shape), op.Expand(imag, shape))


@register_complex(aten.polar.default)
def polar(op: Any, abs: ir.Value, angle: ir.Value) -> Complex:
    """polar(Tensor abs, Tensor angle) -> Tensor"""
    return Complex(op.Mul(abs, op.Cos(angle)), op.Mul(abs, op.Sin(angle)))


@register_complex(aten._conj.default, aten._conj_copy.default, aten._conj_physical.default)
def conj(op: Any, self: Complex | complex) -> Complex | complex:
    """_conj(Tensor self) -> Tensor"""
    if not isinstance(self, Complex):
        return self.conjugate()
    return self if self.is_real else Complex(self.real, op.Neg(self.imag))


@register_complex(aten._neg_view.default, aten._neg_view_copy.default)
def neg_view(op: Any, self: Complex) -> Complex:
    """_neg_view(Tensor self) -> Tensor"""
    return self.map(op.Neg)


@register_complex(aten._to_copy.default)
def to_copy(
    op: Any,
    self: Complex | ir.Value,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Complex | ir.Value:
    """_to_copy(Tensor self, *, ScalarType? dtype=None, ..., bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor

    The loop over the graph casts, and takes the real part where the result is real.
    """
    return nonzero(op, self) if dtype is torch.bool else self


@register_complex(torch.ops.prims.convert_element_type.default)
def convert_element_type(op: Any, a: Complex | ir.Value, dtype: torch.dtype) -> Complex | ir.Value:
    """convert_element_type(Tensor a, ScalarType dtype) -> Tensor: see `to_copy`."""
    return nonzero(op, a) if dtype is torch.bool else a


@register_complex(BEHIND)
def behind(op: Any, x: Complex | ir.Value, gradient: Complex | ir.Value) -> Complex | ir.Value:
    """ort_training::behind(Tensor(a) x, Tensor gradient) -> Tensor(a)"""
    late = gradient.real if isinstance(gradient, Complex) else gradient
    if isinstance(x, Complex):
        return x.map(lambda part: real_behind(op, part, late))
    return real_behind(op, x, late)


# -- sums


@register_complex(aten.add.Tensor, aten.add.Scalar, promote="output", keep=("alpha",))
def add(op: Any, self: Operand, other: Operand, alpha: complex | ir.Value = 1) -> Complex:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return _sum(op, "Add", self, times(op, other, alpha))


@register_complex(aten.sub.Tensor, aten.sub.Scalar, promote="output", keep=("alpha",))
def sub(op: Any, self: Operand, other: Operand, alpha: complex | ir.Value = 1) -> Complex:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return _sum(op, "Sub", self, times(op, other, alpha))


@register_complex(aten.rsub.Tensor, aten.rsub.Scalar, promote="output", keep=("alpha",))
def rsub(op: Any, self: Operand, other: Operand, alpha: complex | ir.Value = 1) -> Complex:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return sub(op, other, self, alpha)


def times(op: Any, value: Operand, factor: complex | ir.Value) -> Operand:
    """`value` times a number."""
    if not isinstance(factor, ir.Value) and factor == 1:
        return value
    return value * factor if isinstance(value, (int, float, complex)) and not isinstance(factor, ir.Value) else mul(op, value, factor)


def _sum(op: Any, kind: str, self: Operand, other: Operand) -> Complex:
    a, b = complexes(op, self, other)
    function = getattr(op, kind)
    return Complex(function(a.real, b.real), function(a.imag, b.imag), a.is_real and b.is_real)


# -- products


@register_complex(aten.mul.Tensor, aten.mul.Scalar, promote="output")
def mul(op: Any, self: Operand, other: Operand) -> Complex:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    return bilinear(op, op.Mul, *complexes(op, self, other))


def bilinear(op: Any, product: Any, a: Complex, b: Complex) -> Complex:
    """A product of complex tensors out of products of their parts, where none is known to be zeros."""
    if a.is_real and b.is_real:
        return from_real(op, product(a.real, b.real))
    if b.is_real:
        return a.map(lambda part: product(part, b.real))
    if a.is_real:
        return b.map(lambda part: product(a.real, part))
    real = op.Sub(product(a.real, b.real), product(a.imag, b.imag))
    return Complex(real, op.Add(product(a.real, b.imag), product(a.imag, b.real)))


@register_complex(aten.square.default)
def square(op: Any, self: Complex) -> Complex:
    """square(Tensor self) -> Tensor"""
    return mul(op, self, self)


@register_complex(aten.addcmul.default, promote="output")
def addcmul(op: Any, self: Operand, tensor1: Operand, tensor2: Operand, value: complex | ir.Value = 1) -> Complex:
    """addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    return add(op, self, mul(op, times(op, tensor1, value), tensor2))


@register_complex(aten.addcdiv.default, promote="output")
def addcdiv(op: Any, self: Operand, tensor1: Operand, tensor2: Operand, value: complex | ir.Value = 1) -> Complex:
    """addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    return add(op, self, div(op, times(op, tensor1, value), tensor2))


# -- quotients


@register_complex(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, promote="output")
def div(op: Any, self: Operand, other: Operand) -> Complex:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    a, b = complexes(op, self, other)
    if b.is_real:
        return a.map(lambda part: op.Div(part, b.real))
    return mul(op, a, _inverse(op, b))


@register_complex(aten.reciprocal.default, promote="output")
def reciprocal(op: Any, self: Complex) -> Complex:
    """reciprocal(Tensor self) -> Tensor"""
    return _inverse(op, self)


def _inverse(op: Any, value: Complex) -> Complex:
    """conj(z) / |z|^2, both divided by the larger part first, whose square might overflow or vanish."""
    scale = op.Max(op.Abs(value.real), op.Abs(value.imag))
    real, imag = op.Div(value.real, scale), op.Div(value.imag, scale)
    size = op.Mul(op.Add(op.Mul(real, real), op.Mul(imag, imag)), scale)
    return Complex(op.Div(real, size), op.Neg(op.Div(imag, size)))


# -- size and direction


@register_complex(aten.abs.default, promote="output")
def abs_(op: Any, self: Complex) -> ir.Value:
    """abs(Tensor self) -> Tensor"""
    return op.Abs(self.real) if self.is_real else hypot(op, self.real, self.imag)


@register_complex(aten.linalg_vector_norm.default, promote="output")
def linalg_vector_norm(op: Any, self: Complex, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> ir.Value:
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    sizes = typed(abs_(op, self), self.dtype, self.real.shape)
    return real_vector_norm(op, sizes, ord, dim, keepdim)


@register_complex(aten.angle.default, promote="output")
def angle_of_complex(op: Any, self: Complex) -> ir.Value:
    """angle(Tensor self) -> Tensor"""
    return atan2(op, self.imag, self.real)


@register(aten.angle.default, promote="output")
def angle(op: Any, self: ir.Value) -> ir.Value:
    """angle(Tensor self) -> Tensor"""
    zero = scalar_like(op, 0.0, self)
    side = op.Where(op.Less(self, zero), scalar_like(op, torch.pi, self), zero)
    return op.Where(op.IsNaN(self), self, side)


@register_complex(aten.sgn.default)
def sgn(op: Any, self: Complex) -> Complex:
    """sgn(Tensor self) -> Tensor"""
    size = hypot(op, self.real, self.imag)
    none = op.Equal(size, scalar_like(op, 0.0, size))
    return self.map(lambda part: op.Where(none, scalar_like(op, 0.0, size), op.Div(part, size)))


# -- comparisons


@register_complex(aten.eq.Tensor, aten.eq.Scalar, promote="inputs")
def eq(op: Any, self: Operand, other: Operand) -> ir.Value:
    """eq.Tensor(Tensor self, Tensor other) -> Tensor"""
    a, b = complexes(op, self, other)
    return op.And(op.Equal(a.real, b.real), op.Equal(a.imag, b.imag))


@register_complex(aten.ne.Tensor, aten.ne.Scalar, promote="inputs")
def ne(op: Any, self: Operand, other: Operand) -> ir.Value:
    """ne.Tensor(Tensor self, Tensor other) -> Tensor"""
    return negated(op, eq(op, self, other))


def nonzero(op: Any, value: Complex | ir.Value) -> ir.Value:
    """Where a number is not zero."""
    if isinstance(value, ir.Value):
        return op.Cast(value, to=ir.DataType.BOOL)
    return op.Or(op.Cast(value.real, to=ir.DataType.BOOL), op.Cast(value.imag, to=ir.DataType.BOOL))


@register_complex(aten.isnan.default)
def isnan(op: Any, self: Complex) -> ir.Value:
    """isnan(Tensor self) -> Tensor"""
    return op.Or(op.IsNaN(self.real), op.IsNaN(self.imag))


@register_complex(aten.isinf.default)
def isinf(op: Any, self: Complex) -> ir.Value:
    """isinf(Tensor self) -> Tensor"""
    return op.Or(op.IsInf(self.real), op.IsInf(self.imag))


@register_complex(aten.logical_not.default)
def logical_not(op: Any, self: Complex) -> ir.Value:
    """logical_not(Tensor self) -> Tensor"""
    return negated(op, nonzero(op, self))
