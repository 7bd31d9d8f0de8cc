"""What is repeated along short rows is repeated by what is fast at it, Expands come late, and sums in front of few numbers are sums of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
from behaviours.check import call, if_on_cuda, same_as_eager
from ops.harness import check, lower, run, trace

from ort_backend.lowering.builder import Builder
from ort_backend.lowering.constants import int64s
from ort_backend.lowering.fast_loops import use_fast_loops

SHAPES = [
    ((2048, 3), (2048, 1)),
    ((2048, 3), (3,)),
    ((2048, 3), (1, 3)),
    ((2048, 8), (2048, 1)),
    ((2048, 9), (2048, 1)),
    ((2048, 32), (2048, 1)),
    ((2048, 33), (2048, 1)),
    ((2047, 64), (64,)),
    ((2048, 64), (64,)),
    ((4, 8, 64, 24), (24,)),
    ((64, 64, 5, 5), (64, 64, 1, 1)),
    ((64, 64, 5, 1), (5, 1)),
    ((64, 1, 3), (1, 64, 3)),
    ((64, 64, 3), (64, 1, 3)),
    ((64, 64, 3), (64, 1, 1)),
    ((64, 1, 1), (1, 64, 3)),
    ((2048, 1), (3,)),
    ((16, 1024, 4), (1, 1024, 1)),
    ((2, 16, 64, 4), (2, 1, 64, 1)),
    ((2, 1024, 4), (2, 1, 4)),
    ((4, 3), (4, 1)),
    ((0, 3), (0, 1)),
    ((2048, 0), (0,)),
]


def _rand(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape) > 0.5 if dtype == torch.bool else torch.randn(shape).mul(9).to(dtype)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    check(lambda x, y: (x * y, y - x, torch.where(y > 0, x, y), (x > y) | (x == y), torch.maximum(x, y) / (y.abs() + 1)), *map(_rand, shapes))
    check(lambda x, y: ((x.abs() * y + y).neg(), 2 * (y * y), y.expand(torch.broadcast_shapes(x.shape, y.shape)).neg().exp()), *map(_rand, shapes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.int64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shapes", [((2048, 3), (2048, 1)), ((2048, 3), (3,)), ((2048, 24), (2048, 1)), ((2048, 64), (64,))], ids=str)
def test_dtypes(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> None:
    a, b = (_rand(shape, dtype) for shape in shapes)
    check(lambda x, y: (x * y, x == y, torch.where(y > 0, x, y), y.expand(x.shape)), a, b)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 0.0, 3e38, 1e-40])
@pytest.mark.parametrize("width", [3, 24])
def test_special_values(width: int, value: float) -> None:
    column = torch.full((2048, 1), value)
    column[::2] = 1.5
    check(lambda x, y: (x * y, y.expand(x.shape), x / y), torch.randn(2048, width), column)


def geometry(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    difference = x[:, :, None] - y[:, None]
    centred = x - x.mean(1, keepdim=True)
    direction = centred / (1 + centred.square().sum(-1, keepdim=True))
    return difference.square().sum(-1), centred * scale, direction, (x.sin() * scale + scale).cos(), difference.mean(2)


@pytest.mark.parametrize("sizes", [(32, 40), (33, 40), (32, 45), (33, 45)], ids=str)
@pytest.mark.parametrize("tail", [3, 12, 64])
def test_training_with_sizes_that_change(tail: int, sizes: tuple[int, int]) -> None:
    def given(batch: int, points: int) -> Any:
        torch.manual_seed(0)
        made = torch.randn(batch, points, tail), torch.randn(batch, points, tail), torch.randn(tail)
        return call(*(one.requires_grad_() for one in made))

    is_other = sizes != (32, 40)
    same_as_eager(geometry, given(32, 40), *([given(*sizes)] if is_other else []), graphs=1 + is_other, repeat=1, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shapes, others",
    [
        (((64, 64, 5, 5), (64, 64, 1, 1)), ((64, 64, 4, 4), (64, 64, 1, 1))),  # a weight for each channel of planes whose size changes
        (((64, 64, 2, 2), (64, 64, 1, 1)), ((64, 64, 3, 3), (64, 64, 1, 1))),
        (((2048, 5), (2048, 1)), ((2048, 7), (2048, 1))),
        (((2048, 20), (2048, 1)), ((2000, 40), (2000, 1))),
        (((2048, 5), (5,)), ((2048, 7), (7,))),
    ],
    ids=str,
)
def test_rows_whose_length_changes(shapes: tuple[tuple[int, ...], ...], others: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(0)

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * y, y - x, torch.where(y > 0, x, y), y.expand(torch.broadcast_shapes(x.shape, y.shape)).neg().flip(0)

    check(function, *map(_rand, shapes), dynamic=True, other=list(map(_rand, others)))


def _types(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Counter[str]:
    return Counter(node.op_type for node in lower(trace(function, [torch.rand(shape) for shape in shapes])).model.graph)


@pytest.mark.parametrize(
    "function, shapes, expected",
    [
        (lambda x, y: x - y, ((2048, 3), (2048, 1)), {"Expand": 1, "Transpose": 1}),
        (lambda x, y: (x - y).sin() / y, ((2048, 3), (2048, 1)), {"Expand": 1, "Transpose": 1}),  # repeated once for both
        (lambda x, y: x - y, ((2048, 9), (2048, 1)), {}),
        (lambda x, y: x * y, ((2048, 9), (2048, 1)), {"MatMul": 1}),
        (lambda x, y: x * y, ((2048, 33), (2048, 1)), {}),
        (lambda x, y: x * y, ((512, 3), (512, 1)), {}),  # few rows
        (lambda x, y: x - y, ((16, 1024, 4), (1, 1024, 1)), {"Expand": 1, "Transpose": 1}),
        (lambda x, y: x - y, ((64, 1, 3), (1, 64, 3)), {"Expand": 2}),
        (lambda x, y: x - y, ((64, 64, 17), (64, 1, 17)), {}),
        (lambda x, y: (x * y).sin(), ((2048, 64), (64,)), {"Expand": 1, "Reshape": 4}),  # of 16 rows, which are one
        (lambda x, y: (x.sin() * y + y).sin(), ((2048, 64), (64,)), {"Expand": 2, "Reshape": 6}),  # and stay one
        (lambda x, y: (x * y).sin(), ((2047, 64), (64,)), {}),
        (lambda x, y: (x * y).sin(), ((2047, 16), (16,)), {"Expand": 1}),
        (lambda x, y: (x * y).sin(), ((2048, 129), (129,)), {}),
        (lambda x, y: (torch.mm(x, x[:64]) + y).sin(), ((1024, 64), (64,)), {"MatMul": 1}),  # a bias stays with its product
        (lambda x, y: y.expand(2048, 48).flip(0), ((1,), (2048, 1)), {"MatMul": 1}),
    ],
)
def test_what_is_written(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], expected: dict[str, int]) -> None:
    found = _types(function, *shapes)
    counted = {"Expand", "Transpose", "MatMul", *expected}
    assert {name: found[name] for name in counted if found[name]} == expected


@pytest.mark.parametrize(
    "function, expands",
    [
        (lambda x, y: y.expand(x.shape) * x, 0),
        (lambda x, y: (y.expand(x.shape) * 2).neg().exp() * x, 0),
        (lambda x, y: (y.expand(x.shape) * 2, x), 1),
        (lambda x, y: y.expand(x.shape) + y.expand(x.shape), 1),
        (lambda x, y: (y.expand(x.shape).flip(0), y.expand(x.shape) * x), 1),
        (lambda x, y: torch.where(y.expand(x.shape) > 0, x, 0.0), 0),
        (lambda x, y: torch.where(x[:, :1].expand(x.shape) > 0, x[:1].expand(x.shape), y.expand(x.shape)), 0),
    ],
)
def test_expands_come_late(function: Callable[..., Any], expands: int) -> None:
    lowered = check(function, torch.randn(6, 200), torch.randn(6, 1))
    assert sum(node.op_type == "Expand" for node in lowered.model.graph) == expands


def test_no_expand_moves_behind_a_cast_that_it_has_no_kernel_for() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.mean(0, keepdim=True).expand(x.shape).clone()

    x = torch.randn(6, 200, dtype=torch.bfloat16).requires_grad_()
    same_as_eager(step, call(x), graphs=1, rtol=1e-2, atol=1e-2, python_ops=if_on_cuda("aten::mean.dim"))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    "shape, written",
    [
        ((512, 16, 3), "Transpose"),
        ((512, 15, 16), "Transpose"),
        ((512, 16, 16), "AveragePool"),
        ((512, 4, 64), "AveragePool"),
        ((512, 16, 65), None),
        ((512, 3, 32), None),
        ((8, 512, 1), None),
        ((64, 8, 8), None),
    ],
)
def test_sums_in_front_of_few_numbers(shape: tuple[int, ...], written: str | None, keepdim: bool) -> None:
    found = check(lambda x: (x.sum(1, keepdim), x.mean(1, keepdim)), torch.randn(shape))
    types = Counter(node.op_type for node in found.model.graph)
    assert {kind: types[kind] for kind in ("Transpose", "AveragePool") if types[kind]} == ({written: 2} if written else {})
    check(lambda x: (x.unflatten(0, (2, -1)).sum(2, keepdim), x.unflatten(1, (1, -1)).mean((1, 2), keepdim)), torch.randn(shape).double())
    ones = torch.ones(shape)
    for mine, theirs in zip(run(found, [ones]), (ones.sum(1, keepdim), ones.mean(1, keepdim)), strict=True):
        assert torch.equal(mine, theirs), "counts are exact"


def _whole_numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Whose sums are exact."""
    return torch.randint(-8, 9, shape).float()


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    "shape, dims", [((1000, 64), 0), ((3, 5, 700), 0), ((3, 5, 700), (0, 1)), ((1, 500, 64), 1), ((1, 500, 64), (0, 1)), ((2000, 512), 0)], ids=str
)
def test_sums_of_columns_are_products(shape: tuple[int, ...], dims: Any, keepdim: bool) -> None:
    found = check(lambda x: (x.sum(dims, keepdim), x.mean(dims, keepdim)), _whole_numbers(shape))
    assert sum(node.op_type == "MatMul" for node in found.model.graph) == 2
    found = check(lambda x: (x.sum(dims, keepdim), x.mean(dims, keepdim)), torch.randn(shape).double())
    assert not any(node.op_type == "MatMul" for node in found.model.graph), "products of float64 keep others from being fused"


def test_sizes_without_names_are_not_taken_for_equal() -> None:
    """One may be 1 where the other is not."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="test")
    op = Builder(graph).op
    x, y = (op.builder.input(name, ir.DataType.FLOAT, ir.Shape([None, width])) for name, width in (("x", 3), ("y", 1)))
    op.builder.add_output(op.Mul(op.Expand(y, int64s(op, [1, 3])), x), "z")
    use_fast_loops(op, graph, {}, 1)
    assert [node.op_type for node in graph] == ["Expand", "Mul"]


def test_the_sum_of_a_number_is_none_of_columns() -> None:
    check(lambda x: (x.sum(), x.mean(), x.sum() + x), torch.randn(()))


def test_what_is_not_finite_stays_in_its_column() -> None:
    x = _whole_numbers((1000, 64))
    for row, column, value in ((5, 3, torch.inf), (6, 3, torch.nan), (7, 4, torch.inf), (8, 5, -torch.inf), (9, 6, torch.inf), (10, 6, -torch.inf)):
        x[row, column] = value
    check(lambda x: (x.sum(0), x.mean(0)), x)


@pytest.mark.parametrize("shape", [(2, 3), (1500, 7), (4096, 64)], ids=str)
def test_sums_of_columns_with_symbolic_sizes(shape: tuple[int, int]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(0), x.mean(0, keepdim=True), x[None].mean((0, 1)), x[:, None, :].sum((0, 1))

    check(function, _whole_numbers(shape), dynamic=True, other=[_whole_numbers((shape[0] + 5, shape[1] + 1))])


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_of_rows_are_gathered_as_rows(dynamic: bool) -> None:
    order = torch.randperm(48)

    def function(x: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, order], x.unflatten(0, (2, -1)).index_select(-1, order[:12]), x[..., order.flip(0)[:3]]

    found = check(function, torch.randn(512, 48), order, dynamic=dynamic, other=[torch.randn(300, 48), torch.randperm(48)] if dynamic else None)
    axes = [node.attributes["axis"].as_int() for node in found.model.graph if node.op_type == "Gather" and len(node.inputs[0].shape) > 1]  # type: ignore[union-attr, arg-type]
    if not dynamic:
        assert sorted(axes) == [0, 0, 1], "three of 48 are few"
