"""Runs each workload of the zoo in a process of its own: ONNX Runtime can end one.

The processes are forked from one that has imported PyTorch, transformers and this backend, and has done nothing else.
"""

from __future__ import annotations

import functools
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.zoo_models import Workload, checkpointed
from benchmarks.zoo_step import Result, compare

TIMEOUT = 600.0  # seconds

_context = multiprocessing.get_context("forkserver")


def run(workloads: Sequence[Workload], mode: str, jobs: int = 1, timeout: float = TIMEOUT) -> Iterator[Result]:
    """Results in the order in which they come, at most `jobs` processes at a time."""
    ours = [f"ort_backend.{name}" for name in ("compiler", "joint", "regions")]
    _context.set_forkserver_preload(["benchmarks.zoo_process", "onnxruntime", "transformers", *ours])
    waiting, running = list(workloads), list[tuple[Workload, _Child]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            workload = waiting.pop(0)
            running.append((workload, _Child(functools.partial(_compare, workload.name, mode))))
        wait([child.connection for _, child in running], timeout=1.0)
        for one in list(running):
            workload, child = one
            if child.ended(timeout):
                running.remove(one)
                yield child.result or Result(workload.name, workload.family, broken=child.problem)


def isolated(function: Callable[[], Any], timeout: float = TIMEOUT) -> tuple[Any, str]:
    """Calls a picklable function in a process of its own: its result, and what went wrong (empty if nothing did)."""
    child = _Child(function)
    while not child.ended(timeout):
        wait([child.connection], timeout=1.0)
    return child.result, child.problem


class _Child:
    """A process that sends what a function returns, or how it failed."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.connection, theirs = _context.Pipe(duplex=False)
        self.result: Any = None
        self.problem = ""
        self._process = _context.Process(target=_send, args=(function, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._began = time.monotonic()

    def ended(self, timeout: float) -> bool:
        """Whether it has sent something, has died, or has had its time; `result` or `problem` is set then."""
        if self.connection.poll():
            try:
                self.result, self.problem = self.connection.recv()
            except EOFError:
                self._process.join()
                self.problem = f"the process ended: {_death(self._process.exitcode)}"
        elif time.monotonic() - self._began > timeout:
            self._process.kill()
            self.problem = f"not done after {timeout:.0f} s"
        else:
            return False
        self._process.join()
        self.connection.close()
        return True


def _send(function: Callable[[], Any], connection: Connection) -> None:
    try:
        connection.send((function(), ""))
    except Exception as error:  # noqa: BLE001  whatever it is, it is this workload's result
        connection.send((None, f"{type(error).__name__}: {_short(str(error))}, in {_place(error)}"))


def _compare(name: str, mode: str) -> Result:
    torch.set_num_threads(1)
    return compare(checkpointed.find(name), mode)


def _short(text: str) -> str:
    """A message's first lines, as one."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())[:400]


def _place(error: BaseException) -> str:
    """Where an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name} ({frame.filename}:{frame.lineno})"


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit status {exitcode}"
