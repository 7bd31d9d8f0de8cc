"""A whole run: which jobs there are, a process for each, and one dictionary of all results, which becomes the JSON file."""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import machine, measure, process
from benchmarks.compare import Ratio, geometric_mean
from benchmarks.models import WORKLOADS
from benchmarks.training import REFERENCE

FORMAT = 1

# Backends that keep caches on disk, so that a fresh process with them differs from one without.
CACHING = ("inductor", "ort_training")

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
    seconds: float = 10.0
    compiles: bool = True
    timeout: float = 900.0
    command: str = ""


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
    with Progress(*columns, refresh_per_second=1) as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("", total=len(cases) * len(list(_jobs(settings, "", ""))))
        for name, dtype in cases:
            case = name if dtype == "float32" else f"{name}-{dtype}"
            results = []
            for job in _jobs(settings, name, dtype):
                progress.update(task, description=f"{case}: {job.title}")
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
        "errors": _errors(models),
    }


@dataclasses.dataclass(frozen=True)
class Job:
    """A process: what it measures, of which backend (None: of all of them), and whether caches of an earlier one are there."""

    function: Callable[..., dict[str, Any]]
    title: str
    arguments: dict[str, Any]
    backend: str | None = None
    cached: bool = False


def _jobs(settings: Settings, model: str, dtype: str) -> Iterator[Job]:
    """The processes of one model. The step times come last, when the caches are full."""
    common = {"model": model, "dtype": dtype, "device": settings.device}
    for backend in settings.backends if settings.compiles else ():
        arguments = {**common, "backend": backend}
        yield Job(measure.compile_and_memory, f"{backend}, cold", arguments, backend)
        if backend in CACHING:
            yield Job(measure.compile_and_memory, f"{backend}, with its cache", arguments, backend, cached=True)
    steps = {**common, "backends": list(settings.backends), "seconds": settings.seconds, "recompiles": settings.compiles}
    yield Job(measure.step_times, "steps", steps)


def _outcome(job: Job, caches: Path, settings: Settings) -> dict[str, Any]:
    """A job's result, or `{"error": ...}`."""
    try:
        return process.call(job.function, threads=settings.threads, caches=caches, timeout=settings.timeout, **job.arguments)
    except process.ProcessError as error:
        return {"error": str(error)}


def _model(name: str, dtype: str, settings: Settings, results: list[tuple[Job, dict[str, Any]]]) -> dict[str, Any]:
    """What was measured of one model.

    Returns:
        `model`, `sizes`, `dtype`, `backends` (by name: `error`, the step times, and the measures, None where there is none),
        `ratios` (by `"a/b"`: the step time's `median`, `low`, `high`, `within_noise`; and the other measures' plain ratios).
    """
    backends: dict[str, dict[str, Any]] = {backend: {"error": None, **dict.fromkeys(MEASURES)} for backend in settings.backends}
    for job, result in results:
        for backend in [job.backend] if job.backend is not None else settings.backends:
            failed = set(result) == {"error"}
            found = result if failed else _compile_measures(job, result) if job.backend is not None else result[backend]
            one = backends[backend]
            one.update({**found, "error": one["error"] or found.get("error")})
    return {"model": name, "sizes": WORKLOADS[name].sizes, "dtype": dtype, "backends": backends, "ratios": _ratios(backends)}


def _compile_measures(job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """What a process of `measure.compile_and_memory` says about its backend. The one with caches has the better figures of memory."""
    found = {"peak_bytes": result["peak_bytes"], "process": result}
    if job.backend == REFERENCE:
        return found
    if job.cached:
        return {**found, "cached_compile_seconds": result["compile_seconds"]}
    if job.backend in CACHING:
        return {**found, "cold_process": result, "cold_compile_seconds": result["compile_seconds"]}
    return {**found, "cold_compile_seconds": result["compile_seconds"], "cached_compile_seconds": result["compile_seconds"]}  # it has no caches


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
        for key in ("step", *MEASURES):
            values = [one[key]["median"] if key == "step" else one[key] for one in found if key in one]
            if values:
                means.setdefault(pair, {})[key] = {"mean": geometric_mean(values), "least": min(values), "most": max(values), "models": len(values)}
    return means


def _errors(models: dict[str, Any]) -> list[str]:
    return [f"{case}, {name}: {one['error']}" for case, model in models.items() for name, one in model["backends"].items() if one["error"]]
