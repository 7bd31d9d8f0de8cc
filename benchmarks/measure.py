"""What is measured, each in a process of its own: `compile_and_memory` of one backend, `step_times` of all of them, which has one for each."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from typing import Any

import torch

from benchmarks import compare, contestant, memory
from benchmarks.contestant import Contestant, ContestantError, Elsewhere
from benchmarks.models import WORKLOADS, Workload
from benchmarks.training import REFERENCE, Trainer, import_backend

TURN = 0.02  # seconds: a backend's turn in a round takes at least as long
ROUNDS = (7, 101)  # at least, at most
MEMORY_STEPS = 3


def compile_and_memory(model: str, backend: str, device: str, dtype: str) -> dict[str, Any]:
    """`first_steps` of a workload by its name."""
    return first_steps(WORKLOADS[model], backend, device, getattr(torch, dtype))


def first_steps(workload: Workload, backend: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The first step of a fresh process, and the memory of later ones.

    Returns:
        `compile_seconds`: imports and the first step, less a later step. `peak_bytes`: the most memory during steps, above what there was
        with model, batches and imports. `base_bytes`: that. `rest_bytes`: what the compile left, between steps: code, graphs, pools.
        `allocator_peak_bytes`: PyTorch's own figure, on CUDA. `details`: see `contestant`.
    """
    trainer = Trainer(workload, backend, device, dtype)
    imports = import_backend(backend)
    memory.settle()
    base = memory.used(device)
    first, _ = trainer.step()
    trainer.update()
    later = trainer.median(3)
    memory.reset_peak(device)
    rest = memory.used(device)
    trainer.median(MEMORY_STEPS)
    return {
        "import_seconds": imports,
        "first_step_seconds": first,
        "compile_seconds": imports + first - later,
        "base_bytes": base,
        "peak_bytes": memory.peak(device) - base,
        "rest_bytes": rest - base,
        "allocator_peak_bytes": memory.allocator_peak(device),
        "details": contestant.details(backend),
    }


def step_times(model: str, backends: list[str], device: str, dtype: str, seconds: float, *, recompiles: bool = True) -> dict[str, dict[str, Any]]:
    """`take_turns` with a workload by its name."""
    return take_turns(WORKLOADS[model], backends, device, getattr(torch, dtype), seconds, recompiles=recompiles)


def take_turns(
    workload: Workload, backends: list[str], device: str, dtype: torch.dtype, seconds: float, *, recompiles: bool = True
) -> dict[str, dict[str, Any]]:
    """Step times of all backends, which take turns, each in a process of its own; every loss and the first gradients are compared with eager's.

    Args:
        workload: What to train.
        backends: Eager among them.
        device: `"cpu"` or `"cuda"`.
        dtype: `torch.float32`, or a type for autocast.
        seconds: How long the turns may take, all together; there are seven rounds even if that takes longer.
        recompiles: Whether each compiles once more in the end, for `warm_compile_seconds`.

    Returns:
        By backend: `error` (None, a wrong loss or gradient, or an exception), `turns` (milliseconds a step), `step_ms` (median, quartiles),
        `steps`, `loss_difference` (largest, relative), `warm_compile_seconds`; `details` and, on CUDA, `allocator_peak_bytes` of the process.

    Raises:
        ContestantError: eager failed.
    """
    with contextlib.ExitStack() as stack:
        entries = {}
        for backend in backends:
            entries[backend] = Entry(Elsewhere(functools.partial(Contestant, workload, backend, device, dtype)), is_reference=backend == REFERENCE)
            stack.callback(entries[backend].process.close)
        steps = [step for entry in entries.values() if (step := entry.ask("warm_up")) is not None]
        per_turn = math.ceil(TURN / min(steps))
        rounds = max(ROUNDS[0], min(ROUNDS[1], int(seconds / (per_turn * sum(steps)))))
        for number in range(rounds):
            first = number % len(backends)
            for backend in (*backends[first:], *backends[:first]):
                entries[backend].turn(per_turn)
        for entry in entries.values():
            entry.finish(recompiles=recompiles)
        in_float32 = (None, None) if dtype == torch.float32 else _in_float32(workload, device, len(entries[REFERENCE].losses))
        return {backend: _judged(entry, entries[REFERENCE], dtype, in_float32) for backend, entry in entries.items()}


def _in_float32(workload: Workload, device: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of so many steps and the first gradients of the reference without autocast."""
    process = Elsewhere(functools.partial(Contestant, workload, REFERENCE, device, torch.float32))
    try:
        process.ask("warm_up")
        losses, gradients = process.ask("computed")
        if len(losses) < steps:
            process.ask("turn", steps - len(losses))
            losses, gradients = process.ask("computed")
        return losses, {name: torch.from_numpy(gradient) for name, gradient in gradients.items()}
    finally:
        process.close()


class Entry:
    """A contestant with its times. One that fails is asked nothing more, unless it is the reference: without that there is nothing to compare."""

    def __init__(self, process: Elsewhere, *, is_reference: bool) -> None:
        self.process, self._is_reference = process, is_reference
        self.error: str | None = None
        self.turns: list[float] = []  # seconds of a step, the mean over a turn
        self.warm_compile_seconds: float | None = None
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.process_says: dict[str, Any] = {}

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the contestant answers; None if it fails, or has failed."""
        if self.error is not None:
            return None
        try:
            return self.process.ask(method, *arguments)
        except ContestantError as error:
            if self._is_reference:
                raise
            self.error = str(error)
            return None

    def turn(self, steps: int) -> None:
        """Some steps, whose mean counts."""
        if (seconds := self.ask("turn", steps)) is not None:
            self.turns.append(seconds)

    def finish(self, *, recompiles: bool) -> None:
        """Behind the turns: what it computed, and what another compile takes."""
        if (computed := self.ask("computed")) is not None:
            self.losses = computed[0]
            self.gradients = {name: torch.from_numpy(gradient) for name, gradient in computed[1].items()}
        self.process_says = self.ask("described") or {}
        if recompiles and not self._is_reference:
            self.warm_compile_seconds = self.ask("recompile")


def _judged(entry: Entry, reference: Entry, dtype: torch.dtype, in_float32: tuple[Any, Any]) -> dict[str, Any]:
    if entry.error is not None:
        return {"error": entry.error}
    turns = [seconds * 1e3 for seconds in entry.turns]
    low, median, high = statistics.quantiles(turns, n=4)
    wrong = (
        compare.loss_error(entry.losses, reference.losses, dtype, in_float32[0]),
        compare.gradient_error(entry.gradients, reference.gradients, dtype, in_float32[1]),
    )
    return {
        "error": "; ".join(filter(None, wrong)) or None,
        "turns": turns,
        "step_ms": {"median": median, "low": low, "high": high},
        "steps": len(entry.losses),
        "loss_difference": compare.loss_difference(entry.losses, reference.losses),
        "warm_compile_seconds": entry.warm_compile_seconds,
        **entry.process_says,
    }
