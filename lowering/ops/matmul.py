"""Matrix products. A transpose of the last two dimensions is part of the product, not a node that moves memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.axes import may_be_zero, rank
from ort_backend.lowering.constants import int64s, scalar_like
from ort_backend.lowering.microsoft import microsoft, typed
from ort_backend.lowering.registry import register

aten = torch.ops.aten

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("scaled_bmm(Tensor self, Tensor mat2, float alpha) -> Tensor")
_library.impl("scaled_bmm", lambda self, mat2, alpha: torch.bmm(self, mat2) * alpha, "CompositeExplicitAutograd")
SCALED_BMM = torch.ops.ort_training.scaled_bmm.default
_library.define("tall_mm(Tensor left, Tensor right, int blocks) -> Tensor")
_library.impl("tall_mm", lambda left, right, blocks: torch.mm(left.t(), right).unflatten(0, (blocks, -1)), "CompositeExplicitAutograd")
# left^T right of (k, n) and (k, m) as (blocks, n / blocks, m).
TALL_MM = torch.ops.ort_training.tall_mm.default

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FUSED = ("com.microsoft::FusedMatMul",)


def _untransposed(value: ir.Value) -> tuple[ir.Value, bool]:
    """(matrix, whether `value` is its transpose in the last two dimensions)."""
    node = value.producer()
    if node is None or node.op_type != "Transpose" or node.domain:
        return value, False
    source = node.inputs[0]
    rank = value.shape.rank() if value.shape is not None else 0
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    # Type and shape are those of a finished result: not every intermediate value has them.
    if rank < 2 or "perm" not in node.attributes or list(node.attributes["perm"].as_ints()) != swapped or source is None or source.shape is None:
        return value, False
    return source, True


def _matmul(op: Any, left: ir.Value, right: ir.Value) -> ir.Value:
    """left @ right. A sum over nothing is zero, which ONNX Runtime's MatMul leaves unwritten and its Gemm refuses (1.19.2)."""
    if left.shape[-1] != 0:  # type: ignore[index]
        return op.MatMul(*_summable(op, left, False, right, False))
    size = op.Shape(left, start=0, end=-1)
    if right.shape.rank() > 1:  # type: ignore[union-attr]
        size = op.Concat(size, op.Shape(right, start=-1), axis=0)
    return op.Expand(scalar_like(op, 0, left), size)


def _summable(op: Any, left: ir.Value, trans_left: bool, right: ir.Value, trans_right: bool) -> tuple[ir.Value, ir.Value]:
    """Both factors as they are, or with a zero more to sum over where there may be nothing: there are no tokens for some expert."""
    at = -2 if trans_left else -1
    if not may_be_zero(left.shape[at]):  # type: ignore[index]
        return left, right
    return _with_zeros(op, left, at), _with_zeros(op, right, -1 if trans_right or rank(right) == 1 else -2)


def _with_zeros(op: Any, value: ir.Value, at: int) -> ir.Value:
    pads = [0] * (2 * rank(value))
    pads[at] = 1
    shape = [None if i == at % rank(value) else part for i, part in enumerate(value.shape or ())]
    return typed(op.Pad(value, int64s(op, pads)), value.dtype, shape)


def _scaled(op: Any, tensor: ir.Value, factor: int | float | ir.Value) -> ir.Value:
    if not isinstance(factor, ir.Value) and factor == 1:
        return tensor
    return op.Mul(tensor, scalar_like(op, factor, tensor))


def _has_gemm(left: ir.Value) -> bool:
    """Whether Gemm takes a product with this left side: not integers, and no sum over nothing."""
    return left.dtype in _FLOATS and left.shape[-1] != 0  # type: ignore[index]


def _is_attribute(factor: int | float | ir.Value, tensor: ir.Value) -> bool:
    """Whether an ONNX attribute, which is float32, holds the factor as precisely as `tensor`'s dtype would."""
    return not isinstance(factor, ir.Value) and (tensor.dtype != ir.DataType.DOUBLE or float(np.float32(factor)) == factor)


def _is_zero(factor: int | float | ir.Value) -> bool:
    return not isinstance(factor, ir.Value) and factor == 0


@register(aten.mm.default, promote="same")
def mm(op, self, mat2):
    """mm(Tensor self, Tensor mat2) -> Tensor"""
    (a, trans_a), (b, trans_b) = _untransposed(self), _untransposed(mat2)
    if _has_gemm(self) and (trans_a or trans_b):
        return op.Gemm(*_summable(op, a, trans_a, b, trans_b), transA=int(trans_a), transB=int(trans_b))
    return _matmul(op, self, mat2)


@register(aten.addmm.default, promote="same")
def addmm(op, self, mat1, mat2, *, beta=1, alpha=1):
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    if not (_has_gemm(mat1) and _is_attribute(alpha, self) and _is_attribute(beta, self)):
        return _plus(op, self, mm(op, mat1, mat2), beta, alpha)
    (a, trans_a), (b, trans_b) = _untransposed(mat1), _untransposed(mat2)
    a, b = _summable(op, a, trans_a, b, trans_b)
    attributes = {"alpha": float(alpha), "beta": float(beta), "transA": int(trans_a), "transB": int(trans_b)}
    return op.Gemm(a, b, **attributes) if _is_zero(beta) else op.Gemm(a, b, self, **attributes)


def _plus(op: Any, bias: ir.Value, product: ir.Value, beta: int | float | ir.Value, alpha: int | float | ir.Value) -> ir.Value:
    """beta bias + alpha product; `bias` is not read where beta is 0."""
    product = _scaled(op, product, alpha)
    return product if _is_zero(beta) else op.Add(_scaled(op, bias, beta), product)


@register(aten.bmm.default, requires=_FUSED, promote="same")
def bmm_fused(op, self, mat2):
    """bmm(Tensor self, Tensor mat2) -> Tensor"""
    return _product(op, self, mat2)


def _product(op: Any, left: ir.Value, right: ir.Value, alpha: float = 1.0) -> ir.Value:
    """alpha left @ right with their transposes inside."""
    (a, trans_a), (b, trans_b) = _untransposed(left), _untransposed(right)
    if not (trans_a or trans_b) and alpha == 1 or left.shape[-1] == 0:  # type: ignore[index]
        return _matmul(op, left, right)
    like = ir.Value(type=left.type, shape=ir.Shape([*left.shape[:-1], right.shape[-1]]))  # type: ignore[index]
    a, b = _summable(op, a, trans_a, b, trans_b)
    return microsoft(op, "FusedMatMul", a, b, like=like, transA=int(trans_a), transB=int(trans_b), alpha=float(alpha))


@register(aten.bmm.default, promote="same")
def bmm(op, self, mat2):
    """bmm(Tensor self, Tensor mat2) -> Tensor"""
    return _matmul(op, self, mat2)


@register(SCALED_BMM, requires=_FUSED, promote="same")
def scaled_bmm_fused(op, self, mat2, alpha):
    """ort_training::scaled_bmm(Tensor self, Tensor mat2, float alpha) -> Tensor: `passes.scales` writes it."""
    return _product(op, self, mat2, alpha)


@register(SCALED_BMM, promote="same")
def scaled_bmm(op, self, mat2, alpha):
    """ort_training::scaled_bmm(Tensor self, Tensor mat2, float alpha) -> Tensor"""
    return _scaled(op, _matmul(op, self, mat2), alpha)


@register(TALL_MM, requires=_FUSED, promote="same")
def tall_mm(op, left, right, blocks):
    """ort_training::tall_mm(Tensor left, Tensor right, int blocks) -> Tensor: `passes.tall_products` writes it."""
    depth, rows = left.shape
    tall = typed(op.Reshape(left, int64s(op, [0, blocks, rows // blocks])), left.dtype, [depth, blocks, rows // blocks])
    like = typed(ir.Value(), left.dtype, [blocks, rows // blocks, right.shape[1]])
    return microsoft(op, "FusedMatMul", tall, op.Unsqueeze(right, int64s(op, [0])), like=like, transA=1, transBatchA=1)


@register(aten.baddbmm.default, requires=_FUSED, promote="same")
def baddbmm_fused(op, self, batch1, batch2, *, beta=1, alpha=1):
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    if not _is_attribute(alpha, batch1) or batch1.dtype not in _FLOATS:
        return _plus(op, self, _matmul(op, batch1, batch2), beta, alpha)
    return _plus(op, self, _product(op, batch1, batch2, alpha), beta, 1)


@register(aten.baddbmm.default, promote="same")
def baddbmm(op, self, batch1, batch2, *, beta=1, alpha=1):
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _plus(op, self, _matmul(op, batch1, batch2), beta, alpha)


@register(aten.addbmm.default, promote="same")
def addbmm(op, self, batch1, batch2, *, beta=1, alpha=1):
    """addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _plus(op, self, op.ReduceSum(_matmul(op, batch1, batch2), int64s(op, [0]), keepdims=0), beta, alpha)


@register(aten.mv.default, promote="same")
def mv(op, self, vec):
    """mv(Tensor self, Tensor vec) -> Tensor"""
    return _times_vector(op, self, vec)


@register(aten.addmv.default, promote="same")
def addmv(op, self, mat, vec, *, beta=1, alpha=1):
    """addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _plus(op, self, _times_vector(op, mat, vec), beta, alpha)


def _times_vector(op: Any, matrix: ir.Value, vector: ir.Value) -> ir.Value:
    """A column instead of a vector: into a product with a vector, ONNX Runtime 1.19.2 fuses the matrix's transpose wrongly."""
    return op.Squeeze(mm(op, matrix, op.Unsqueeze(vector, int64s(op, [1]))), int64s(op, [1]))


@register(aten.dot.default, promote="same")
def dot(op, self, tensor):
    """dot(Tensor self, Tensor tensor) -> Tensor"""
    return _matmul(op, self, tensor)
