"""Operators with lists among their results, which PyTorch runs: its own `flex_attention_backward`, and those of users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.trained import check_training, needs_grad
from torch import Tensor
from torch.nn.attention import flex_attention as flex

_FLEX = ["flex_attention", "flex_attention_backward"]

_library = torch.library.Library("lists_among_results", "DEF")
_library.define("waves(Tensor x, Tensor[] others) -> (Tensor, Tensor[], Tensor?)")
_library.define("waves_backward(Tensor gradient, Tensor[] gradients, Tensor x) -> (Tensor, Tensor[])")
_waves = torch.ops.lists_among_results


def _forward(x: Tensor, others: list[Tensor]) -> Any:
    return x.sin(), [2 * one for one in others], None


def _backward(gradient: Tensor, gradients: list[Tensor], x: Tensor) -> Any:
    return gradient * x.cos(), [2 * one for one in gradients]


for _key in ("CPU", "CUDA", "Meta"):
    _library.impl("waves", _forward, _key)
    _library.impl("waves_backward", _backward, _key)


def _gradients(context: Any, gradient: Tensor, gradients: list[Tensor], _: Any) -> Any:
    first, others = _waves.waves_backward(gradient, gradients, *context.saved_tensors)
    return first, list(others)


torch.library.register_autograd(
    "lists_among_results::waves", _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]), lib=_library
)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_operator_of_users(dynamic: bool) -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> Any:
        first, (second, third), _ = _waves.waves(2 * x, [y + 1, z.transpose(0, 1)])
        return 2 * first, second.exp(), third.sin()

    def tensors(size: int) -> list[Tensor]:
        return [needs_grad(3, size + more) for more in range(3)]

    check_training(
        function, *tensors(4), dynamic=dynamic, others=[tensors(6)], outside=["lists_among_results::waves", "lists_among_results::waves_backward"]
    )


@pytest.mark.parametrize(
    "captured",
    [lambda: torch.randn(2, 20), lambda: needs_grad(2, 20), lambda: torch.randint(5, (2, 20))],
    ids=["a constant", "learned", "integers"],
)
def test_flex_attention(captured: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """What its score function captures gets a gradient where it wants one. PyTorch refuses to train it on the CPU, where its kernels can."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return flex.flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + bias[h, m - n])

    check_training(function, *(needs_grad(2, 2, 10, 4) for _ in range(3)), captured(), outside=_FLEX)


def test_flex_attention_with_a_computed_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Any:
        scaled = 2 * bias
        return flex.flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s * slopes[h] + scaled[m, n])

    check_training(function, *(needs_grad(2, 2, 10, 4) for _ in range(3)), needs_grad(10, 10), torch.rand(2), outside=_FLEX)
