"""The results as markdown: the whole report, and a table for the README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import sentence
from benchmarks.suite import PAIRS

_MEASURE_NAMES = {
    "step": "step time",
    "cold_compile_seconds": "cold compile",
    "cached_compile_seconds": "compile in a fresh process with caches",
    "warm_compile_seconds": "compile in the same process",
    "peak_bytes": "peak memory",
}


def full(results: dict[str, Any], pictures: Sequence[Path]) -> str:
    """The report."""
    machine, settings = results["machine"], results["settings"]
    load = f"Load average {machine['load'][0]:.1f} at the start, {machine['load_after'][0]:.1f} at the end."
    parts = [
        "# Benchmarks",
        f"`{results['command']}` on {results['date']}, {results['seconds'] / 60:.1f} min. {sentence(machine, settings['threads'])}; "
        f"{machine['compiler']}; commit {machine['commit']}. {load}",
        *_errors(results),
        *_section("Step time", "", *_steps(results)),
        *_section("Ratios of step times", "", *_ratios(results)),
        *_section("Geometric means", "", *_means(results)),
    ]
    if settings["compiles"]:
        parts += _section("Compile time", "Seconds: an empty cache / a fresh process with caches / the same process again.", *_compiles(results))
        parts += _section(
            "Peak memory",
            "MB above model, batches and imports: the most during a step (of which there between steps: graphs, code, pools).",
            *_memory(results),
        )
        parts += _section("ort_training's graphs", "", *_graphs(results))
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    return "\n\n".join([*parts, _METHOD]) + "\n"


_METHOD = """## How it was measured

A step is a forward and a backward, without an optimiser. The backends of a model take turns, each in a process of its own, in another order every
round, each turn at least 20 ms; the figure is the median of the turns, with its quartiles. A ratio is the median of the rounds' ratios, with its 95 %
confidence interval; where that has 1 in it, or the ratio is within 1 % of 1, it is printed with `~`: a difference within the noise. Between the
steps plain SGD moves the weights; every step's loss and the first step's gradients are compared with eager's, and a backend that differs is an
error and in no mean. Compile time is imports and first step of a fresh process, less a later step. Peak memory is the resident set's (on CUDA the
device's) high-water mark in a process of its own."""


def readme_table(results: dict[str, Any]) -> str:
    """One table of the most important figures, with the command that made it."""
    headings = [
        "model",
        "eager ms",
        "inductor ms",
        "ort_training ms",
        "of eager",
        "of inductor",
        "cold compile s, inductor / ort",
        "peak MB, inductor / ort",
    ]
    rows = []
    for case, model in results["models"].items():
        backends = model["backends"]
        both = [backends.get(name, {}) for name in ("inductor", "ort_training")]
        compiles = " / ".join(_number(one.get("cold_compile_seconds"), 1) for one in both)
        memory = " / ".join(_number(one.get("peak_bytes"), 0, 1e-6) for one in both)
        steps = [_step(backends.get(name)) for name in ("eager", "inductor", "ort_training")]
        rows.append(
            [f"{case}: {model['sizes']}", *steps, *(_ratio(model, f"ort_training/{other}") for other in ("eager", "inductor")), compiles, memory]
        )
    means = [results["geometric_means"].get(f"ort_training/{other}", {}).get("step", {}).get("mean") for other in ("eager", "inductor")]
    rows.append(["geometric mean", "", "", "", *(_number(mean, 2) for mean in means), "", ""])
    machine = results["machine"]
    made = f"{results['date'][:10]}, commit {machine['commit']}"
    caption = f"`{results['command']}`; {sentence(machine, results['settings']['threads'])}; {made}. `~`: within the noise."
    return f"{caption}\n\n{_table(headings, rows)}\n"


def _section(title: str, text: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"## {title}", *([text] if text else []), _table(headings, rows)]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, marks, *rows))


def _errors(results: dict[str, Any]) -> list[str]:
    lines = "\n".join(f"- **{line}**" for line in results["errors"])
    return ["## ERRORS", lines] if lines else ["No errors: every loss, and every gradient of the first step, equals eager's."]


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:.{digits}f}"


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _step(one: dict[str, Any] | None) -> str:
    if one is None:
        return ""
    return "ERROR" if one["error"] else _milliseconds(one["step_ms"]["median"])


def _ratio(model: dict[str, Any], pair: str) -> str:
    ratio = model["ratios"].get(pair)
    return "" if ratio is None else ("~" if ratio["step"]["within_noise"] else "") + f"{ratio['step']['median']:.2f}"


def _by_backend(results: dict[str, Any], cell: Callable[[dict[str, Any]], str]) -> tuple[list[str], list[list[str]]]:
    """A row a model, a column a backend."""
    backends = results["settings"]["backends"]
    rows = [[case, *("ERROR" if one["error"] else cell(one) for one in model["backends"].values())] for case, model in results["models"].items()]
    return ["model", *backends], rows


def _steps(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    def cell(one: dict[str, Any]) -> str:
        median, low, high = (_milliseconds(one["step_ms"][key]) for key in ("median", "low", "high"))
        return f"{median} ({low} to {high})"

    headings, rows = _by_backend(results, cell)
    sizes = [model["sizes"] for model in results["models"].values()]
    return ["model, ms (quartiles)", *headings[1:]], [[f"{row[0]}: {size}", *row[1:]] for row, size in zip(rows, sizes, strict=True)]


def _ratios(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    def cell(model: dict[str, Any], pair: str) -> str:
        step = model["ratios"].get(pair, {}).get("step")
        return f"{_ratio(model, pair)} ({step['low']:.2f} to {step['high']:.2f})" if step else ""

    pairs = [f"{a}/{b}" for a, b in PAIRS]
    return ["model", *pairs], [[case, *(cell(model, pair) for pair in pairs)] for case, model in results["models"].items()]


def _means(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    def cell(pair: str, measure: str) -> str:
        found = results["geometric_means"].get(pair, {}).get(measure)
        return f"{found['mean']:.2f} ({found['least']:.2f} to {found['most']:.2f}; {found['models']})" if found else ""

    pairs = [f"{a}/{b}" for a, b in PAIRS]
    rows = [[name, *(cell(pair, key) for pair in pairs)] for key, name in _MEASURE_NAMES.items()]
    return ["mean (least to most; models)", *pairs], [row for row in rows if any(row[1:])]


def _compiles(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    keys = ("cold_compile_seconds", "cached_compile_seconds", "warm_compile_seconds")
    return _by_backend(results, lambda one: " / ".join(_number(one[key], 1) for key in keys) if one["cold_compile_seconds"] else "")


def _memory(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    return _by_backend(results, lambda one: f"{one['peak_bytes'] / 1e6:.0f} ({one['process']['rest_bytes'] / 1e6:.0f})")


def _graphs(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for case, model in results["models"].items():
        process = model["backends"].get("ort_training", {}).get("cold_process")
        if process is None:
            continue
        found = process["details"]
        parts = [found[f"{part}_seconds"] for part in ("lowering", "session")]
        share = f"{sum(parts) / process['compile_seconds']:.0%}"
        names = f" ({', '.join(found['python_op_names'])})" if found["python_ops"] else ""
        rows.append(
            [case, str(found["graphs"]), str(found["onnx_nodes"]), f"{found['python_ops']}{names}", *(f"{part:.2f}" for part in parts), share]
        )
    return ["model", "graphs", "ONNX nodes", "PyTorch's kernels inside", "lowering s", "session s", "both, of the cold compile"], rows
