"""A backend among those that take turns, in a process of its own.

What one does to its process no other has: where something was compiled with `ort_training`, the C library keeps freed memory, which makes eager
PyTorch faster there, too.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks import memory
from benchmarks.models import Workload
from benchmarks.process import summary
from benchmarks.training import Trainer


class ContestantError(Exception):
    """What a contestant raised, in one line, or that its process ended."""


class Contestant:
    """Trains a workload under a backend, with its losses."""

    def __init__(self, workload: Workload, backend: str, device: str, dtype: torch.dtype) -> None:
        self._trainer = Trainer(workload, backend, device, dtype)
        self._backend, self._device = backend, device
        self._losses: list[float] = []
        self._gradients: dict[str, np.ndarray] = {}

    def _step(self) -> float:
        seconds, loss = self._trainer.step()
        if not self._losses:
            self._gradients = {name: gradient.float().cpu().numpy() for name, gradient in self._trainer.gradients().items()}
        self._trainer.update()
        self._losses.append(loss)
        return seconds

    def warm_up(self) -> float:
        """Compiles; the seconds of a step after that."""
        for _ in range(2):
            self._step()
        if self._device == "cuda":
            memory.reset_peak(self._device)
        return min(self._step() for _ in range(2))

    def turn(self, steps: int) -> float:
        """Some steps; the mean of their seconds."""
        return statistics.fmean(self._step() for _ in range(steps))

    def recompile(self) -> float:
        """The seconds of a compile in a process that has compiled it before."""
        self._trainer.forget()
        first, _ = self._trainer.step()
        self._trainer.update()
        return first - self._trainer.median(3)

    def described(self) -> dict[str, Any]:
        """`details` of this process, and on CUDA `allocator_peak_bytes` of the steps behind the first ones."""
        return {"details": details(self._backend), "allocator_peak_bytes": memory.allocator_peak(self._device)}

    def computed(self) -> tuple[list[float], dict[str, np.ndarray]]:
        """The losses of all steps, and the gradients of the first one, by parameter."""
        return self._losses, self._gradients


def details(backend: str) -> dict[str, Any]:
    """What `ort_backend.report()` says of the graphs; nothing for other backends."""
    if backend != "ort_training":
        return {}
    import ort_backend

    graphs = ort_backend.report().graphs
    return {
        "graphs": len(graphs),
        "sessions": sum(graph.sessions for graph in graphs),
        "onnx_nodes": sum(graph.onnx_nodes for graph in graphs),
        "python_ops": sum(graph.python_ops for graph in graphs),
        "python_op_names": sorted({one.operator for graph in graphs for one in graph.outside}),
        "capture_seconds": sum(graph.capture_seconds for graph in graphs),
        "lowering_seconds": sum(graph.lowering_seconds for graph in graphs),
        "session_seconds": sum(graph.session_seconds for graph in graphs),
        "kept_bytes": sum(graph.kept_bytes for graph in graphs),
    }


class Elsewhere:
    """A contestant, or whatever `make` returns, in a process of its own, forked from this one. It does nothing but what `ask` waits for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, theirs, self._pipe), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the contestant's method returns.

        Raises:
            ContestantError: what it raised, in one line; or its process has ended.
        """
        try:
            self._pipe.send((method, arguments))
            failed, answer = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            raise ContestantError(f"the process ended with status {self._process.exitcode}") from None
        if failed:
            raise ContestantError(answer)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(make: Callable[[], Any], pipe: Connection, other_end: Connection) -> None:
    """In the process: answers until the other end is closed, with whether it failed, and the result."""
    other_end.close()
    # In a forked process PyTorch makes its pool of threads anew at the first call; autograd's threads, of which a build with CUDA has several, would
    # make it at once, and end the process (one in twenty, seen in torch 2.14).
    torch.set_num_threads(torch.get_num_threads())
    contestant = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            contestant = contestant or make()
            pipe.send((False, getattr(contestant, method)(*arguments)))
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is its result
            pipe.send((True, summary(error)))
