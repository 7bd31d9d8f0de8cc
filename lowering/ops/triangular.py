"""Cholesky factors and systems with triangular matrices, as ONNX Scans: a column of the matrix a step, for all matrices of a batch at once.

Both subtract a product of a column and a row from what is left (Golub and Van Loan, "Matrix Computations", 3.1.3 and 4.2.5: the column-oriented
forms). Nothing needs a mask: what a step writes on the wrong side of the diagonal stands in rows or columns that are done, and is not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import length, rank
from ort_backend.lowering.constants import constant, int64s, negated, scalar_like
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.scan import Body, numbers, scan
from ort_backend.lowering.symbolic import as_vector

aten = torch.ops.aten


@register(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(op: Any, self: ir.Value, B: ir.Value, *, upper: bool, left: bool = True, unitriangular: bool = False) -> ir.Value:
    """linalg_solve_triangular(Tensor self, Tensor B, *, bool upper, bool left=True, bool unitriangular=False) -> Tensor"""
    if left or _is_empty(self) or _is_empty(B):  # of nothing, two transposes alone would be left, and ONNX Runtime cannot fetch a tangent
        return _solved(op, self, B, upper=upper, unit=unitriangular)
    return _turned(op, _solved(op, self, _turned(op, B), upper=upper, turned=True, unit=unitriangular))


@register(aten.cholesky_solve.default)
def cholesky_solve(op: Any, self: ir.Value, input2: ir.Value, upper: bool = False) -> ir.Value:
    """cholesky_solve(Tensor self, Tensor input2, bool upper=False) -> Tensor"""
    half = _solved(op, input2, self, upper=upper, turned=upper)
    return _solved(op, input2, half, upper=upper, turned=not upper)


@register(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(op: Any, self: ir.Value, *, upper: bool = False, check_errors: bool = False) -> Sequence[ir.Value]:
    """linalg_cholesky_ex(Tensor self, *, bool upper=False, bool check_errors=False) -> (Tensor L, Tensor info): NaN from where it fails on."""
    if check_errors:
        raise Unsupported("a check that may raise")
    if _is_empty(self):
        batch = [length(op, self, i) for i in range(rank(self) - 2)]
        return self, op.Expand(constant(op, 0, ir.DataType.INT32), as_vector(op, batch))

    def step(body: Body, states: list[ir.Value], rows: list[ir.Value], _: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        column, row = (body("Gather", states[0], rows[0], axis=at) for at in (-1, -2))
        pivot = body("Gather", column, rows[0], axis=-2)
        return [body("Sub", states[0], body("MatMul", body("Div", column, pivot), row))], [column, pivot]

    dims = rank(self)
    whole = _mirrored(op, self, upper=upper)
    _, columns, pivots = scan(op, step, [whole], [_places(op, self)], ranks=[dims + 1] * 2, result_axes=[dims - 1, dims - 2])
    columns, pivots = op.Squeeze(columns, int64s(op, [dims])), op.Squeeze(pivots, int64s(op, [dims]))
    factor = op.Trilu(op.Div(columns, op.Sqrt(_turned(op, typed(pivots, self.dtype, [None] * dims)))), upper=0)
    wrong = negated(op, op.Greater(op.Squeeze(pivots, int64s(op, [-1])), scalar_like(op, 0.0, self)))
    return _turned(op, typed(factor, self.dtype, self.shape)) if upper else factor, _first(op, wrong)


def _mirrored(op: Any, matrix: ir.Value, *, upper: bool) -> ir.Value:
    """A symmetric matrix, of which one triangle is read."""
    strict = op.Trilu(matrix, constant(op, 1 if upper else -1, ir.DataType.INT64), upper=int(upper))
    both = op.Add(op.Trilu(matrix, upper=int(upper)), _turned(op, typed(strict, matrix.dtype, matrix.shape)))
    return typed(both, matrix.dtype, matrix.shape)


def _first(op: Any, where: ir.Value) -> ir.Value:
    """The place of the first true value along the last axis, counted from 1; 0 if there is none."""
    number = op.Cast(where, to=ir.DataType.INT32)
    found = op.Add(op.Cast(op.ArgMax(number, axis=-1, keepdims=0), to=ir.DataType.INT32), constant(op, 1, ir.DataType.INT32))
    return op.Mul(found, op.ReduceMax(number, int64s(op, [-1]), keepdims=0))


def _solved(op: Any, matrix: ir.Value, right: ir.Value, *, upper: bool, turned: bool = False, unit: bool = False) -> ir.Value:
    """X with `matrix` X = `right`, or its transpose if `turned`.

    Args:
        op: The builder.
        matrix: (*, n, n); only one triangle is read, without the diagonal if `unit`.
        right: (*, n, k), with batch dimensions that broadcast.
        upper: Which triangle of `matrix`.
        turned: Whether to read rows as columns.
        unit: Whether the diagonal counts as ones.
    """
    dims = max(rank(matrix), rank(right))
    if list(matrix.shape[:-2]) != list(right.shape[:-2]):  # type: ignore[index]
        batch = [length(op, matrix, i) for i in range(rank(matrix) - 2)]
        right = typed(op.Expand(right, as_vector(op, [*batch, 1, 1])), right.dtype, [*[None] * (dims - 2), *right.shape[-2:]])  # type: ignore[index]
    if _is_empty(matrix) or _is_empty(right):
        return right
    product = "Mul" if right.shape[-1] == 1 else "MatMul"  # type: ignore[index]

    def step(body: Body, states: list[ir.Value], rows: list[ir.Value], _: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        left, (place, column) = states[0], rows
        found = body("Gather", left, place, axis=-2)
        if not unit:
            found = body("Div", found, body("Gather", column, place, axis=-2))
        return [body("Sub", left, body(product, column, found))], [found]

    columns = typed(op.Unsqueeze(matrix, int64s(op, [rank(matrix)])), matrix.dtype, [*matrix.shape, 1])  # type: ignore[misc]
    axes = [0, rank(matrix) - (2 if turned else 1)]
    reverse = upper != turned
    _, found = scan(op, step, [right], [_places(op, matrix), columns], ranks=[dims + 1], reverse=reverse, axes=axes, result_axes=[dims - 2])
    return typed(op.Squeeze(found, int64s(op, [dims - 1])), right.dtype, right.shape)


def _places(op: Any, matrix: ir.Value) -> ir.Value:
    """The numbers of the columns, (n, 1)."""
    row = numbers(op, length(op, matrix, rank(matrix) - 1))
    return typed(op.Unsqueeze(row, int64s(op, [1])), ir.DataType.INT64, [row.shape[0], 1])  # type: ignore[index]


def _turned(op: Any, matrix: ir.Value) -> ir.Value:
    order = list(range(rank(matrix)))
    order[-2:] = order[:-3:-1]
    return typed(op.Transpose(matrix, perm=order), matrix.dtype, [matrix.shape[i] for i in order])  # type: ignore[index]


def _is_empty(value: ir.Value) -> bool:
    return any(part == 0 for part in value.shape or ())
