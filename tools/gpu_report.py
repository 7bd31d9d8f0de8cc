"""What `gpu_check.py` found, for people."""

from __future__ import annotations

from typing import Any

_SHOWN = 40  # failures
_TEXT = 600  # characters of each


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    about = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    lines = ["# gpu-check", f"{about.get('gpu', 'no GPU')}, Python {about['python']}, {versions}; commit {about['commit']}, {about['date']}."]
    for name, stage in results["stages"].items():
        word = {0: "passed", None: "ran out of time"}.get(stage["status"], f"FAILED (exit status {stage['status']})")
        lines.append(f"## {name}: {word}, {stage['seconds']:.0f} s")
        lines += _details(stage)
        if stage["status"] != 0 and stage.get("output") and "text" not in stage:
            lines.append(f"```\n{stage['output'][-2500:]}\n```")
    return "\n\n".join(lines) + "\n"


def _details(stage: dict[str, Any]) -> list[str]:
    if "cases" in stage:
        errors = [f"{case['name']}:\n\n```\n{case['error'][-1500:]}\n```" for case in stage["cases"] if case.get("error")]
        return ["\n".join(f"- {case['name']}: {case['verdict']}" for case in stage["cases"]), *errors]
    if "failed" in stage:
        counted = f"{stage['passed']} of {stage['tests']} passed, {stage['skipped']} skipped, {len(stage['failed'])} failed."
        shown = [f"- {one['test']}\n\n```\n{one['text'][-_TEXT:]}\n```" for one in stage["failed"][:_SHOWN]]
        more = [f"- {one['test']}" for one in stage["failed"][_SHOWN:]]
        return [counted, *shown, *(["\n".join(more)] if more else [])]
    if "runs" in stage:
        problems = [f"{name}:\n\n```\n{run['output'][-1500:]}\n```" for name, run in stage["runs"].items() if run["status"] != 0]
        return [_bench_table(stage), *problems]
    if "text" in stage:
        return [f"```\n{stage['text']}\n```"]
    return []


def _bench_table(stage: dict[str, Any]) -> str:
    rows = [
        "| model | backend | step ms | compile s | peak MB | of PyTorch's pool | sessions | PythonOps | |",
        "|---|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for run in stage["runs"].values():
        for case, backends in run.get("models", {}).items():
            for backend, one in backends.items():
                step = f"{one['step_ms']['median']:.2f}" if one.get("step_ms") else ""
                seconds = f"{one['cold_compile_seconds']:.1f}" if one.get("cold_compile_seconds") else ""
                peaks = [f"{one[key] / 1e6:.0f}" if one.get(key) else "" for key in ("peak_bytes", "allocator_peak_bytes")]
                details = one.get("details") or {}
                ran = [str(details.get("sessions", "")), ", ".join(details.get("python_op_names", ()))]
                rows.append("| " + " | ".join([case, backend, step, seconds, *peaks, *ran, one.get("error") or ""]) + " |")
    return "\n".join(rows)
