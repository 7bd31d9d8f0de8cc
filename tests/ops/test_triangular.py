"""Triangular systems and Cholesky factors: every argument, batches that broadcast, and which triangle is read."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from ops.harness import check, lower, trace
from ops.trained import check_training, needs_grad

from ort_backend import LoweringError

DTYPES = [torch.float32, torch.float64]
SIZES = [((3, 3), (3, 2)), ((4, 4), (4, 1)), ((1, 1), (1, 1)), ((5, 1, 4, 4), (2, 4, 3)), ((4, 4), (2, 4, 3)), ((2, 4, 4), (4, 3))]
EMPTY = [((0, 0), (0, 3)), ((3, 3), (3, 0)), ((0, 3, 3), (3, 2)), ((2, 0, 0), (0, 4))]


def _other_triangle(matrix: torch.Tensor, *, upper: bool, diagonal: bool = False) -> torch.Tensor:
    """The matrix with NaN wherever nothing should be read."""
    ones = torch.ones(matrix.shape, dtype=torch.bool)
    return matrix.masked_fill(ones.tril(diagonal - 1) if upper else ones.triu(1 - diagonal), math.nan)


def _positive(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    root = torch.randn(*size, dtype=dtype)
    return root @ root.mT + torch.eye(size[-1], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("upper", "left", "unit"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("dynamic", [False, True])
def test_triangular_systems(dtype: torch.dtype, upper: bool, left: bool, unit: bool, dynamic: bool) -> None:
    def solve(*pairs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.linalg.solve_triangular(a, b, upper=upper, left=left, unitriangular=unit) for a, b in zip(pairs[::2], pairs[1::2])]

    pairs = []
    for of_matrix, of_right in SIZES if dynamic else SIZES + EMPTY:
        matrix = torch.randn(of_matrix, dtype=dtype) + 4 * torch.eye(of_matrix[-1], dtype=dtype)
        right = torch.randn(of_right, dtype=dtype)
        pairs += [_other_triangle(matrix, upper=upper, diagonal=unit), right if left else right.mT.contiguous()]
    check(solve, *pairs, dynamic=dynamic)


def test_a_zero_on_the_diagonal_divides() -> None:
    matrix, right = torch.tensor([[0.0, 9.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    check(lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), matrix, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_systems_by_cholesky_factors(dtype: torch.dtype, upper: bool, dynamic: bool) -> None:
    def solve(*pairs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cholesky_solve(b, a, upper) for a, b in zip(pairs[::2], pairs[1::2])]

    pairs = []
    for of_matrix, of_right in SIZES if dynamic else SIZES + EMPTY:
        factor = torch.linalg.cholesky(_positive(*of_matrix, dtype=dtype), upper=upper)
        pairs += [_other_triangle(factor, upper=upper), torch.randn(of_right, dtype=dtype)]
    check(solve, *pairs, dynamic=dynamic)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_cholesky_factors(dtype: torch.dtype, upper: bool, dynamic: bool) -> None:
    sizes = [(1, 1), (7, 7), (2, 3, 5, 5), *([] if dynamic else [(0, 0), (2, 0, 0), (0, 3, 3)])]
    matrices = [_other_triangle(_positive(*size, dtype=dtype), upper=upper) for size in sizes]
    check(lambda *each: [torch.linalg.cholesky_ex(a, upper=upper) for a in each], *matrices, dynamic=dynamic)


@pytest.mark.parametrize(
    "matrix",
    [
        [[1.0, 0.0], [2.0, 3.0]],
        [[1.0, 0.0], [2.0, 4.0]],
        [[0.0, 0.0], [0.0, 1.0]],
        [[-1.0, 0.0], [2.0, 1.0]],
        [[math.nan, 0.0], [0.0, 1.0]],
        [[1.0, 0.0], [math.nan, 1.0]],
        [[1.0, 0.0], [math.inf, 1.0]],
    ],
)
def test_info_is_the_first_minor_that_is_not_positive(matrix: list[list[float]]) -> None:
    lower_one = torch.tensor(matrix)
    check(lambda a: torch.linalg.cholesky_ex(a).info, lower_one)
    check(lambda a: torch.linalg.cholesky_ex(a, upper=True).info, lower_one.mT.contiguous())


def test_each_matrix_has_an_info_of_its_own() -> None:
    matrices = torch.stack([torch.eye(3), -torch.eye(3), torch.diag(torch.tensor([1.0, 1.0, -1.0]))])
    check(lambda a: torch.linalg.cholesky_ex(a).info, matrices)
    assert torch.linalg.cholesky_ex(matrices).info.tolist() == [0, 1, 3]


def test_a_check_that_may_raise_is_pytorchs() -> None:
    with pytest.raises(LoweringError, match="a check that may raise"):
        lower(trace(lambda a: torch.linalg.cholesky_ex(a, check_errors=True), [torch.eye(2)]))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dynamic: bool, dtype: torch.dtype) -> None:
    def solved(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        factor = torch.linalg.cholesky_ex(x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)).L
        left = torch.linalg.solve_triangular(factor, b, upper=False)
        right = torch.linalg.solve_triangular(factor.mT, b.mT, upper=True, left=False)
        return factor, left, right, torch.cholesky_solve(b, factor)

    others = [(needs_grad(3, 6, 6, dtype=dtype), needs_grad(3, 6, 2, dtype=dtype))] if dynamic else []
    check_training(solved, needs_grad(2, 4, 4, dtype=dtype), needs_grad(2, 4, 3, dtype=dtype), dynamic=dynamic, others=others)


@pytest.mark.parametrize("size", [(0, 3, 3), (2, 0, 0)])
def test_gradients_of_nothing(size: tuple[int, ...]) -> None:
    def solved(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.linalg.solve_triangular(a, b, upper=True), torch.linalg.solve_triangular(a, b, upper=True, left=False)

    check_training(solved, needs_grad(*size), needs_grad(*size))
    pivots = torch.zeros(size[:-1], dtype=torch.int32)
    solvers = ["aten::linalg_lu_solve", "aten::lu_unpack"]
    check_training(lambda lu, b: torch.linalg.lu_solve(lu, pivots, b), needs_grad(*size), torch.randn(size), outside=solvers)
