"""The gradient of Dirichlet samples: over all of its four approximations, at the ends, and in a model."""

from __future__ import annotations

import pytest
import torch
from ops.trained import BETWEEN_SESSIONS

from ort_backend import graph_report

ON_ORT = {"kernels": "onnxruntime"}


def _arguments(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples, uniform numbers, the ends and the means, for concentrations from 0.007 to 400."""
    alpha, beta = (torch.empty(4000, dtype=torch.float64).uniform_(-5, 6).exp() for _ in range(2))
    x = torch.cat([torch.distributions.Beta(alpha, beta).sample(), torch.rand_like(alpha), torch.linspace(0, 1, 4000), alpha / (alpha + beta)])
    alpha, beta = alpha.repeat(4), beta.repeat(4)
    return x.to(dtype), alpha.to(dtype), (alpha + beta).to(dtype)


def _on_ort(*arguments: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    graph_report.clear()
    result = torch.compile(lambda *each: torch._dirichlet_grad(*each) * 1, backend="ort_training", fullgraph=True, options=ON_ORT)(*arguments)
    (graph,) = graph_report.report().graphs
    assert graph.outside == () and graph.onnx_nodes > 0
    return result


def test_every_approximation_in_float64() -> None:
    arguments = _arguments(torch.float64)
    torch.testing.assert_close(_on_ort(*arguments), torch._dirichlet_grad(*arguments), rtol=1e-9, atol=1e-12)


def test_every_approximation_in_float32() -> None:
    arguments = _arguments(torch.float32)
    expected = torch._dirichlet_grad(*arguments)
    exact = torch._dirichlet_grad(*(one.double() for one in arguments))  # where float32 cancels digits, eager is off, by up to 2 %
    near = torch.isclose(expected.double(), exact, rtol=1e-4, atol=1e-6)
    assert near.float().mean() > 0.9
    torch.testing.assert_close(_on_ort(*arguments)[near], expected[near], rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_of_a_sample(dtype: torch.dtype) -> None:
    def sampled(concentration: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Dirichlet(concentration.exp(), validate_args=False).rsample() * 2

    start, runs = torch.randn(6, 4, dtype=dtype), []
    torch._dynamo.reset()
    graph_report.clear()
    compiled = torch.compile(sampled, backend="ort_training", fullgraph=True, options={**ON_ORT, "autograd_functions": "inline"})
    for call in (compiled, sampled):
        torch.manual_seed(3)
        concentration = start.clone().requires_grad_()
        sample = call(concentration)
        runs.append((sample.detach(), *torch.autograd.grad(sample.square().sum(), concentration)))
    torch.testing.assert_close(runs[0], runs[1])
    (graph,) = graph_report.report().graphs
    assert {one.operator for one in graph.outside if one.reason not in BETWEEN_SESSIONS} == {"aten::_sample_dirichlet"}
