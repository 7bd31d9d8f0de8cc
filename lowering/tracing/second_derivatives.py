"""Operators that stand for the whole gradient of something have none themselves, and say so.

Autograd takes an operator without a formula for a constant, with a warning: gradients of gradients, which `torch.func` asks for, and
`torch.autograd.grad` in a compiled function under `torch._dynamo.config.trace_autograd_ops`, would be wrong (seen in torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch


def refuse(operator: str, what: str, library: torch.library.Library) -> None:
    """Gives `operator`, one of `ort_training`'s, a formula that is an error. `what` is what it is the gradient of."""

    def refused(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            f"ort_training cannot differentiate the gradient of {what} once more: leave what computes it to eager PyTorch (torch.compiler.disable)"
        )

    torch.library.register_autograd(f"ort_training::{operator}", refused, lib=library)


def are_asked_for() -> bool:
    """Whether calls of `torch.autograd.grad` become a part of compiled graphs, with `create_graph=True` as well (there since torch 2.11)."""
    return bool(getattr(torch._dynamo.config, "trace_autograd_ops", False))
