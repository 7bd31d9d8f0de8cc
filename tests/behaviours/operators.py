"""Operators that no lowering knows. In a module of their own, since an operator can be defined only once in a process."""

from __future__ import annotations

from typing import Any

import torch

FAILING = {"forward": False, "backward": False}


class Refusal(Exception):
    """An exception of the user's own."""


@torch.library.custom_op("behaviours::cube", mutates_args=())
def cube(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    if FAILING["forward"]:
        raise Refusal("not today")
    return x**3 * scale


@torch.library.custom_op("behaviours::cube_backward", mutates_args=())
def cube_backward(grad: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    if FAILING["backward"]:
        raise Refusal("not backwards")
    return grad * 3 * x**2 * scale


@torch.library.custom_op("behaviours::parts", mutates_args=())
def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x * 2, x > 0, x.argmax(0)


cube.register_fake(lambda x, scale=1.0: torch.empty_like(x))
cube_backward.register_fake(lambda grad, x, scale: torch.empty_like(x))
parts.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool), x.new_empty(x.shape[1:], dtype=torch.int64)))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


cube.register_autograd(lambda ctx, grad: (cube_backward(grad, ctx.saved_tensors[0], ctx.scale), None), setup_context=_save)
BOTH = ["behaviours::cube", "behaviours::cube_backward"]


class Cubed(torch.autograd.Function):
    """x^3, whose backward needs what the forward saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad
