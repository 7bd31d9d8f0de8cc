"""Gradients where a window ends, and where a function is flat."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from behaviours.check import call, compiled, on_ort, same_as_eager
from default_device import ON_CPU
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.avg_pool1d(x.flatten(0, 1), 3, 3),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, 3),
    ],
)
def test_windows_that_leave_something_over(pool: Callable[[torch.Tensor], torch.Tensor]) -> None:
    same_as_eager(lambda x: pool(x).exp(), call(torch.randn(2, 3, 7, 8, requires_grad=True)), graphs=1, python_ops=None)


FLAT = [F.relu, F.relu6, F.hardsigmoid, lambda x: F.hardtanh(x, 0.0, 2.0), lambda x: F.threshold(x, 0.5, 0.0)]
STEEP = [torch.sqrt, torch.log, torch.reciprocal, torch.rsqrt, lambda y: y.pow(0.5), lambda y: F.avg_pool1d(y[None], 2)[0].sqrt()]


@pytest.mark.parametrize("kernels", ["measured", "onnxruntime"])
@pytest.mark.parametrize("flat", FLAT)
def test_no_gradient_of_what_is_flat(flat: Callable[[torch.Tensor], torch.Tensor], kernels: str) -> None:
    """Zero where the function is flat, also if what arrives there is infinite: a root's at 0."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [steep(flat(x)) for steep in STEEP]

    x = torch.tensor([-5.0, -1.0, 0.0, -0.0, 1.0, 1.5, 2.0, 9.0], requires_grad=True)
    step = torch.compile(function, backend="ort_training", options={"kernels": kernels})
    for mine, theirs in zip(step(x), function(x), strict=True):
        (actual,), (expected,) = (torch.autograd.grad(one.sum(), x, retain_graph=True) for one in (mine, theirs))
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("size", [8, 20_000])
@pytest.mark.parametrize("flat", FLAT)
def test_what_is_steep_may_lie_outside(flat: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
    """Above 16,384 elements PyTorch's kernel selects."""
    x = torch.linspace(-5.0, 9.0, size).round(decimals=1).requires_grad_()
    with on_ort(graphs=1, python_ops=()):
        for run in (flat, compiled(flat)):
            for steep in (torch.sqrt, torch.rsqrt, lambda y: y.pow(0.5)):
                (gradient,) = torch.autograd.grad(steep(run(x)).sum(), x)
                if run is flat:
                    expected = gradient
                    continue
                (expected,) = torch.autograd.grad(steep(flat(x)).sum(), x)
                torch.testing.assert_close(gradient, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_hardswish_of_infinity(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.inf, -torch.inf, 3.0, -3.0, 2.5, -1.5, 0.0, 1e30], dtype=dtype, requires_grad=True)
    same_as_eager(F.hardswish, call(x), graphs=1, python_ops=None)


@pytest.mark.skipif(not ON_CPU, reason="PyTorch's kernels for CUDA round other edges")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["threshold", "hardtanh", "hardshrink", "softshrink"])
def test_edges_that_half_precision_rounds(name: str, dtype: torch.dtype) -> None:
    """At what an edge is when it is rounded: PyTorch compares some there with the edge itself, some with the rounded one."""
    edges = (0.1, 0.3, 0.7)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        further = {"threshold": lambda edge: (edge, 20.0), "hardtanh": lambda edge: (-edge, edge)}.get(name, lambda edge: (edge,))
        return [getattr(F, name)(x, *further(edge)) for edge in edges]

    x = torch.tensor([sign * edge for edge in edges for sign in (1, -1)]).to(dtype).requires_grad_()
    for reduce in (lambda results: results, lambda results: sum(results).sum()):  # with infinite gradients from outside, perhaps; and without
        same_as_eager(lambda x, reduce=reduce: reduce(function(x)), call(x), graphs=1)


def test_products_in_between_need_no_selection() -> None:
    """A convolution or a linear layer makes NaN of infinity in eager PyTorch as well: nothing is selected behind one."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    seen: list[bool] = []

    def look(graph: ir.Model) -> None:
        seen.append(any(node.op_type == "Where" for node in graph.graph))

    x = torch.randn(3, 4)
    compiled(model, options={"onnx_passes": (look,)})(x).sum().backward()
    compiled(nn.Sequential(*model, nn.ReLU()), options={"onnx_passes": (look,)})(x).sum().backward()
    assert (any(seen[: len(seen) // 2]), any(seen[len(seen) // 2 :])) == (False, True)


def test_missing_labels_behind_an_absolute_loss() -> None:
    labels = torch.tensor([1.0, torch.nan, -2.0, torch.nan, 0.5])
    for loss in (
        lambda y: torch.where(labels.isnan(), 0.0, F.l1_loss(y, labels, reduction="none")).mean(),
        lambda y: F.l1_loss(y, labels, reduction="none").nanmean(),
        lambda y: F.smooth_l1_loss(y, labels, reduction="none", beta=0.0).nansum(),
    ):
        same_as_eager(loss, call(torch.randn(5, requires_grad=True)), graphs=1)


@pytest.mark.parametrize(
    "take", [lambda x, at: torch.narrow(x, 0, at, 2), lambda x, at: x[at.item()], lambda x, at: torch.tensor_split(x, at[None])[1]]
)
def test_a_view_whose_place_is_computed(take: Callable[..., torch.Tensor]) -> None:
    x, at = torch.arange(20.0).reshape(4, 5), torch.tensor(2, device="cpu")  # where `tensor_split` wants it
    with on_ort(graphs=1, python_ops=None):
        result = compiled(take)(x, at)
        torch.testing.assert_close(result, take(x, at))
        result.zero_()
    assert x[2].sum() == 0 and x[0].sum() == 10
