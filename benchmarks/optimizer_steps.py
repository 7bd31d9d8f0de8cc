"""Compiled steps of PyTorch's optimizers, beside eager PyTorch's in each of its forms and inductor's. One thread, processor time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.turns import cell, processor_times

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD with momentum": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options),
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
}
# Column -> (backend, options of the optimizer)
WAYS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "eager": (None, {"foreach": False}),
    "foreach": (None, {"foreach": True}),
    "fused": (None, {"fused": True}),
    "inductor": ("inductor", {}),
    "ort_training": ("ort_training", {}),
}


def step_of(make: Callable[..., torch.optim.Optimizer], backend: str | None, options: dict[str, Any], count: int, width: int) -> Callable[[], Any]:
    """A step of `count` matrices (width, width) and as many vectors, with gradients that stay."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size)) for _ in range(count) for size in ((width, width), (width,))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters, **options)

    def step() -> None:
        optimizer.step()

    return step if backend is None else torch.compile(step, backend=backend)


def main() -> None:
    """Prints milliseconds, and in brackets the part of eager PyTorch's time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_steps", description=__doc__)
    parser.add_argument("--count", type=int, default=24, help="how many matrices, and vectors beside them")
    parser.add_argument("--width", type=int, default=256, help="rows and columns of a matrix")
    parser.add_argument("--seconds", type=float, default=5, help="of steps, for each optimizer")
    parser.add_argument("--only", nargs="+", choices=tuple(OPTIMIZERS), default=list(OPTIMIZERS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        title=f"a step of {arguments.count} matrices of {arguments.width} x {arguments.width} and as many vectors, ms of processor time", width=110
    )
    for column in ("", *WAYS):
        table.add_column(column)
    for name in arguments.only:
        steps = {}
        for way, (backend, options) in WAYS.items():
            torch._dynamo.reset()
            try:
                steps[way] = step_of(OPTIMIZERS[name], backend, options, arguments.count, arguments.width)
            except TypeError:  # the optimizer has no fused form
                continue
        times = dict(zip(steps, processor_times(list(steps.values()), arguments.seconds, 9, 200)))
        table.add_row(name, *(cell(times[way], times["eager"]) if way in times else "" for way in WAYS))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
