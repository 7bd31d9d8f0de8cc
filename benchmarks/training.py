"""One workload under one backend: its steps, timed."""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
from typing import Any

import torch
import torch._dynamo  # every backend needs it, so that no compile is charged for its import
from torch import Tensor

from benchmarks.models import Batch, Workload, loss_of

BACKENDS = ("eager", "aot_eager", "inductor", "ort_training")
REFERENCE = "eager"

# What a backend imports at its first compile.
_IMPORTS = {
    "aot_eager": ("torch._dynamo.backends.debugging",),
    "inductor": ("torch._inductor.compile_fx",),
    "ort_training": ("ort_backend.compiler",),
}


def import_backend(backend: str) -> float:
    """Imports what the backend needs; the seconds that takes."""
    started = time.perf_counter()
    for module in _IMPORTS.get(backend, ()):
        importlib.import_module(module)
    return time.perf_counter() - started


class Trainer:
    """A model that trains under a backend, from the same weights on the same batches as under every other.

    Args:
        workload: What to train.
        backend: `"eager"`, or the name of a backend of `torch.compile`.
        device: `"cpu"` or `"cuda"`.
        dtype: `torch.float32`, or a type for autocast.
        options: The backend's.
    """

    def __init__(
        self, workload: Workload, backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32, options: dict[str, Any] | None = None
    ) -> None:
        self.backend, self._device, self._dtype, self._options = backend, device, dtype, options
        self.model, self.batches = workload.build(device)
        self._learning_rate = workload.learning_rate
        self._steps = 0
        self._compiled: Any = None

    def forget(self) -> None:
        """The next step compiles again."""
        torch._dynamo.reset()
        self._compiled = None

    def step(self) -> tuple[float, float]:
        """Forward and backward on the next batch: seconds, loss."""
        batch = self.batches[self._steps % len(self.batches)]
        self._steps += 1
        self._synchronize()
        started = time.perf_counter()
        loss = loss_of(self.forward(batch))
        loss.backward()
        self._synchronize()
        seconds = time.perf_counter() - started
        return seconds, loss.item()

    def forward(self, batch: Batch) -> Any:
        """The model's output; the first call compiles."""
        if self._compiled is None:
            self._compiled = self.model if self.backend == "eager" else torch.compile(self.model, backend=self.backend, options=self._options)
        with self._autocast():
            return self._compiled(**batch)

    def update(self) -> None:
        """Plain SGD, outside the timing, and the gradients are gone: each step has another loss, which depends on the gradients before."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self._learning_rate)
        self.model.zero_grad()

    def median(self, steps: int) -> float:
        """Median seconds of some steps."""
        seconds = []
        for _ in range(steps):
            seconds.append(self.step()[0])
            self.update()
        return statistics.median(seconds)

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients that are there, by parameter."""
        return {name: parameter.grad.clone() for name, parameter in self.model.named_parameters() if parameter.grad is not None}

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if self._dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self._dtype)

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
