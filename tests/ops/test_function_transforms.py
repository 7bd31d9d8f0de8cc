"""Derivatives that `torch.func` takes inside the compiled function: forward over reverse, a sample at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ops.trained import check_training, needs_grad
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap


def _loss(x: Tensor, w: Tensor) -> Tensor:
    return (torch.sin(w @ x) * x.sum()).logsumexp(0)


def _layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(w @ x) * x.sum()


@pytest.mark.parametrize("transform", [jacfwd, jacrev, hessian])
def test_jacobians(transform: Callable[..., Callable[..., Tensor]]) -> None:
    check_training(transform(_layer), torch.randn(4), torch.randn(3, 4))
    check_training(transform(_layer), needs_grad(4), needs_grad(3, 4))


def test_jacobian_of_complex_numbers() -> None:
    check_training(jacfwd(lambda x: (torch.view_as_complex(x) * 1j).exp().real), torch.randn(3, 2))


def test_products_with_jacobians() -> None:
    x, w = torch.randn(4), torch.randn(4, 4)
    check_training(lambda x, w: jvp(lambda x: _layer(x, w), (x,), (x.cos(),)), x, w)
    check_training(lambda x, w: vjp(_layer, x, w)[1](x.cos()), x, w)
    check_training(lambda x, w: jvp(lambda x: grad(_loss)(x, w), (x,), (x.cos(),)), x, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_casts_of_numbers(dtype: torch.dtype) -> None:
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.huber_loss(x, x.square()),
        lambda x: F.smooth_l1_loss(x, x.square()),
        lambda x: F.kl_div(x.log_softmax(-1), x.square().softmax(-1), reduction="batchmean"),
    ]
    for loss in losses:
        check_training(jacrev(loss), needs_grad(3, 4, dtype=dtype))
        check_training(vmap(grad(loss)), needs_grad(2, 3, 4, dtype=dtype))


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_samples(dynamic: bool) -> None:
    check_training(vmap(grad(_loss, argnums=1), (0, None)), needs_grad(5, 4), needs_grad(3, 4), dynamic=dynamic)
