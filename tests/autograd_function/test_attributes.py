"""Functions that read and set attributes of the tensors that they get: gradients of each sample, gradients summed up elsewhere, scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import ort_backend


class _Linear(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def _add_samples(weight: Tensor, gradient: Tensor, x: Tensor) -> None:
    samples = torch.einsum("no,ni->noi", gradient, x)
    before = getattr(weight, "grad_sample", None)
    weight.grad_sample = samples if before is None else before + samples


class OfEachSample(_Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        _add_samples(weight, gradient, x)
        return gradient @ weight, gradient.t() @ x


class OfEachSampleOfAModule(Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.x, ctx.layer = x, layer
        return x @ layer.weight.t()

    @staticmethod
    def backward(ctx, gradient):
        _add_samples(ctx.layer.weight, gradient, ctx.x)
        return gradient @ ctx.layer.weight, None


class IntoMainGradient(_Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.t() @ x)
        weight.was_added = True
        return gradient @ weight, None


class Scaled(_Linear):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() * getattr(weight, "scale", 1.0)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        scale = getattr(weight, "scale", 1.0)
        return gradient @ weight * scale, gradient.t() @ x * scale


class CountsCalls(_Linear):
    @staticmethod
    def forward(ctx, x, weight):
        weight.calls = getattr(weight, "calls", 0) + 1
        ctx.save_for_backward(x, weight)
        return x @ weight.t()


class Layers(nn.Module):
    def __init__(self, apply: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.apply_to = apply
        for layer in (self.first, self.second):
            layer.weight.main_grad = torch.zeros(3, 3)  # type: ignore[assignment]
        self.second.weight.scale = 3.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(self.apply_to(x.sin(), self.first).tanh(), self.second).sin()


def _seen(apply: Callable[[Tensor, nn.Module], Tensor], training: bool, **how: Any) -> Any:
    torch.manual_seed(0)
    model = Layers(apply)
    run = torch.compile(model, **how) if how else model
    seen: list[Any] = []
    for _ in range(2):
        x = torch.randn(5, 3, requires_grad=training)
        with torch.set_grad_enabled(training):
            result = run(x)
        seen.append(result.detach())
        if training:
            result.sum().backward()
            seen.append(x.grad)
        for parameter in model.parameters():
            known = ("grad", "grad_sample", "main_grad", "was_added", "calls")
            seen.extend(getattr(parameter, name, None) for name in known)
    return seen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "apply",
    [
        lambda x, layer: OfEachSample.apply(x, layer.weight),
        lambda x, layer: OfEachSampleOfAModule.apply(x, layer),
        lambda x, layer: IntoMainGradient.apply(x, layer.weight),
        lambda x, layer: Scaled.apply(x, layer.weight),
    ],
    ids=["samples", "samples of a module", "main gradient", "scale"],
)
def test_attributes(apply: Callable[[Tensor, nn.Module], Tensor], training: bool) -> None:
    torch._dynamo.reset()
    before = len(ort_backend.report().graphs)
    seen = _seen(apply, training, backend="ort_training", fullgraph=True)
    for one, other in zip(seen, _seen(apply, training), strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other
    (graph,) = ort_backend.report().graphs[before:]
    assert graph.functions == 2


def test_a_forward_that_sets_them_runs_in_eager() -> None:
    """What it got would be another tensor."""
    torch._dynamo.reset()

    def apply(x: Tensor, layer: nn.Module) -> Tensor:
        return CountsCalls.apply(x, layer.weight)

    with pytest.warns(UserWarning, match="CountsCalls is left to eager PyTorch: its forward sets attributes"):
        seen = _seen(apply, True, backend="ort_training")
    for one, other in zip(seen, _seen(apply, True), strict=True):
        torch.testing.assert_close(one, other)
