"""Calls a function in a fresh process.

python -m benchmarks.process JOB RESULT     # two JSON files; `call` does this
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

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
    job, result = caches / "job.json", caches / "result.json"
    job.write_text(json.dumps({"module": _module(function), "function": function.__qualname__, "threads": threads, "arguments": arguments}))
    result.unlink(missing_ok=True)
    variables = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **(environment or {}),
    }
    command = [sys.executable, "-m", "benchmarks.process", str(job), str(result)]
    try:
        process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ProcessError(f"took longer than {timeout:.0f} s") from None
    if not result.exists():
        raise ProcessError(f"the process ended with status {process.returncode}: {process.stderr.strip()[-200:]}")
    answer = json.loads(result.read_text())
    if "error" in answer:
        raise ProcessError(answer["error"])
    return answer["result"]


def _module(function: Callable[..., Any]) -> str:
    """Its module; for the one that runs as a script, the name under which it can be imported."""
    module = sys.modules[function.__module__]
    return module.__spec__.name if function.__module__ == "__main__" and module.__spec__ else function.__module__


def summary(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(line.strip() for line in f"{type(error).__name__}: {error}".splitlines()[:2])  # Dynamo's second line has the cause
    return text[:300]


def main() -> None:
    """The command line: the file of the job, the file for its result."""
    job, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(job["threads"])
    logging.getLogger("ort_backend").setLevel(logging.ERROR)  # what it warns about is in its report
    try:
        answer = {"result": getattr(importlib.import_module(job["module"]), job["function"])(**job["arguments"])}
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is its result
        answer = {"error": summary(error)}
    result.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
