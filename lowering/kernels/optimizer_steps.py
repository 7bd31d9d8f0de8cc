"""Steps of Adam, AdamW and SGD for all parameters at once, by PyTorch's fused kernels, where the parameters lie.

A compiled step is a dozen operators for each parameter, each of which reads and writes the whole of it, and copies of all results into the old
tensors behind them. For 24 matrices of 256 x 256 and as many vectors a step of AdamW took 2.5 of eager PyTorch's time so, the fused kernel 0.4 (AMD
EPYC of family 25, one thread, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ort_backend.lowering.kernels.pointwise_steps import POINTWISE_STEP, lying_like, pointwise_step

IN_PARAMETERS = "the step of all parameters in one call, where they lie"

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define(
    "adam_step(Tensor[] parameters, Tensor[] gradients, Tensor[] averages, Tensor[] squares, Tensor[] steps, Tensor? rate_tensor, float rate, "
    "float beta1, float beta2, float weight_decay, float eps, bool decoupled, bool maximize, bool counts=False) -> Tensor"
)
_library.define(
    "sgd_step(Tensor[] parameters, Tensor[] gradients, Tensor[] momenta, Tensor? rate_tensor, float rate, float momentum, float dampening, "
    "float weight_decay, bool nesterov, bool maximize) -> Tensor"
)
# What they write to are arguments of the graph, or what a program makes of none; `steps` count from 1, or it `counts`
# and they are arguments, too, of steps that there were. The result is the first parameter.
ADAM_STEP, SGD_STEP = torch.ops.ort_training.adam_step.default, torch.ops.ort_training.sgd_step.default


def adam_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    rate_tensor: Tensor | None,
    rate: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled: bool,
    maximize: bool,
    counts: bool = False,
) -> Tensor:
    """What runs for `ADAM_STEP`."""
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    with torch.no_grad():
        if counts:
            torch._foreach_add_(list(steps), 1)
        kernel(
            parameters, _lying_like(gradients, parameters), averages, squares, [], steps,
            lr=rate if rate_tensor is None else rate_tensor, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False,
            maximize=maximize,
        )  # fmt: skip
    return parameters[0]


def sgd_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    rate_tensor: Tensor | None,
    rate: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
) -> Tensor:
    """What runs for `SGD_STEP`."""
    kernel: Any = torch._fused_sgd_
    with torch.no_grad():
        kernel(
            parameters, _lying_like(gradients, parameters), momenta, lr=rate if rate_tensor is None else rate_tensor, momentum=momentum,
            dampening=dampening, weight_decay=weight_decay, nesterov=nesterov, maximize=maximize, is_first_step=False,
        )  # fmt: skip
    return parameters[0]


def _lying_like(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """As the kernels need them (read in torch 2.13: native/cpu/FusedAdamKernel.cpp)."""
    return [lying_like(one, other) for one, other in zip(tensors, others, strict=True)]


IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {ADAM_STEP: adam_step, SGD_STEP: sgd_step, POINTWISE_STEP: pointwise_step}


def _fake(parameters: Sequence[Tensor], *_: Any) -> Tensor:
    return torch.empty_like(parameters[0])


for _target in IMPLEMENTATIONS:
    torch.library.register_fake(_target, _fake, lib=_library)
