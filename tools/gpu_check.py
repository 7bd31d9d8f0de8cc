"""One command on a machine with a GPU: does this backend work there, and how fast is it?

    make gpu-check                                        # in this checkout's own environment
    make gpu-check PYTHON_GPU=/path/to/python             # with an interpreter that has torch, onnxruntime-training (or -gpu) and pytest
    python tools/gpu_check.py --stages smoke tests        # a part; what OUT has of other stages is kept
    python tools/gpu_check.py --inductor-python python3   # measures inductor with another interpreter: one that has Triton
    . kit/env.sh && tpy tools/gpu_check.py --behind python3 --inductor-python python3   # packages that `tpy` lacks are python3's

On a machine that is lent for minutes, stops a command after ten and takes 64 MiB at a time, with the kits of ../shared/gpu-kit (its README) in W.
Before (43.8 MiB, 57.7 MiB and 0.8 MiB of kits beside 1.9 MiB of this checkout; `regex` is what transformers needs compiled for tpy's Python, without
`cloudpickle` nothing is kept in the compile cache):

    python3 ../shared/gpu-kit/stage.py W/train119 . all && python3 ../shared/gpu-kit/stage.py W/gpu131 . all --as .ortkit131
    pip download --no-deps --only-binary=:all: --python-version 3.11 --platform manylinux2014_x86_64 --dest .ortkit regex cloudpickle

Then the calls, one right after the other, or the machine is another one; each goes on where the files in ~/train119 or ~/gpu131 end, and copies them
to $OUT as they grow: a call that is cut off would bring nothing back otherwise. `...` stands for what the first call has there.

1, carry .ortkit: mkdir -p ~/train119; (while sleep 15; do cp -f ~/train119/* $OUT; done) > /dev/null 2>&1 &
                  python3 .ortkit/unpack.py .ortkit ~/kit
                  for wheel in .ortkit/*.whl; do python3 -m zipfile -e $wheel ~/kit/train119/site; done
                  . ~/kit/train119/env.sh; export K D; export -f tpy; timeout -k 5 100 bash -c 'tpy ~/kit/train119/smoke.py' 2>&1 | tee $OUT/kit.txt
                  G="tpy tools/gpu_check.py --behind python3 --inductor-python python3 --out $HOME/train119 --resume"
                  $G --timeout 150 --budget 430 --stages smoke tests bench --models gpt2-small bert-base --bench="--no-compile --seconds 4"
                  cp -f ~/train119/* $OUT
2, carry .ortkit131: mkdir -p ~/gpu131; (while sleep 15; do cp -f ~/gpu131/* $OUT; done) > /dev/null 2>&1 &
                  python3 .ortkit131/unpack.py .ortkit131 ~/kit
                  . ~/kit/gpu131/env.sh; timeout -k 5 100 python3 ~/kit/gpu131/smoke.py 2>&1 | tee $OUT/kit.txt
                  G="python3 tools/gpu_check.py --out $HOME/gpu131 --resume"
                  $G --timeout 150 --budget 430 ...; cp -f ~/gpu131/* $OUT
3, nothing:       (while ...) &
                  . ~/kit/train119/env.sh; G="tpy ..."; $G --timeout 540 --budget 540 --stages suite; cp -f ~/train119/* $OUT

Seen on an H200 and an H100 (2026-11-26): a machine is there after 30 s, a kit unpacked in 8; smoke takes 22 s for its 24 cases, a model of `bench`
10 to 15 with one other backend, inductor's cold compile 30; with 14 workers the suite starts within 20 s and judges 25 tests a second. Smoke may run
beside the suite, from a copy of the checkout (both write out/gpu-scratch); what is timed may not. $OUT takes eight files: of more, some stay there.

First of all a process makes a session on the CUDA provider; where it cannot, nothing else is started: it says why, such as a library that is missing.
Stages, each in processes of its own that may fail, crash or hang without stopping the next:

    smoke   a few training steps against eager PyTorch, on the default stream and on a side stream
    tests   pytest -m cuda
    suite   the tests that make sense on any device, with --device cuda
    bench   python -m benchmarks run --device cuda: bfloat16 autocast; GPT-2 small and medium, BERT-base, a Llama of 300 M, ViT-B, ResNet-50
    host    python -m benchmarks.host: where the host's time goes in a step of the first of --models (GPT-2 small)

OUT (default: out/gpu) has five files at most, which grow while a stage runs: gpu.json, gpu.md (written after each stage, and each model), log.txt,
tests.jsonl and suite.jsonl (a line a test). The rest is in out/gpu-scratch. The package need not be installed. The exit status is 1 if a stage
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_report import markdown
from outcomes import outcomes

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "out" / "gpu-scratch"
_TAIL = 6000  # characters of a command's output that are kept
_LEAST = 5.0  # seconds: with less, nothing is started
_LONGEST = {"provider": 120.0, "smoke": 300.0, "tests": 900.0, "suite": 3600.0, "bench": 1800.0, "host": 300.0}  # seconds of a process
_LOG = 12 << 20  # bytes of the log: a machine that is lent gives back files of 16 MiB at most
_HANGS = 2  # cases of smoke that hang: after so many no other is started
_ANY_DEVICE = ["tests/test_training.py", "tests/behaviours", "tests/autograd_function", "tests/lowering", "tests/ops/test_opinfo.py"]
_ASKING = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # so that `torch.cuda.is_available` starts no CUDA, which processes forked later could not use
_BEHIND = ["pytest", "pytest-xdist", "expecttest", "rich", "transformers", "psutil", "setuptools"]  # psutil is compiled for any Python
_PROVIDER = "from ort_backend.runtime import capabilities, cuda; capabilities.check_provider(cuda.PROVIDER)"
_CASES = "from benchmarks.models import LARGE; print('CASES', *LARGE)"
# torch.testing._internal, where the operators' database is, derives from its TestCase.
_EXPECTTEST = "import unittest\n\n\nclass TestCase(unittest.TestCase):\n    pass\n"

Stage = Callable[["Run", dict[str, Any]], Iterator[dict[str, Any]]]


class Run:
    """The command line, the environment of the stages, and how long there is."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.log = arguments, arguments.out / "log.txt"
        self.environment = environment(arguments.behind)
        self._end = time.monotonic() + arguments.budget

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def call(self, stage: str, command: Sequence[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
        """Runs a command in the checkout: `command`, `status` (None: it ran out of time), `seconds`, `output`. All of it goes to the log."""
        started = time.monotonic()
        timeout = min(self.arguments.timeout or _LONGEST[stage], self.left())
        if timeout < _LEAST:
            return {"command": list(command), "status": None, "seconds": 0.0, "output": "no time was left to start it"}
        with self.log.open("ab") as log:
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            place = log.tell()
            status, removed = _wait(command, log, environment or self.environment, timeout)
        with self.log.open("rb") as log:
            log.seek(max(0, place - removed))
            output = log.read().decode(errors="replace")
        return {"command": list(command), "status": status, "seconds": round(time.monotonic() - started, 1), "output": output}


def _wait(command: Sequence[str], log: Any, environment: dict[str, str], timeout: float) -> tuple[int | None, int]:
    """Runs a command and, in the end, all that it started: in a process group, not in a session, which would outlive a stopped gpu-check.

    Returns the exit status (None: it ran out of time), and how many bytes were taken off the beginning of the log.
    """
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=os.setpgrp)
    end, removed = time.monotonic() + timeout, 0
    try:
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, 1.0)), removed + _cap(Path(log.name))
            removed += _cap(Path(log.name))
        return None, removed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may hold on to a process
            process.wait(_LEAST)


def _cap(log: Path) -> int:
    """Takes the older half off a log that is too long, of which the writers know only the end: how many bytes."""
    size = log.stat().st_size
    if size <= _LOG:
        return 0
    newer = log.read_bytes()[-_LOG // 2 :]
    log.write_bytes(newer)
    return size - len(newer)


def environment(behind: str | None) -> dict[str, str]:
    """The environment of the stages: this checkout first, then an entry point and packages that are not installed, then those of `behind`."""
    site, last = SCRATCH / "site", [_packages(behind)] if behind else []
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    if not any(one.name == "ort_training" for one in importlib.metadata.entry_points(group="torch_dynamo_backends")):
        info = site / "ort_training-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ort-training\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[torch_dynamo_backends]\nort_training = ort_backend.compiler:ort_training\n")
    if importlib.util.find_spec("expecttest") is None and not any((folder / "expecttest").exists() for folder in last):
        (site / "expecttest.py").write_text(_EXPECTTEST)
    before = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    paths = [ROOT, ROOT / "tests", ROOT / "tools", site, *before, *last]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", **_ASKING}


def _packages(python: str) -> Path:
    """A folder with what the stages need of another interpreter's packages."""
    folder = SCRATCH / "behind"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, str(ROOT / "tools" / "behind.py"), str(folder), *_BEHIND], env=_own(dict(os.environ)), check=True)
    return folder


def _own(environment: dict[str, str]) -> dict[str, str]:
    """The environment without what is meant for this interpreter."""
    return {name: value for name, value in environment.items() if name not in ("PYTHONHOME", "PYTHONPATH")}


def smoke(run: Run, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Training steps of small models against eager PyTorch. A case that kills its process, or hangs, does not stop the next ones."""
    cases: list[dict[str, Any]] = []
    seconds, worst, hangs = 0.0, 0, 0
    while True:
        command = [sys.executable, str(ROOT / "tools" / "gpu_smoke.py"), "--device", run.arguments.device, "--first", str(len(cases))]
        result = run.call("smoke", command)
        lines = result["output"].splitlines()
        found = [json.loads(line[len("RESULT ") :]) for line in lines if line.startswith("RESULT ")]
        started = [line[len("CASE ") :] for line in lines if line.startswith("CASE ")]
        cases += found
        is_unfinished = len(started) > len(found)
        if is_unfinished:
            hung = any(line.startswith("Timeout (") for line in lines) or (result["status"] is None and run.left() >= _LEAST)  # faulthandler's word
            verdict = "HUNG" if hung else "NOT DONE" if result["status"] is None else f"CRASHED (exit status {result['status']})"
            hangs += hung
            cases.append({"name": started[-1], "verdict": verdict, "right": False, "error": result["output"][-1500:]})
        seconds, worst = seconds + result["seconds"], max(worst, result["status"] or 0, int(any(not case["right"] for case in cases)))
        status = None if result["status"] is None else worst
        yield {**result, "status": status, "seconds": seconds, "output": result["output"][-_TAIL:], "cases": cases}
        if not (is_unfinished or result["status"] == 70 and started) or hangs >= _HANGS:
            return


def tests(run: Run, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`pytest -m cuda`, counted."""
    yield _pytest(run, "tests", before, ["-m", "cuda"])


def suite(run: Run, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tests that make sense on any device, with their tensors on this one."""
    yield _pytest(run, "suite", before, ["--device", run.arguments.device, *_ANY_DEVICE])


def _pytest(run: Run, name: str, before: dict[str, Any], chosen: Sequence[str]) -> dict[str, Any]:
    record, known = run.arguments.out / f"{name}.jsonl", SCRATCH / f"{name}-before.jsonl"
    if not run.arguments.resume:
        record.unlink(missing_ok=True)
    known.write_text(record.read_text() if record.exists() else "")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "recorded", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0", "--tb=short"]
    if importlib.util.find_spec("xdist") is not None or run.arguments.behind:
        command += [f"--numprocesses={run.arguments.workers}", "--max-worker-restart=1000"]
    command += ["--continue-on-collection-errors", *chosen, *run.arguments.pytest]
    result = run.call(name, command, {**run.environment, "RECORDED_TO": str(record), "RECORDED_BEFORE": str(known)})
    done = outcomes(record)
    counts = {outcome: [one for one in done.values() if one["outcome"] == outcome] for outcome in ("passed", "skipped", "failed")}
    status = 0 if result["status"] == 5 and done else result["status"]  # 5: there was nothing left to run
    if counts["failed"] and status == 0:
        status = 1
    numbers = {"tests": len(done), "passed": len(counts["passed"]), "skipped": len(counts["skipped"]), "failed": counts["failed"]}
    seconds = result["seconds"] + (before.get("seconds", 0.0) if run.arguments.resume else 0.0)
    return {**result, "status": status, "seconds": seconds, "output": result["output"][-_TAIL:], **numbers}


def bench(run: Run, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The benchmark suite, a model at a time; inductor with the interpreter that has Triton."""
    runs = {name: one for name, one in before.get("runs", {}).items() if one["status"] is not None} if run.arguments.resume else {}
    names, wanted = list(run.arguments.models), [(sys.executable, ["aot_eager", "ort_training"])]
    if not names:
        listed = run.call("bench", [sys.executable, "-c", _CASES])
        found = [line.split()[1:] for line in listed["output"].splitlines() if line.startswith("CASES ")]
        if not found:
            yield {**listed, "status": listed["status"] or 1, "output": listed["output"][-_TAIL:]}
            return
        names = found[0]
    if run.arguments.inductor_python:
        wanted.append((run.arguments.inductor_python, ["inductor"]))
    elif importlib.util.find_spec("triton") is not None:
        wanted = [(sys.executable, ["aot_eager", "inductor", "ort_training"])]
    for model in names:
        for dtype in run.arguments.dtypes:
            for python, backends in wanted:
                name = f"{model}, {dtype}, {backends[-1]}"
                if name not in runs:
                    runs[name] = _measured(run, python, model, dtype, backends)
                statuses = [one["status"] for one in runs.values()]
                status = next((one for one in statuses if one), None if None in statuses else 0)
                yield {"status": status, "seconds": sum(one["seconds"] for one in runs.values()), "runs": runs}


def _measured(run: Run, python: str, model: str, dtype: str, backends: Sequence[str]) -> dict[str, Any]:
    folder = SCRATCH / f"bench-{model}-{dtype}-{backends[-1]}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [python, "-m", "benchmarks", "run", "--device", run.arguments.device, "--out", str(folder), "--no-plots"]
    command += ["--models", model, "--dtypes", dtype, "--backends", *backends, *run.arguments.bench]
    result = run.call("bench", command, None if python == sys.executable else {**_own(run.environment), "PYTHONPATH": str(ROOT)})
    found = folder / "results.json"
    if found.exists():
        result["models"] = {case: _figures(measured) for case, measured in json.loads(found.read_text())["models"].items()}
    return {**result, "output": result["output"][-_TAIL:]}


def _figures(model: dict[str, Any]) -> dict[str, Any]:
    """Of each backend. Where nothing but steps was measured, graphs and PyTorch's peak are those of the process that took them."""
    keys = ("error", "step_ms", "cold_compile_seconds", "peak_bytes", "loss_difference")
    figures = {}
    for backend, one in model["backends"].items():
        of_process = one.get("process") or one
        figures[backend] = {**{key: one.get(key) for key in keys}, **{key: of_process.get(key) for key in ("allocator_peak_bytes", "details")}}
    return figures


def host(run: Run, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Where the host's time goes."""
    model = (run.arguments.models or ["gpt2-small"])[0]
    result = run.call("host", [sys.executable, "-m", "benchmarks.host", "--device", run.arguments.device, "--models", model])
    yield {**result, "text": result["output"][-_TAIL:]}


STAGES: dict[str, Stage] = {"smoke": smoke, "tests": tests, "suite": suite, "bench": bench, "host": host}


def _results(stage: Stage, run: Run, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        yield from stage(run, before)
    except Exception:  # noqa: BLE001  whatever it is, the next stage still runs
        yield {"status": 1, "seconds": 0.0, "output": traceback.format_exc()}


def machine(device: str) -> dict[str, Any]:
    """Versions, and the GPU."""
    import torch

    versions = {name: _version(name) for name in ("torch", "onnxruntime-training", "onnxruntime-gpu", "onnxruntime", "triton", "transformers")}
    described: dict[str, Any] = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "versions": versions,
        "cuda": torch.version.cuda,
        "commit": _commit(),
    }
    if device == "cuda" and torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
        described["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return described


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--resume", action="store_true", help="goes on with OUT: tests and models that have a result there are not run again")
    parser.add_argument("--budget", type=float, default=86400, help="seconds for everything (default: a day)")
    parser.add_argument("--timeout", type=float, help=f"seconds for each process (default: {_LONGEST})")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes for tests (default: half of the cores)")
    parser.add_argument("--models", nargs="+", default=[], help="for bench (default: the models of real sizes)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="for bench (default: bfloat16)")
    parser.add_argument("--inductor-python", help="an interpreter with torch and Triton, for inductor's figures")
    parser.add_argument("--behind", metavar="PYTHON", help="an interpreter whose packages are there for those that this one lacks")
    parser.add_argument("--pytest", type=shlex.split, default=[], metavar="ARGUMENTS", help='more arguments of pytest: --pytest="-x -k attention"')
    parser.add_argument("--bench", type=shlex.split, default=[], metavar="ARGUMENTS", help='more of python -m benchmarks run: --bench="--seconds 3"')
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: shows that the command itself works; no GPU is asked for")
    return parser.parse_args(arguments)


def _stages(kept: Path) -> dict[str, Any]:
    """What an earlier run found; nothing where its file was cut off."""
    try:
        return json.loads(kept.read_text())["stages"]
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _write(results: dict[str, Any], out: Path) -> None:
    _replace(out / "gpu.json", json.dumps(results, indent=1) + "\n")
    _replace(out / "gpu.md", markdown(results))


def _replace(file: Path, text: str) -> None:
    """Writes the file such that whoever reads or copies it meanwhile finds all of the old or all of the new one."""
    made = file.with_name(f".{file.name}.tmp")
    made.write_text(text)
    os.replace(made, file)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the stages. Returns the exit status."""
    arguments = parse(given)
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = machine(arguments.device)
    if arguments.device == "cuda" and "gpu" not in about:
        sys.exit("gpu-check: PyTorch sees no CUDA device (--device cpu shows that the command itself works)")
    kept = arguments.out / "gpu.json"
    stages = _stages(kept)
    run = Run(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    results = {"machine": about, "device": arguments.device, "stages": stages}
    if arguments.device == "cuda":
        stages["provider"] = run.call("provider", [sys.executable, "-c", _PROVIDER])
        _write(results, arguments.out)
        if stages["provider"]["status"] != 0:
            sys.exit(f"gpu-check: ONNX Runtime's CUDA provider does not work here\n{stages['provider']['output'][-_TAIL:]}")
    for name in arguments.stages:
        for found in _results(STAGES[name], run, stages.get(name, {})):
            stages[name] = found
            _write(results, arguments.out)
        sys.stdout.write(f"{name}: exit status {stages[name]['status']}, {stages[name]['seconds']:.0f} s\n")
        sys.stdout.flush()
    sys.stdout.write(markdown(results) + f"\n{kept}, {arguments.out / 'gpu.md'}\n")
    return int(any(stages[name]["status"] != 0 for name in arguments.stages))


if __name__ == "__main__":
    sys.exit(main())
