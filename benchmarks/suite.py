"""A whole run: which jobs there are, a process for each, and one dictionary of all results, which becomes the JSON file."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import machine
from benchmarks.compare import Ratio, geometric_mean
from benchmarks.models import WORKLOADS
from benchmarks.training import REFERENCE

FORMAT = 1
ROOT = Path(__file__).parents[1]

# Backends that keep caches on disk, so that a fresh process with them differs from one without.
CACHING = ("inductor",)

# What the ratios compare: the first by the second.
PAIRS = (("ort_training", "eager"), ("ort_training", "inductor"), ("inductor", "eager"))

# Measures of a backend besides step times: key, and whether eager has it.
MEASURES = {"cold_compile_seconds": False, "cached_compile_seconds": False, "warm_compile_seconds": False, "peak_bytes": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run.

    Attributes:
        models: Names of workloads.
        backends: Eager, with which all are compared, is among them.
        device: `"cpu"` or `"cuda"`.
        dtypes: `"float32"`, and types for autocast.
        threads: For PyTorch and ONNX Runtime.
        seconds: For the step times of a model, all backends together.
        compiles: Whether compile times and memory are measured, which takes a process for each backend.
        timeout: Seconds after which a process is given up.
        command: For the report.
    """

    models: tuple[str, ...]
    backends: tuple[str, ...]
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32",)
    threads: int = 1
    seconds: float = 12.0
    compiles: bool = True
    timeout: float = 900.0
    command: str = ""


class JobError(Exception):
    """A process died or took too long."""


def run(settings: Settings) -> dict[str, Any]:
    """Runs everything, under a progress bar.

    Returns:
        `format`, `command`, `date`, `seconds`, `machine`, `settings`, `models` (see `_model`), `geometric_means`, `errors` (lines of text).
    """
    started, date = time.perf_counter(), datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    described = machine.describe(settings.device)
    cases = [(name, dtype) for name in settings.models for dtype in settings.dtypes]
    models = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("", total=len(cases) * len(list(_jobs(settings, "", ""))))
        for name, dtype in cases:
            case = name if dtype == "float32" else f"{name}-{dtype}"
            results = []
            for job in _jobs(settings, name, dtype):
                progress.update(task, description=f"{case}: {job['title']}")
                results.append((job, _outcome(job, Path(folder) / case, settings)))
                progress.advance(task)
            models[case] = _model(name, dtype, settings, results)
        progress.update(task, description="done")
    return {
        "format": FORMAT,
        "command": settings.command,
        "date": date,
        "seconds": time.perf_counter() - started,
        "machine": {**described, "load_after": list(os.getloadavg())},
        "settings": dataclasses.asdict(settings),
        "models": models,
        "geometric_means": _geometric_means(models),
        "errors": [f"{case}, {name}: {one['error']}" for case, model in models.items() for name, one in model["backends"].items() if one["error"]],
    }


def _jobs(settings: Settings, name: str, dtype: str) -> Iterator[dict[str, Any]]:
    """The processes of one model. The step times come last, when inductor's cache is full."""
    common = {"model": name, "dtype": dtype, "device": settings.device, "threads": settings.threads}
    for backend in settings.backends if settings.compiles else ():
        yield {**common, "kind": "compile", "backend": backend, "title": f"{backend}, cold"}
        if backend in CACHING:
            yield {**common, "kind": "compile", "backend": backend, "cached": True, "title": f"{backend}, with its cache"}
    yield {**common, "kind": "steps", "backends": list(settings.backends), "seconds": settings.seconds, "title": "steps"}


def _outcome(job: dict[str, Any], folder: Path, settings: Settings) -> dict[str, Any]:
    """A job's result, or `{"error": ...}`."""
    try:
        return run_process(job, folder, settings.timeout)
    except JobError as error:
        return {"error": str(error)}


def run_process(job: dict[str, Any], caches: Path, timeout: float = 900.0) -> dict[str, Any]:
    """Runs a job in a fresh process; its result, which is `{"error": ...}` where something was raised.

    Args:
        job: See `benchmarks.measure.run`.
        caches: Folder where inductor and Triton keep their caches; a new one is empty.
        timeout: In seconds.

    Raises:
        JobError: it died, or took too long.
    """
    caches.mkdir(parents=True, exist_ok=True)
    files = [caches / name for name in ("job.json", "result.json")]
    files[0].write_text(json.dumps(job))
    files[1].unlink(missing_ok=True)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "OMP_NUM_THREADS": str(job["threads"]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    try:
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.measure", *map(str, files)], env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise JobError(f"took longer than {timeout:.0f} s") from None
    if process.returncode or not files[1].exists():
        lines = process.stderr.strip().splitlines()
        raise JobError(lines[-1] if lines else f"exit status {process.returncode}")
    return json.loads(files[1].read_text())["result"]


def _model(name: str, dtype: str, settings: Settings, results: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """What was measured of one model.

    Returns:
        `model`, `sizes`, `dtype`, `backends` (by name: `error`, the step times, and the measures, None where there is none),
        `ratios` (by `"a/b"`: the step time's `median`, `low`, `high`, `within_noise`; and the other measures' plain ratios).
    """
    backends: dict[str, dict[str, Any]] = {backend: {"error": None, **dict.fromkeys(MEASURES)} for backend in settings.backends}
    for job, result in results:
        if job["kind"] == "steps":
            for backend, one in backends.items():
                measured = result if set(result) == {"error"} else result[backend]
                one.update({**measured, "error": one["error"] or measured["error"]})
            continue
        one = backends[job["backend"]]
        if "error" in result:
            one["error"] = one["error"] or result["error"]
            continue
        if job["backend"] != REFERENCE:
            one["cached_compile_seconds" if job.get("cached") else "cold_compile_seconds"] = result["compile_seconds"]
        if job["backend"] not in CACHING or job.get("cached"):
            one["peak_bytes"] = result["peak_bytes"]
            one["process"] = result
        if job["backend"] not in (*CACHING, REFERENCE):
            one["cached_compile_seconds"] = result["compile_seconds"]  # it has no caches
    return {"model": name, "sizes": WORKLOADS[name].sizes, "dtype": dtype, "backends": backends, "ratios": _ratios(backends)}


def _ratios(backends: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of those that computed the right thing."""
    ratios = {}
    for name, other in PAIRS:
        one, two = backends.get(name), backends.get(other)
        if one is None or two is None or one["error"] or two["error"]:
            continue
        step = Ratio.of(one["turns"], two["turns"])
        measures = {key: one[key] / two[key] for key in MEASURES if one[key] and two[key] and one[key] > 0 and two[key] > 0}
        ratios[f"{name}/{other}"] = {"step": {**dataclasses.asdict(step), "within_noise": step.within_noise}, **measures}
    return ratios


def _geometric_means(models: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By pair and measure: `mean`, `least`, `most` and how many `models`."""
    means: dict[str, dict[str, Any]] = {}
    for pair in (f"{a}/{b}" for a, b in PAIRS):
        found = [model["ratios"][pair] for model in models.values() if pair in model["ratios"]]
        for measure in ("step", *MEASURES):
            values = [one[measure]["median"] if measure == "step" else one[measure] for one in found if measure in one]
            if values:
                means.setdefault(pair, {})[measure] = {
                    "mean": geometric_mean(values),
                    "least": min(values),
                    "most": max(values),
                    "models": len(values),
                }
    return means
