"""The benchmark suite: a whole run of a tiny model, and that a fast wrong answer is an error."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import psutil
import pytest
import torch
from torch import fx

from benchmarks import compare, device_kernels, host, machine, measure, operators, process, report, suite
from benchmarks.families import family
from benchmarks.models import DEFAULT, QUICK, WORKLOADS

ROOT = Path(__file__).parents[1]


def test_a_run_writes_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "run",
        "--quick",
        "--models",
        "test",
        "--backends",
        "ort_training",
        "--seconds",
        "0.2",
        "--out",
        str(out),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((out / "results.json").read_text())
    assert set(results) == {"format", "command", "date", "seconds", "machine", "settings", "models", "geometric_means", "errors"}
    assert results["format"] == suite.FORMAT and results["errors"] == []
    assert results["machine"]["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # PyPI's wheels do not say their CUDA

    (model,) = results["models"].values()
    assert set(model) == {"model", "sizes", "dtype", "backends", "ratios"}
    assert list(model["backends"]) == ["eager", "ort_training"]
    for name, one in model["backends"].items():
        assert one["error"] is None
        assert 0 < one["step_ms"]["low"] <= one["step_ms"]["median"] <= one["step_ms"]["high"]
        assert len(one["turns"]) >= measure.ROUNDS[0] and one["steps"] >= len(one["turns"])
        assert one["peak_bytes"] > 0 and one["loss_difference"] < 1e-4
        compiles = [one[f"{kind}_compile_seconds"] for kind in ("cold", "cached", "warm")]
        assert compiles == [None] * 3 if name == "eager" else all(0 < seconds < 300 for seconds in compiles)
    assert model["backends"]["ort_training"]["process"]["details"]["python_ops"] == 0
    assert model["backends"]["ort_training"]["process"]["details"]["onnx_nodes"] > 5

    step = model["ratios"]["ort_training/eager"]["step"]
    assert 0 < step["low"] <= step["median"] <= step["high"]
    assert results["geometric_means"]["ort_training/eager"]["step"]["mean"] == pytest.approx(step["median"])
    assert "ort_training/inductor" not in model["ratios"]

    text = (out / "report.md").read_text()
    pictures = sorted(file.name for file in out.glob("*.png"))
    assert pictures == ["compile_time.png", "memory.png", "step_time.png"] and all(f"]({name})" in text for name in pictures)
    assert "python -m benchmarks run --quick --models test" in (out / "table.md").read_text()


def test_a_backend_that_nobody_knows_is_an_error_at_once() -> None:
    command = [sys.executable, "-m", "benchmarks", "run", "--backends", "inductr"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and run.stderr == "--backends inductr: PyTorch knows no backend of that name\n"


@pytest.fixture
def backends() -> Iterator[None]:
    """`scaled` computes a loss that is 1 % off, `upside_down` gradients of the wrong sign, `broken` nothing; `fatal` ends the process."""

    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return -gradient

    def scaled(gm: fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: tuple(result * 1.01 for result in gm(*args))

    def upside_down(gm: fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: tuple(Flip.apply(result) for result in gm(*args))

    def broken(gm: fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("no such luck")

    def fatal(gm: fx.GraphModule, inputs: Any) -> Any:
        os.abort()

    registry = torch._dynamo.backends.registry
    for backend in (scaled, upside_down, broken, fatal):
        registry.register_backend(backend)
    yield
    for name in ("scaled", "upside_down", "broken", "fatal"):
        registry._COMPILER_FNS.pop(name)
        registry._BACKENDS.pop(name, None)


def test_a_wrong_answer_is_an_error_and_in_no_ratio(backends: None) -> None:
    names = ("eager", "scaled", "upside_down", "broken", "fatal")
    steps = measure.step_times("test", list(names), "cpu", "float32", seconds=0.1)
    assert steps["eager"]["error"] is None
    assert "wrong loss" in steps["scaled"]["error"] and "at step 0" in steps["scaled"]["error"]
    assert "wrong gradient of network" in steps["upside_down"]["error"]
    assert "no such luck" in steps["broken"]["error"]
    assert "the process ended with status -6" in steps["fatal"]["error"]

    settings = suite.Settings(models=("test",), backends=names, compiles=False)
    (job,) = suite._jobs(settings, "test", "float32")
    model = suite._model("test", "float32", settings, [(job, steps)])
    assert model["ratios"] == {}
    results = {"models": {"test": model}, "settings": {"backends": names}, "errors": suite._errors({"test": model})}
    assert len(results["errors"]) == 4
    _, ((_, *cells),) = report._steps(results)
    assert cells[0] != "ERROR" and cells[1:] == ["ERROR"] * 4


def test_step_times_alone_tell_what_ran_and_compile_once() -> None:
    settings = suite.Settings(models=("test",), backends=("eager", "ort_training"), compiles=False, seconds=0.1)
    (job,) = suite._jobs(settings, "test", "float32")
    steps = process.call(job.function, **job.arguments)["ort_training"]  # a fresh one has no graphs of other tests
    assert steps["error"] is None and steps["warm_compile_seconds"] is None and steps["allocator_peak_bytes"] is None
    assert steps["details"]["graphs"] == 1 and steps["details"]["sessions"] > 0 and "python_op_names" in steps["details"]


def test_a_loss_that_is_off_or_not_finite_is_named() -> None:
    assert compare.loss_error([1.0, 2.0], [1.0, 2.0], torch.float32) is None
    assert "at step 1" in str(compare.loss_error([1.0, 2.01], [1.0, 2.0], torch.float32))
    assert "nan" in str(compare.loss_error([math.nan], [1.0], torch.float32))
    assert "at step 1" in str(compare.loss_error([1.0, 2.3], [1.0, 2.0], torch.bfloat16))
    assert compare.loss_error([1.0, 2.3, 1.3], [1.0, 2.0, 1.0], torch.bfloat16, [1.0, 2.1, 1.0]) is None
    assert "at step 0" in str(compare.loss_error([1.3, 2.3], [1.0, 2.0], torch.bfloat16, [1.0, 2.2]))
    assert "nan" in str(compare.loss_error([1.0, 2.0, math.nan], [1.0, 2.0, 1.0], torch.bfloat16, [1.0, 2.1, 1.0]))


def test_a_process_that_dies_or_hangs_is_an_error() -> None:
    with pytest.raises(process.ProcessError, match="status -6"):
        process.call(os.abort)
    with pytest.raises(process.ProcessError, match="longer than 1 s"):
        process.call(signal.pause, timeout=1)
    with pytest.raises(process.ProcessError, match="KeyError: 'no such model'"):
        process.call(measure.compile_and_memory, model="no such model", backend="eager", device="cpu", dtype="float32")


def test_what_a_process_has_started_ends_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(process.ProcessError, match="longer than 2 s"):
        process.call(subprocess.check_call, timeout=2, args=["sh", "-c", f"echo $$ > {pid}; exec sleep 600"])
    other = int(pid.read_text())
    ended = (not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE for _ in range(50))
    assert any(one or time.sleep(0.1) for one in ended)


def test_a_missing_gradient_is_named() -> None:
    gradients = {"weight": torch.ones(2), "bias": torch.ones(1)}
    assert compare.gradient_error(gradients, gradients, torch.float32) is None
    assert "bias" in str(compare.gradient_error({"weight": torch.ones(2)}, gradients, torch.float32))
    assert "weight" in str(compare.gradient_error({**gradients, "weight": torch.full((2,), math.nan)}, gradients, torch.float32))


def test_gradients_in_half_precision_may_differ_as_eagers_do_from_float32() -> None:
    gradients, in_float32 = {"weight": torch.ones(2)}, {"weight": torch.full((2,), 1.3)}
    assert "weight" in str(compare.gradient_error({"weight": torch.full((2,), 1.5)}, gradients, torch.bfloat16))
    assert compare.gradient_error({"weight": torch.full((2,), 1.5)}, gradients, torch.bfloat16, in_float32) is None
    assert "weight" in str(compare.gradient_error({"weight": torch.full((2,), 1.7)}, gradients, torch.bfloat16, in_float32))


def test_a_difference_within_the_noise_is_told_from_one_that_is_not() -> None:
    noisy = [1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 0.95, 1.05, 1.0]
    assert compare.Ratio.of(noisy, noisy[::-1]).within_noise
    assert compare.Ratio.of([1.005] * 9, [1.0] * 9).within_noise  # nearer than anything that can be measured here
    faster = compare.Ratio.of([0.5 * value for value in noisy], noisy)
    assert not faster.within_noise and (faster.low, faster.median, faster.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("count", "outside"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (20, 5), (100, 39)])
def test_the_interval_of_the_median_is_the_binomial_one(count: int, outside: int) -> None:
    # Tables of the sign test: with 20 values the sixth smallest and largest, with 100 the fortieth.
    assert compare._outside(count) == outside


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("FusedMatMul", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("LayerNormalizationGrad", "normalisation"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::normal_", "pointwise"),
        ("aten::transpose", "views and allocation"),
        ("Transpose", "copies and layout"),
        ("graph_0_cpp_fused_add_native_layer_norm_0", "generated pointwise"),
        ("PythonOp", "in PyTorch"),
        ("ATen", "in PyTorch"),
        ("Gelu", "pointwise"),
    ],
)
def test_operators_of_both_sides_fall_into_families(operator: str, expected: str) -> None:
    assert family(operator) == expected


def test_every_model_that_is_asked_for_by_default_exists() -> None:
    assert set(QUICK) < set(DEFAULT) < set(WORKLOADS) and len(DEFAULT) == 14


def test_functions_by_themselves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(operators, "CALLS", 1)
    monkeypatch.setattr(sys, "argv", ["operators", "leaky_relu", "pool_mean"])
    operators.main()
    printed = capsys.readouterr().out
    assert "leaky_relu" in printed and "pool_mean" in printed
    monkeypatch.setattr(sys, "argv", ["operators", "leaky_rule"])
    with pytest.raises(SystemExit):
        operators.main()
    assert "no function is called leaky_rule; there are relu," in capsys.readouterr().err


def test_functions_of_operators_have_gradients() -> None:
    for kind in (operators.pointwise, operators.rows, operators.pictures):
        for name, (function, inputs) in kind():
            leaves = [one.detach().requires_grad_() for one in inputs]
            assert function(*leaves).requires_grad, name


def test_the_machine_has_the_onnx_runtime_that_is_imported() -> None:
    packages = machine.describe("cpu")["packages"]
    assert [version for name, version in packages.items() if name.startswith("onnxruntime")] == [onnxruntime.__version__]


def test_kernels_of_a_device_are_timed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_kernels.main(["--device", "cpu", "--only", "silu", "mean of planes"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")] == ["silu", "silu_backward", "mean"] * 2


def test_the_host_is_watched() -> None:
    eager, ours = (host.Probe("test", variant, "cpu", "float32", 2).measure() for variant in ("eager", "ort_training"))
    assert 0 < eager.host <= eager.step and 0 < ours.host <= ours.step, (eager, ours)
    assert eager.device == ours.device == {}  # which nothing ran on
    assert host._covered([(0, 2), (1, 3), (5, 6), (5.5, 5.8)]) == 4
    assert "host, until it has returned" in [str(cell) for cell in host.table("test", {"eager": eager}, 5).columns[0].cells]
