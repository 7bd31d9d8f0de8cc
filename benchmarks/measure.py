"""What is measured, each in a process of its own: `compile_and_memory` of one backend, `step_times` of all of them.

python -m benchmarks.measure JOB RESULT     # two JSON files; `benchmarks.suite` does this
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from benchmarks import compare, memory
from benchmarks.models import WORKLOADS, Workload
from benchmarks.process import summary
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
        `allocator_peak_bytes`: PyTorch's own figure, on CUDA. `details`: see there.
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
        "details": details(backend),
    }


def details(backend: str) -> dict[str, Any]:
    """What `ort_backend.report()` says of the graphs; nothing for other backends."""
    if backend != "ort_training":
        return {}
    import ort_backend

    graphs = ort_backend.report().graphs
    return {
        "graphs": len(graphs),
        "onnx_nodes": sum(graph.onnx_nodes for graph in graphs),
        "python_ops": sum(graph.python_ops for graph in graphs),
        "python_op_names": sorted({one.operator for graph in graphs for one in graph.outside}),
        "capture_seconds": sum(graph.capture_seconds for graph in graphs),
        "lowering_seconds": sum(graph.lowering_seconds for graph in graphs),
        "session_seconds": sum(graph.session_seconds for graph in graphs),
        "kept_bytes": sum(graph.kept_bytes for graph in graphs),
    }


class Contestant:
    """A backend among those that take turns, with its times and losses."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.error: str | None = None
        self.losses: list[float] = []
        self.turns: list[float] = []  # seconds of a step, the mean over a turn
        self.gradients: dict[str, torch.Tensor] = {}
        self.warm_compile_seconds: float | None = None

    def step(self) -> float:
        """One step; seconds."""
        seconds, loss = self.trainer.step()
        if not self.losses:
            self.gradients = self.trainer.gradients()
        self.trainer.update()
        self.losses.append(loss)
        return seconds

    def turn(self, steps: int) -> None:
        """Some steps, whose mean counts."""
        self.turns.append(statistics.fmean(self.step() for _ in range(steps)))

    def recompile(self) -> None:
        """A compile in a process that has compiled it before."""
        self.trainer.forget()
        first, _ = self.trainer.step()
        self.trainer.update()
        self.warm_compile_seconds = first - self.trainer.median(3)


def step_times(model: str, backends: list[str], device: str, dtype: str, seconds: float) -> dict[str, dict[str, Any]]:
    """`take_turns` with a workload by its name."""
    return take_turns(WORKLOADS[model], backends, device, getattr(torch, dtype), seconds)


def take_turns(workload: Workload, backends: list[str], device: str, dtype: torch.dtype, seconds: float) -> dict[str, dict[str, Any]]:
    """Step times of all backends, which take turns; every loss and the first gradients are compared with eager's.

    Args:
        workload: What to train.
        backends: Eager among them.
        device: `"cpu"` or `"cuda"`.
        dtype: `torch.float32`, or a type for autocast.
        seconds: How long the turns may take, all together; there are seven rounds even if that takes longer.

    Returns:
        By backend: `error` (None, a wrong loss or gradient, or an exception), `turns` (milliseconds a step), `step_ms` (median, quartiles),
        `steps`, `loss_difference` (largest, relative), `warm_compile_seconds`.
    """
    contestants = {backend: Contestant(Trainer(workload, backend, device, dtype)) for backend in backends}
    steps = {backend: time_of for backend, time_of in ((b, _warm_up(c)) for b, c in contestants.items()) if time_of is not None}
    per_turn = math.ceil(TURN / min(steps.values()))
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(seconds / (per_turn * sum(steps.values())))))
    alive = [contestants[backend] for backend in steps]
    for number in range(rounds):
        first = number % len(alive)
        for contestant in (*alive[first:], *alive[:first]):
            contestant.turn(per_turn)
    for contestant in alive:
        if contestant.trainer.backend != REFERENCE:
            contestant.recompile()
    return {backend: _judged(contestant, contestants[REFERENCE], dtype) for backend, contestant in contestants.items()}


def _warm_up(contestant: Contestant) -> float | None:
    """Compiles; the seconds of a step, None if that fails."""
    try:
        for _ in range(2):
            contestant.step()
        return min(contestant.step() for _ in range(2))
    except Exception as error:  # whatever a backend raises is that backend's result
        if contestant.trainer.backend == REFERENCE:
            raise
        contestant.error = summary(error)
        return None


def _judged(contestant: Contestant, reference: Contestant, dtype: torch.dtype) -> dict[str, Any]:
    if contestant.error is not None:
        return {"error": contestant.error}
    turns = [seconds * 1e3 for seconds in contestant.turns]
    low, median, high = statistics.quantiles(turns, n=4)
    wrong = (
        compare.loss_error(contestant.losses, reference.losses, dtype),
        compare.gradient_error(contestant.gradients, reference.gradients, dtype),
    )
    return {
        "error": "; ".join(filter(None, wrong)) or None,
        "turns": turns,
        "step_ms": {"median": median, "low": low, "high": high},
        "steps": len(contestant.losses),
        "loss_difference": compare.loss_difference(contestant.losses, reference.losses),
        "warm_compile_seconds": contestant.warm_compile_seconds,
    }
