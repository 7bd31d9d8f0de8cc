"""One command on a machine with a GPU: does this backend work there, and how fast is it?

    make gpu-check                                        # in this checkout's own environment
    make gpu-check PYTHON_GPU=/path/to/python             # with an interpreter that has torch, onnxruntime-training (or -gpu) and pytest
    . kit/env.sh && tpy tools/gpu_check.py                # where the interpreter is a shell function
    python tools/gpu_check.py --stages smoke tests        # a part, for a machine that is lent for minutes; stages before are kept
    python tools/gpu_check.py --inductor-python python3   # measures inductor with another interpreter: one that has Triton

Stages, each a process of its own that may fail without stopping the next:

    smoke   a few training steps against eager PyTorch, on the default stream and on a side stream
    tests   pytest -m cuda
    suite   the tests that make sense on any device, with --device cuda
    bench   python -m benchmarks run --device cuda: bfloat16 autocast; GPT-2 small and medium, BERT-base, a Llama of 300 M, ViT-B, ResNet-50

After each, OUT/gpu.json has everything and OUT/gpu.md says it (OUT: out/gpu). The package need not be installed. The exit status is 1 if a stage
failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_TAIL = 6000  # characters of a stage's output that are kept
_ANY_DEVICE = ["tests/test_training.py", "tests/behaviours", "tests/autograd_function", "tests/lowering", "tests/ops/test_opinfo.py"]

Stage = Callable[[argparse.Namespace, dict[str, str]], dict[str, Any]]


def environment(out: Path) -> dict[str, str]:
    """The environment of the stages: this checkout first; where the package is not installed, an entry point by which torch finds the backend."""
    paths = [str(ROOT), str(ROOT / "tests")]
    if not any(one.name == "ort_training" for one in importlib.metadata.entry_points(group="torch_dynamo_backends")):
        info = out / "site" / "ort_training-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ort-training\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[torch_dynamo_backends]\nort_training = ort_backend.compiler:ort_training\n")
        paths.append(str(info.parent))
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def call(command: Sequence[str], environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """Runs a command in the checkout: `command`, `status` (None: it ran out of time), `seconds`, `output` (its end)."""
    started = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False)
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, output = None, late.stdout or b""
    text = output.decode(errors="replace")
    return {"command": list(command), "status": status, "seconds": round(time.monotonic() - started, 1), "output": text[-_TAIL:]}


def smoke(arguments: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """Training steps of small models against eager PyTorch."""
    result = call([sys.executable, str(ROOT / "tools" / "gpu_smoke.py"), "--device", arguments.device], env, arguments.timeout)
    lines = [line[len("RESULT ") :] for line in result["output"].splitlines() if line.startswith("RESULT ")]
    return {**result, "cases": [json.loads(line) for line in lines]}


def tests(arguments: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """`pytest -m cuda`, counted."""
    return _pytest(arguments, env, "tests", ["-m", "cuda"])


def _pytest(arguments: argparse.Namespace, env: dict[str, str], name: str, chosen: Sequence[str]) -> dict[str, Any]:
    report = arguments.out / f"{name}.xml"
    report.unlink(missing_ok=True)
    result = call([sys.executable, "-m", "pytest", "-q", *chosen, f"--junitxml={report}", *arguments.pytest], env, arguments.timeout)
    if not report.exists():
        return result
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    return {**result, "tests": len(cases), "passed": len(cases) - len(failed) - len(skipped), "skipped": len(skipped), "failed": names}


def suite(arguments: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """The tests that make sense on any device, with their tensors on this one."""
    return _pytest(arguments, env, "suite", ["--device", arguments.device, *_ANY_DEVICE])


def bench(arguments: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """The benchmark suite; inductor with the interpreter that has Triton."""
    runs = {"ort_training": _suite(arguments, env, sys.executable, ["aot_eager", "ort_training"])}
    if arguments.inductor_python:
        plain = {**env, "PYTHONPATH": str(ROOT)}
        plain.pop("PYTHONHOME", None)
        runs["inductor"] = _suite(arguments, plain, arguments.inductor_python, ["inductor"])
    elif importlib.util.find_spec("triton") is not None:
        runs = {"all": _suite(arguments, env, sys.executable, ["aot_eager", "inductor", "ort_training"])}
    status = max((1 if one["status"] is None else one["status"] for one in runs.values()), default=1)
    return {"status": status, "seconds": sum(one["seconds"] for one in runs.values()), "runs": runs}


def _suite(arguments: argparse.Namespace, env: dict[str, str], python: str, backends: Sequence[str]) -> dict[str, Any]:
    folder = arguments.out / f"bench-{backends[-1]}"
    command = [python, "-m", "benchmarks", "run", "--device", arguments.device, "--out", str(folder), "--backends", *backends]
    command += ["--dtypes", *arguments.dtypes, *(["--models", *arguments.models] if arguments.models else [])]
    result = call([*command, *arguments.bench], env, arguments.timeout)
    found = folder / "results.json"
    if found.exists():
        result["models"] = {case: _figures(model) for case, model in json.loads(found.read_text())["models"].items()}
    return result


def _figures(model: dict[str, Any]) -> dict[str, Any]:
    keys = ("error", "step_ms", "cold_compile_seconds", "peak_bytes", "loss_difference")
    return {backend: {key: one.get(key) for key in keys} for backend, one in model["backends"].items()}


STAGES: dict[str, Stage] = {"smoke": smoke, "tests": tests, "suite": suite, "bench": bench}


def machine(device: str) -> dict[str, Any]:
    """Versions, and the GPU."""
    import torch

    versions = {name: _version(name) for name in ("torch", "onnxruntime-training", "onnxruntime-gpu", "onnxruntime", "triton", "transformers")}
    described: dict[str, Any] = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "versions": versions,
    }
    described["cuda"] = torch.version.cuda
    if device == "cuda" and torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
        described["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    described["commit"] = commit.stdout.strip() or None
    return described


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def markdown(results: dict[str, Any]) -> str:
    """What was found, for people."""
    about = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    lines = ["# gpu-check", f"{about.get('gpu', 'no GPU')}, Python {about['python']}, {versions}; commit {about['commit']}, {about['date']}."]
    for name, stage in results["stages"].items():
        word = {0: "passed", None: "ran out of time"}.get(stage["status"], f"FAILED (exit status {stage['status']})")
        lines.append(f"## {name}: {word}, {stage['seconds']:.0f} s")
        lines += _details(name, stage)
        if stage["status"] != 0 and "output" in stage:
            lines.append(f"```\n{stage['output'][-2500:]}\n```")
    return "\n\n".join(lines) + "\n"


def _details(name: str, stage: dict[str, Any]) -> list[str]:
    if name == "smoke":
        return ["\n".join(f"- {case['name']}: {case['verdict']}" for case in stage["cases"])] if stage.get("cases") else []
    if "tests" in stage:
        counted = f"{stage['passed']} of {stage['tests']} passed, {stage['skipped']} skipped."
        return [counted, *(["\n".join(f"- {one}" for one in stage["failed"])] if stage["failed"] else [])]
    if name == "bench":
        return [_bench_table(stage), *(f"```\n{run['output'][-1500:]}\n```" for run in stage["runs"].values() if run["status"] != 0)]
    return []


def _bench_table(stage: dict[str, Any]) -> str:
    rows = ["| model | backend | step ms | compile s | peak MB | |", "|---|---|---:|---:|---:|---|"]
    for run in stage["runs"].values():
        for case, backends in run.get("models", {}).items():
            for backend, one in backends.items():
                step = f"{one['step_ms']['median']:.2f}" if one.get("step_ms") else ""
                seconds = f"{one['cold_compile_seconds']:.1f}" if one.get("cold_compile_seconds") else ""
                peak = f"{one['peak_bytes'] / 1e6:.0f}" if one.get("peak_bytes") else ""
                rows.append(f"| {case} | {backend} | {step} | {seconds} | {peak} | {one.get('error') or ''} |")
    return "\n".join(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each process (default: 3600)")
    parser.add_argument("--models", nargs="+", default=[], help="for bench (default: the models of real sizes)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="for bench (default: bfloat16)")
    parser.add_argument("--inductor-python", help="an interpreter with torch and Triton, for inductor's figures")
    parser.add_argument("--pytest", type=shlex.split, default=[], metavar="ARGUMENTS", help='more arguments of pytest: --pytest="-x -k attention"')
    parser.add_argument("--bench", type=shlex.split, default=[], metavar="ARGUMENTS", help='more of python -m benchmarks run: --bench="--seconds 3"')
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: shows that the command itself works; no GPU is asked for")
    return parser.parse_args(arguments)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the stages. Returns the exit status."""
    arguments = parse(given)
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = machine(arguments.device)
    if arguments.device == "cuda" and "gpu" not in about:
        sys.exit("gpu-check: PyTorch sees no CUDA device (--device cpu shows that the command itself works)")
    kept = arguments.out / "gpu.json"
    before = json.loads(kept.read_text())["stages"] if kept.exists() else {}
    results: dict[str, Any] = {"machine": about, "device": arguments.device, "stages": before}
    env = environment(arguments.out)
    for name in arguments.stages:
        results["stages"][name] = STAGES[name](arguments, env)
        kept.write_text(json.dumps(results, indent=1) + "\n")
        (arguments.out / "gpu.md").write_text(markdown(results))
    sys.stdout.write(markdown(results) + f"\n{kept}, {arguments.out / 'gpu.md'}\n")
    return int(any(results["stages"][name]["status"] != 0 for name in arguments.stages))


if __name__ == "__main__":
    sys.exit(main())
