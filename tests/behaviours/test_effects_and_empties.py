"""Operators with effects inside a graph, and tensors without elements at its border."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch_version import TORCH

import ort_backend


@pytest.mark.skipif(TORCH < (2, 13), reason="AOTAutograd drops the check before 2.13, under aot_eager as well")
def test_linear_algebra_checks_its_errors_inside_the_graph() -> None:
    def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        spd = a @ a.mT + 3 * torch.eye(4)
        return torch.linalg.inv(a).sum() + torch.linalg.cholesky(spd).square().sum() + torch.linalg.solve(a, b).sum()

    compiled = torch.compile(solve, backend="ort_training", fullgraph=True)
    a, b = (torch.randn(4, n, requires_grad=True) for n in (4, 2))
    got, want = (torch.autograd.grad(function(a, b), (a, b)) for function in (compiled, solve))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert {one.operator for one in ort_backend.report().graphs[-1].outside} >= {"aten::_linalg_check_errors", "aten::linalg_inv_ex"}
    with pytest.raises(torch._C._LinAlgError, match="zero"):
        compiled(torch.zeros(4, 4, requires_grad=True), b)
    torch.testing.assert_close(compiled(a, b), solve(a, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
def test_an_empty_tensor_may_have_any_strides(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([x, y]), y.sum()

    compiled = torch.compile(function, backend="ort_training")
    x, y = torch.empty_strided((0, 3), (1, 0), dtype=dtype), torch.ones(2, 3, dtype=dtype)
    for got, want in zip(compiled(x, y), function(x, y), strict=True):
        torch.testing.assert_close(got, want)
    assert ort_backend.report().graphs[-1].counts.forward == 1


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize(("shape", "dim"), [((0, 6), 0), ((6, 0), 0), ((2, 3, 0), 1), ((0,), 0), ((0, 6), 1)])
def test_gradients_of_softmax_where_there_is_nothing(function: Callable[..., torch.Tensor], shape: tuple[int, ...], dim: int) -> None:
    # ONNX Runtime's kernel divided by zero, which ended the process.
    x = torch.randn(shape, requires_grad=True)
    result = torch.compile(lambda x: function(x, dim) * 2, backend="ort_training", fullgraph=True)(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert result.shape == gradient.shape == x.shape
    assert ort_backend.report().graphs[-1].counts.backward == 1


def test_gradients_of_softmax_where_there_may_be_nothing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0].softmax(0) * 2

    x = torch.tensor([[-1.0, 2.0], [1.0, 3.0], [2.0, 2.5]], requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="ort_training", fullgraph=True)
        for given in (x, x.detach().sub(5).requires_grad_()):
            weights = torch.tensor([1.0, 3.0])
            (gradient,) = torch.autograd.grad((compiled(given) * weights).sum(), given)
            torch.testing.assert_close(gradient, torch.autograd.grad((function(given) * weights).sum(), given)[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_dropout_of_nothing_behind_another_draw(dynamic: bool) -> None:
    step = torch.compile(lambda x: torch.poisson(torch.ones(2)).sum() * torch.nn.functional.dropout(x, 0.5), backend="ort_training", dynamic=dynamic)
    for rows in (3, 0):
        x = torch.randn(rows, 2, requires_grad=True)
        step(x).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


def test_an_operator_of_constants_alone_runs_at_every_call() -> None:
    calls = []

    @torch.library.custom_op("ort_training_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    counted.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: x * counted(torch.tensor([1.0, 2.0])), backend="ort_training")
    results = [compiled(torch.ones(2)) for _ in range(3)]
    assert [int(result[0]) for result in results] == [len(calls) - 1, len(calls), len(calls) + 1]


@pytest.mark.skipif(TORCH < (2, 13), reason="one_hot checks its classes in the graph since 2.13")
def test_a_class_out_of_range_is_an_error_in_one_hot() -> None:
    weight = torch.randn(5, 3, requires_grad=True)

    def function(classes: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(classes, 5).float() @ weight

    compiled = torch.compile(function, backend="ort_training", fullgraph=True)
    classes = torch.tensor([0, 4, 2])
    got, want = (torch.autograd.grad(one(classes).square().sum(), weight)[0] for one in (compiled, function))
    torch.testing.assert_close(got, want)
    assert {"effects" in one.reason for one in ort_backend.report().graphs[-1].outside if "assert" in one.operator} == {True}
    for one in (compiled, function):
        with pytest.raises(RuntimeError, match="smaller than num_classes"):
            one(torch.tensor([0, 5, 2]))
    torch.testing.assert_close(compiled(classes), function(classes))


@pytest.mark.cpu_only(reason="an assertion that leaves the process fit for what follows")
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_assertion_in_the_graph_holds(dynamic: bool, is_last: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        result = x.exp()
        torch._assert_async(((result if is_last else x) > int(is_last)).all(), "must be positive")
        return result if is_last else x.exp()

    compiled = torch.compile(function, backend="ort_training", fullgraph=True, dynamic=dynamic)
    x = torch.rand(3, requires_grad=True)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())
    with pytest.raises(RuntimeError, match="must be positive"):
        compiled(-x.detach())
    with pytest.raises(RuntimeError, match="must be positive"):
        compiled(-x)


NOTHING: dict[str, tuple[Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], tuple[int, ...]]] = {
    "a loss's mean": (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)), (0, 3)),
    "mean and variance of rows": (lambda x: torch.var_mean(x, 0), (0, 3)),
    "mean and variance of columns": (lambda x: torch.var_mean(x, 1, keepdim=True), (3, 0)),
    "mean and deviation of all": (torch.std_mean, (3, 0)),
    "softmax in float64": (lambda x: F.log_softmax(x, 0, dtype=torch.float64), (0, 5)),
    "softmax of masked rows": (lambda x: torch.ops.aten._safe_softmax(x, -1), (3, 0)),
    "no images": (lambda x: F.interpolate(x, scale_factor=2.0), (0, 3, 4, 4)),
    "no signals": (lambda x: F.interpolate(x, size=7, mode="nearest-exact"), (0, 3, 4)),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", NOTHING)
def test_what_is_made_of_nothing(name: str) -> None:
    function, shape = NOTHING[name]
    found = []
    for one in (torch.compile(function, backend="ort_training", fullgraph=True), function):
        x = torch.empty(shape, requires_grad=True)
        results = one(x)
        results = results if isinstance(results, tuple) else (results,)
        found.append([*results, *torch.autograd.grad(results, x, [torch.ones_like(result) for result in results])])
    torch.testing.assert_close(*found, equal_nan=True)
    assert ort_backend.report().graphs[-1].counts.backward == 1


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_statistics_of_rows_that_may_be_none() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x[x[:, 0] > 0]
        return *torch.var_mean(rows, 0), F.binary_cross_entropy_with_logits(rows, torch.ones_like(rows))

    x = torch.tensor([[-1.0, 2.0], [1.0, 3.0], [2.0, 2.5]])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="ort_training", fullgraph=True)
        for given in (x, x - 5):
            torch.testing.assert_close(compiled(given), function(given), equal_nan=True)
