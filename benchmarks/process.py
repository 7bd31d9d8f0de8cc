"""Calls functions in fresh processes, which are forked from one that has imported PyTorch and nothing of any backend: that saves seconds each.

python -m benchmarks.process     # that process: a job a line; `call` starts it
"""

from __future__ import annotations

import compileall
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every backend needs it
import transformers.modeling_utils  # noqa: F401 - so do half of the models

ROOT = Path(__file__).parents[1]


class ProcessError(Exception):
    """A process died, took too long, or raised something; the message says what, in one line."""


def call(
    function: Callable[..., Any],
    *,
    threads: int = 1,
    caches: Path | None = None,
    timeout: float = 900.0,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """What `function(**arguments)` returns in a fresh process.

    Args:
        function: Of a module; its arguments and result can be written as JSON.
        threads: For PyTorch and ONNX Runtime.
        caches: Folder where inductor and Triton keep their caches; None: an empty one, for this call only.
        timeout: In seconds.
        environment: Further variables.
        arguments: The function's.

    Raises:
        ProcessError: it failed.
    """
    if caches is None:
        with tempfile.TemporaryDirectory() as folder:
            return call(function, threads=threads, caches=Path(folder), timeout=timeout, environment=environment, **arguments)
    caches.mkdir(parents=True, exist_ok=True)
    result, log = caches / "result.json", caches / "log.txt"
    result.unlink(missing_ok=True)
    job = {
        "module": _module(function),
        "function": function.__qualname__,
        "arguments": arguments,
        "threads": threads,
        "result": str(result),
        "log": str(log),
        "environment": {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")},
    }
    status = _Parent.of(threads, tuple(sorted((environment or {}).items()))).run(job, timeout)
    if not result.exists():
        raise ProcessError(f"the process ended with status {status}: {log.read_text(errors='replace').strip()[-200:]}")
    answer = json.loads(result.read_text())
    if "error" in answer:
        raise ProcessError(answer["error"])
    return answer["result"]


class _Parent:
    """The process from which the others are forked."""

    def __init__(self, threads: int, environment: tuple[tuple[str, str], ...]) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, **dict(environment)}
        command = [sys.executable, "-m", "benchmarks.process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True, bufsize=1)

    @classmethod
    @functools.cache
    def of(cls, threads: int, environment: tuple[tuple[str, str], ...]) -> _Parent:
        """One for each number of threads and environment; it ends with this process, which holds its standard input."""
        return cls(threads, environment)

    def run(self, job: dict[str, Any], timeout: float) -> int:
        """Runs a job and waits for it; its exit status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        child = int(self._process.stdout.readline())
        ended, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ended:
            os.kill(child, signal.SIGKILL)
        status = int(self._process.stdout.readline())
        if not ended:
            raise ProcessError(f"took longer than {timeout:.0f} s")
        return status


def _module(function: Callable[..., Any]) -> str:
    """Its module; for the one that runs as a script, the name under which it can be imported."""
    module = sys.modules[function.__module__]
    return module.__spec__.name if function.__module__ == "__main__" and module.__spec__ else function.__module__


def summary(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(line.strip() for line in f"{type(error).__name__}: {error}".splitlines()[:2])  # Dynamo's second line has the cause
    return text[:300]


def work(job: dict[str, Any]) -> None:
    """In the fresh process: calls the function and writes its result, or what it raised."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["environment"])
    torch.set_num_threads(job["threads"])
    logging.getLogger("ort_backend").setLevel(logging.ERROR)  # what it warns about is in its report
    try:
        answer = {"result": getattr(importlib.import_module(job["module"]), job["function"])(**job["arguments"])}
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is its result
        answer = {"error": summary(error)}
    Path(job["result"]).write_text(json.dumps(answer))


def write_bytecode() -> None:
    """Compiles this project's Python, as pip does with what it installs: a checkout has no bytecode yet, or never under PYTHONDONTWRITEBYTECODE."""
    for folder in ("ort_backend", "lowering", "runtime", "guards", "benchmarks"):
        compileall.compile_dir(ROOT / folder, quiet=2)


def main() -> None:
    """Forks for every line of standard input: prints the child's process id, and when it is done its exit status.

    What the child has started ends with it: contestants that hang, workers of a compiler.
    """
    write_bytecode()
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            try:
                work(json.loads(line))
            finally:
                os._exit(0)
        print(child, flush=True)
        try:
            _, status = os.waitpid(child, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
