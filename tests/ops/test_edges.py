"""What the whole run over PyTorch's operator database found wrong, each as a small program of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ort_backend
from ort_backend import graph_report


def check(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> graph_report.GraphReport:
    """Results and gradients of `function` through the backend equal eager's, None where eager has None; the report on its graph."""
    graph_report.clear()
    torch._dynamo.reset()
    runs = []
    for call in (function, torch.compile(function, backend="ort_training", dynamic=dynamic, fullgraph=True)):
        torch.manual_seed(0)
        given = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]
        results = torch.utils._pytree.tree_leaves(call(*given))
        differentiable = [one for one in results if one.requires_grad]
        tangents, wanted = [torch.ones_like(one) for one in differentiable], [one for one in given if one.requires_grad]
        gradients = torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True) if differentiable else ()
        runs.append([*results, *gradients])
    expected, actual = runs
    assert [one is None for one in actual] == [one is None for one in expected]
    for one, other in zip(actual, expected):
        if other is not None:
            torch.testing.assert_close(one, other)
    (graph,) = ort_backend.report().graphs
    return graph


@pytest.mark.parametrize("function", [torch.linalg.cholesky, torch.linalg.inv, torch.linalg.lu_factor, torch.linalg.eigvalsh])
def test_gradients_pass_operators_with_effects(function: Callable[..., Any]) -> None:
    # Their error checks thread a token through the graph, which AOTAutograd counts among the forward's outputs, and autograd does not.
    def through(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = torch.utils._pytree.tree_leaves(function(x @ x.mT + 3 * torch.eye(3)))[0]
        return result, x.sin()

    assert check(through, torch.rand(3, 3)).kind == "training"


def test_an_effect_in_the_backward_needs_no_token() -> None:
    def largest(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(x).abs()

    check(largest, torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    check(largest, torch.zeros(0, 0))


def test_complex_conjugates_are_conjugated() -> None:
    check(lambda x: torch.view_as_real(torch.fft.ihfft2(x)), torch.randn(4, 6))
    check(lambda x: torch.view_as_real(torch.conj_physical(torch.view_as_complex(x))), torch.randn(4, 2))


@pytest.mark.parametrize(("size", "wanted"), [((1,), (0,)), ((2, 1), (2, 0)), ((1, 3), (0, 3)), ((1,), (4, 0)), ((2, 1), (0, 2, 1))])
def test_an_expand_to_nothing_is_empty_inside_the_graph_too(size: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    # The next operator sees the size: a sum over it, its number of elements.
    assert check(lambda x: (x.expand(wanted).sum(0), x.expand(wanted).exp()), torch.randn(size)).python_ops == 0
    graph = check(lambda x: torch.linalg.det(torch.diag_embed(x.sum().unsqueeze(-1).expand(0))), torch.randn(3))
    assert graph.python_ops > 0


def test_a_graph_of_nothing_but_draws() -> None:
    def draws() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(3).exp(), torch.randint(9, (4,)) + 1

    assert check(draws).python_ops == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_masked_scatter_broadcasts_its_mask(dynamic: bool) -> None:
    mask = torch.tensor([True, False, True])
    graph = check(lambda x, m, s: x.masked_scatter(m, s), torch.randn(4, 3), mask, torch.randn(4, 3), dynamic=dynamic)
    assert graph.python_ops == 0


def test_a_gradient_that_adds_an_empty_constant() -> None:
    assert check(torch.nn.functional.softshrink, torch.randn(0, 5)).python_ops == 0


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [(0,), (0, 5)])
def test_norms_of_nothing(size: tuple[int, ...], order: int) -> None:
    check(lambda x: torch.linalg.vector_norm(x, order), torch.randn(size, dtype=torch.float64))
    check(lambda x: torch.cdist(x, x, p=order), torch.randn(2, 0, dtype=torch.float64))


def test_groups_of_nothing() -> None:
    weight, bias = torch.randn(6), torch.randn(6)
    graph = check(lambda x, w, b: torch.nn.functional.group_norm(x, 2, w, b), torch.randn(0, 6, 3), weight, bias)
    assert {one.reason for one in graph.outside} == {"groups of zero-sized tensors"}


def test_adaptive_pooling_of_nothing() -> None:
    check(lambda x: torch.nn.functional.adaptive_avg_pool1d(x, 3), torch.randn(0, 8, 8))
    check(lambda x: torch.nn.functional.adaptive_avg_pool2d(x, (3, 2)), torch.randn(0, 2, 8, 7))


@pytest.mark.parametrize("dynamic", [False, True])
def test_gathering_one_number_several_times(dynamic: bool) -> None:
    graph = check(lambda x, i: torch.gather(x, 0, i), torch.randn(()), torch.zeros(3, dtype=torch.int64), dynamic=dynamic)
    assert graph.python_ops == 0
