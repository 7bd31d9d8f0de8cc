"""Where the host's time goes in a training step on a GPU: until it has started everything, what of that is spent in calls of PyTorch's kernels from
inside the session and on memory, which calls of CUDA's runtime are made; and how long the device is busy meanwhile.

    python -m benchmarks.host --models gpt2-small bert-base   # bfloat16 autocast, beside eager PyTorch, and with memory of ONNX Runtime's own
    python -m benchmarks.host --models test --device cpu      # shows that the command itself works: there are no calls of CUDA

Each variant has a process of its own. Times are medians over the steps; those of parts come from other steps, which are slower for being watched.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints to stderr otherwise; read when torch is loaded

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity

from benchmarks.contestant import ContestantError, Elsewhere
from benchmarks.models import WORKLOADS
from benchmarks.training import Trainer, loss_of

# Name: backend and its options. An arena of ONNX Runtime's own costs no call of Python for each tensor.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {}),
    "ort_training": ("ort_training", {}),
    "ort_training, own arena": ("ort_training", {"provider_options": {"arena_extend_strategy": "kSameAsRequested"}}),
}
PROFILED = 3


@dataclasses.dataclass
class Part:
    """Calls of one kind: how many a step, and their milliseconds."""

    calls: float = 0.0
    milliseconds: float = 0.0


@dataclasses.dataclass
class Found:
    """What one variant takes.

    Attributes:
        host: Milliseconds until forward and backward have returned.
        step: Milliseconds until the device is done as well.
        parts: Of the host's time, by name; calls of CUDA's runtime as the profiler saw them.
        device: Milliseconds of the device: kernels, copies; `busy`: during which at least one ran.
    """

    host: float
    step: float
    parts: dict[str, Part]
    device: dict[str, Part]


class Probe:
    """A variant of a workload."""

    def __init__(self, model: str, variant: str, device: str, dtype: str, steps: int, traces: Path | None = None) -> None:
        torch.set_num_threads(1)
        self._trace = None if traces is None else traces / f"{model}-{variant.replace(', ', '-').replace(' ', '-')}.json.gz"
        backend, options = VARIANTS[variant]
        self._device, self._steps, self._is_ort = device, steps, backend == "ort_training"
        self._parts: dict[str, Part] = collections.defaultdict(Part)
        self._watched = False
        if self._is_ort and device == "cuda":
            self._watch_memory()
        self._trainer = Trainer(WORKLOADS[model], backend, device, getattr(torch, dtype), options or None)

    def measure(self) -> Found:
        """Compiles, then measures."""
        for _ in range(3):
            self._step()
        times = [self._step() for _ in range(self._steps)]
        host, step = (statistics.median(some) * 1e3 for some in zip(*times))
        if self._is_ort:
            self._watch_calls()
        self._watched = True
        for _ in range(self._steps):
            self._step()
        self._watched = False
        parts = {name: Part(one.calls / self._steps, one.milliseconds / self._steps) for name, one in self._parts.items()}
        runtime, device = self._profiled()
        return Found(host, step, {**parts, **runtime}, device)

    def _step(self) -> tuple[float, float]:
        """Seconds until the host has returned, and until the device is done."""
        self._synchronize()
        started = time.perf_counter()
        loss = loss_of(self._trainer.forward(self._trainer.batches[0]))
        loss.backward()
        returned = time.perf_counter()
        self._synchronize()
        done = time.perf_counter()
        self._trainer.update()
        return returned - started, done - started

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not self._watched:
                return function(*args)
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                part = self._parts[name]
                part.calls, part.milliseconds = part.calls + 1, part.milliseconds + (time.perf_counter() - started) * 1e3

        return call

    def _watch_memory(self) -> None:
        """Before the first session: its allocator keeps the functions."""
        for name in ("alloc", "delete"):
            attribute = f"_cuda_cudaCachingAllocator_raw_{name}"
            setattr(torch._C, attribute, self._timed(f"memory: {name}", getattr(torch._C, attribute)))

    def _watch_calls(self) -> None:
        """Of what is compiled: PyTorch's kernels by operator, and what is around all of them."""
        from ort_backend.runtime import triton_op

        for name, function in triton_op._callables.items():
            triton_op._callables[name] = self._timed(f"PyTorch: {name.partition('#')[0]}", function)

    def _profiled(self) -> tuple[dict[str, Part], dict[str, Part]]:
        """Calls of CUDA's runtime, and what the device did, a step."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device == "cuda" else [])]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PROFILED):
                self._step()
        if self._trace is not None:
            profiler.export_chrome_trace(str(self._trace))
        runtime: dict[str, Part] = collections.defaultdict(Part)
        device: dict[str, Part] = collections.defaultdict(Part)
        spans = []
        for event in profiler.events() or ():
            start, end = event.time_range.start, event.time_range.end  # microseconds
            if event.device_type == torch.autograd.DeviceType.CPU:
                if event.name.startswith(("cuda", "cu")) and "::" not in event.name:
                    _add(runtime[f"CUDA: {event.name}"], end - start)
            elif not event.name.startswith(("cuda", "aten::")):
                _add(device["copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"], end - start)
                spans.append((start, end))
        if spans:
            device["busy"] = Part(1, _covered(spans) / 1e3 / PROFILED)
        return dict(runtime), dict(device)


def _add(part: Part, microseconds: float) -> None:
    part.calls, part.milliseconds = part.calls + 1 / PROFILED, part.milliseconds + microseconds / 1e3 / PROFILED


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans cover."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def table(model: str, found: dict[str, Found], rows: int) -> Table:
    """A column for each variant."""
    made = Table(title=f"{model}: milliseconds a step (calls)")
    made.add_column("")
    for name in found:
        made.add_column(name, justify="right")
    made.add_row("host, until it has returned", *(f"{one.host:.2f}" for one in found.values()))
    made.add_row("step", *(f"{one.step:.2f}" for one in found.values()))
    for kind in ("kernels", "copies", "busy"):
        made.add_row(f"device: {kind}", *(_cell(one.device.get(kind)) for one in found.values()))
    made.add_section()
    names = {name: max(one.parts[name].milliseconds for one in found.values() if name in one.parts) for one in found.values() for name in one.parts}
    for name in sorted(names, key=lambda name: -names[name])[:rows]:
        made.add_row(name, *(_cell(one.parts.get(name)) for one in found.values()))
    return made


def _cell(part: Part | None) -> str:
    return "" if part is None else f"{part.milliseconds:.2f} ({part.calls:.0f})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2-small"], choices=sorted(WORKLOADS), metavar="MODEL")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--traces", type=Path, help="a folder for the profiler's traces, one file for each model and variant: chrome://tracing")
    parser.add_argument("--rows", type=int, default=30, help="parts that are listed")
    arguments = parser.parse_args()
    if arguments.traces is not None:
        arguments.traces.mkdir(parents=True, exist_ok=True)
    console = Console(width=120)
    for model in arguments.models:
        found: dict[str, Found] = {}
        for variant in arguments.variants:
            if arguments.device == "cpu" and variant.endswith("own arena"):
                continue
            process = Elsewhere(functools.partial(Probe, model, variant, arguments.device, arguments.dtype, arguments.steps, arguments.traces))
            try:
                found[variant] = process.ask("measure")
            except ContestantError as problem:
                console.print(f"{model}, {variant}: {problem}", highlight=False)
            finally:
                process.close()
        if found:
            console.print(table(model, found, arguments.rows))


if __name__ == "__main__":
    main()
