"""The results as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

matplotlib.use("Agg")

COLOURS = {"eager": "#9a9a9a", "aot_eager": "#c9b37e", "inductor": "#c8553d", "ort_training": "#1f4e79"}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the plots for which there are figures; returns their files."""
    made = [ratios(results, folder / "step_time.png")]
    if results["settings"]["compiles"]:
        made.append(_bars(results, folder / "compile_time.png", "cold_compile_seconds", 1.0, "seconds", "Cold compile: fresh process, empty caches"))
        made.append(_bars(results, folder / "memory.png", "peak_bytes", 1e-6, "MB above model and batches", "Peak memory during steps"))
    return [file for file in made if file is not None]


def ratios(results: dict[str, Any], file: Path) -> Path | None:
    """Step times of ort_training by eager's and by inductor's, with their confidence intervals; below 1 it is faster."""
    series = {}
    for other in ("eager", "inductor"):
        pair = f"ort_training/{other}"
        found = {case: model["ratios"][pair]["step"] for case, model in results["models"].items() if pair in model["ratios"]}
        if found:
            series[other] = found
    if not series:
        return None
    cases = [case for case in results["models"] if any(case in found for found in series.values())]
    figure, axes = pyplot.subplots(figsize=(max(6, len(cases)), 4.5), layout="constrained")
    for number, (other, found) in enumerate(series.items()):
        places = [cases.index(case) + 0.4 * (number - (len(series) - 1) / 2) for case in found]
        heights = [step["median"] for step in found.values()]
        errors = [[step["median"] - step["low"] for step in found.values()], [step["high"] - step["median"] for step in found.values()]]
        axes.bar(places, heights, 0.38, yerr=errors, capsize=2, color=COLOURS[other], label=f"of {other}")
    axes.axhline(1, color="black", linewidth=0.8)
    _finish(figure, axes, cases, "ort_training's step time, as a ratio", "Step time: below 1, ort_training is faster", file)
    return file


def _bars(results: dict[str, Any], file: Path, key: str, scale: float, unit: str, title: str) -> Path | None:
    """A measure of every backend, on a logarithmic scale."""
    backends = [name for name in results["settings"]["backends"] if any(_value(model, name, key) for model in results["models"].values())]
    cases = list(results["models"])
    if not backends:
        return None
    figure, axes = pyplot.subplots(figsize=(max(6, len(cases)), 4.5), layout="constrained")
    width = 0.8 / len(backends)
    for number, name in enumerate(backends):
        values = [_value(model, name, key) * scale for model in results["models"].values()]
        places = [place + width * (number - (len(backends) - 1) / 2) for place in range(len(cases))]
        axes.bar(places, values, width, color=COLOURS.get(name), label=name)
    axes.set_yscale("log")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _finish(figure, axes, cases, unit, title, file)
    return file


def _value(model: dict[str, Any], backend: str, key: str) -> float:
    """0 where there is none."""
    return max(model["backends"][backend][key] or 0.0, 0.0)


def _finish(figure: Any, axes: Any, cases: list[str], unit: str, title: str, file: Path) -> None:
    axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
