"""What one call of a user's autograd.Function costs, forward and backward, beside eager PyTorch's `Function.apply`.

A model that calls a Function n times is timed for two n; the difference is the cost of the calls alone. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

FEW, MANY, REPEATS = 10, 110, 60


class Scale(torch.autograd.Function):
    """Saves its input, so that the ctx has something to keep."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor, None


def model(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """`count` calls, one after the other."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = Scale.apply(x, 1.001)
        return x.sum()

    return run


def seconds(function: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Median of one forward and backward."""
    x = torch.ones(8, 8, requires_grad=True)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function(x).backward()
        times.append(time.perf_counter() - start)
        x.grad = None
    return sorted(times)[len(times) // 2]


def main() -> None:
    """Prints microseconds per call."""
    torch.set_num_threads(1)
    costs = {}
    for name, compile_ in (("eager", lambda f: f), ("ort_training", lambda f: torch.compile(f, backend="ort_training"))):
        few, many = compile_(model(FEW)), compile_(model(MANY))
        costs[name] = min((seconds(many) - seconds(few)) / (MANY - FEW) * 1e6 for _ in range(3))
    for name, cost in costs.items():
        print(f"{name:>14}: {cost:6.1f} us a call, forward and backward")
    print(f"{'above eager':>14}: {costs['ort_training'] - costs['eager']:6.1f} us")


if __name__ == "__main__":
    main()
