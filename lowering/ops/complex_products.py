"""Products of complex matrices, out of products of their parts."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.complex_numbers import Complex
from ort_backend.lowering.constants import int64s
from ort_backend.lowering.ops import matmul
from ort_backend.lowering.ops.complex_arithmetic import add, bilinear, complexes, times
from ort_backend.lowering.registry import register_complex

aten = torch.ops.aten

Operand = Complex | ir.Value
Scalar = complex | ir.Value


def _product(op: Any, function: Any, a: Operand, b: Operand) -> Complex:
    return bilinear(op, lambda left, right: function(op, left, right), *complexes(op, a, b))


def _plus(op: Any, bias: Operand, product: Complex, beta: Scalar, alpha: Scalar) -> Complex:
    """beta bias + alpha product; `bias` is not read where beta is 0."""
    (product,) = complexes(op, times(op, product, alpha))
    return product if not isinstance(beta, ir.Value) and beta == 0 else add(op, times(op, bias, beta), product)


@register_complex(aten.mm.default, promote="same")
def mm(op: Any, self: Operand, mat2: Operand) -> Complex:
    """mm(Tensor self, Tensor mat2) -> Tensor"""
    return _product(op, matmul.mm, self, mat2)


@register_complex(aten.bmm.default, promote="same")
def bmm(op: Any, self: Operand, mat2: Operand) -> Complex:
    """bmm(Tensor self, Tensor mat2) -> Tensor"""
    return _product(op, matmul.bmm, self, mat2)


@register_complex(aten.mv.default, promote="same")
def mv(op: Any, self: Operand, vec: Operand) -> Complex:
    """mv(Tensor self, Tensor vec) -> Tensor"""
    return _product(op, matmul.mv, self, vec)


@register_complex(aten.dot.default, promote="same")
def dot(op: Any, self: Operand, tensor: Operand) -> Complex:
    """dot(Tensor self, Tensor tensor) -> Tensor"""
    return _product(op, matmul.dot, self, tensor)


@register_complex(aten.addmm.default, promote="same", keep=("beta", "alpha"))
def addmm(op: Any, self: Operand, mat1: Operand, mat2: Operand, *, beta: Scalar = 1, alpha: Scalar = 1) -> Complex:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _plus(op, self, mm(op, mat1, mat2), beta, alpha)


@register_complex(aten.baddbmm.default, promote="same", keep=("beta", "alpha"))
def baddbmm(op: Any, self: Operand, batch1: Operand, batch2: Operand, *, beta: Scalar = 1, alpha: Scalar = 1) -> Complex:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _plus(op, self, bmm(op, batch1, batch2), beta, alpha)


@register_complex(aten.addbmm.default, promote="same", keep=("beta", "alpha"))
def addbmm(op: Any, self: Operand, batch1: Operand, batch2: Operand, *, beta: Scalar = 1, alpha: Scalar = 1) -> Complex:
    """addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    total = bmm(op, batch1, batch2).map(lambda part: op.ReduceSum(part, int64s(op, [0]), keepdims=0))
    return _plus(op, self, total, beta, alpha)


@register_complex(aten.addmv.default, promote="same", keep=("beta", "alpha"))
def addmv(op: Any, self: Operand, mat: Operand, vec: Operand, *, beta: Scalar = 1, alpha: Scalar = 1) -> Complex:
    """addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _plus(op, self, mv(op, mat, vec), beta, alpha)
