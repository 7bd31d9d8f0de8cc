"""Runs a function with autograd.Functions in it in eager PyTorch and compiled, and compares all that a user can see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from default_device import random_state, seeded

import ort_backend
from ort_backend.graph_report import GraphReport


def leaves(*shapes: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    """Tensors that require grad."""
    generator = seeded(seed)
    return [torch.randn(tuple(shape), generator=generator).requires_grad_() for shape in shapes]


def step(function: Callable[..., Any], inputs: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Outputs and gradients of one forward and backward; the tangents tell elements apart."""
    torch.manual_seed(1)
    result = function(*inputs)
    outputs = list(result) if isinstance(result, tuple) else [result]
    differentiable = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    if differentiable:
        total = sum((out.float() * torch.arange(1, out.numel() + 1).view(out.shape)).sum() for out in differentiable)
        total.backward()  # type: ignore[union-attr]
    return outputs, [tensor.grad for tensor in inputs]


def same_as_eager(
    function: Callable[..., Any], *shapes: Sequence[int], sweep: Sequence[Sequence[Sequence[int]]] = (), functions: int | None = None, **how: Any
) -> list[GraphReport]:
    """Two steps in each, for every set of shapes; asserts that outputs, gradients and random state are equal.

    Args:
        function: What to compile.
        shapes: Of its inputs.
        sweep: More sets of shapes, for the same compiled function.
        functions: How many opaque calls the graphs must have.
        how: For `torch.compile`.
    """
    before = len(ort_backend.report().graphs)
    compiled = torch.compile(function, backend="ort_training", **how)
    for sizes in [shapes, shapes, *sweep]:
        expected, gradients = step(function, leaves(*sizes))
        state = random_state()
        actual, own_gradients = step(compiled, leaves(*sizes))
        assert torch.equal(random_state(), state)
        for one, other in zip(actual, expected, strict=True):
            assert type(one) is type(other)
            if isinstance(one, torch.Tensor):
                assert one.requires_grad == other.requires_grad
                torch.testing.assert_close(one, other)
            else:
                assert one == other
        for one, other in zip(own_gradients, gradients, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)
    made = list(ort_backend.report().graphs[before:])
    if functions is not None:
        assert {graph.functions for graph in made} == {functions}
    return made
