"""`tools/gpu_check.py` under an interpreter that has little: no pytest of its own, packages of another Python's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool as a module."""
    monkeypatch.syspath_prepend(TOOLS)
    return __import__("gpu_check")


def test_it_starts_without_pytest() -> None:
    code = f"import sys; sys.modules['pytest'] = None; sys.path.insert(0, {str(TOOLS)!r}); import gpu_check"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_linked_from_another_interpreter_is_what_is_required(tmp_path: Path) -> None:
    """And nothing else: what a package finds by chance may be compiled for the other Python."""
    (tmp_path / "pluggy").symlink_to(TOOLS)  # a link that is there is left alone
    subprocess.run([sys.executable, str(TOOLS / "behind.py"), str(tmp_path), "pytest", "not-installed"], check=True)
    made = {one.name for one in tmp_path.iterdir()}
    assert {"_pytest", "pytest", "pluggy", "iniconfig"} <= made and not made & {"torch", "numpy", "onnx", "..", "__pycache__"}
    assert any(name.startswith("pytest-") and name.endswith(".dist-info") for name in made)
    assert (tmp_path / "pytest" / "__init__.py").exists() and (tmp_path / "pluggy").resolve() == TOOLS.resolve()


def test_convolutions_of_eager_are_computed_in_float32() -> None:
    """Where they are what others are compared with."""
    assert torch.backends.cudnn.conv.fp32_precision != "tf32"  # type: ignore[attr-defined]  # here: tests/conftest.py
    code = f"import sys, torch; sys.path.insert(0, {str(TOOLS)!r}); import gpu_smoke; gpu_smoke.CASES = (); assert gpu_smoke.main() == 0"
    code += "; assert torch.backends.cudnn.conv.fp32_precision != 'tf32'"
    subprocess.run([sys.executable, "-c", code, "--device", "cpu"], check=True)


def test_a_case_of_smoke_that_hangs_ends_its_process() -> None:
    code = f"import signal, sys; sys.path.insert(0, {str(TOOLS)!r}); import torch._dynamo, gpu_smoke; gpu_smoke.LIMIT = 1.0"
    code += "; gpu_smoke.CASES = (('waits', signal.pause, None, 0.0),); gpu_smoke.main()"
    command = [sys.executable, "-c", code, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "CASE waits" in done.stdout and "RESULT" not in done.stdout
    assert done.stderr.startswith("Timeout (") and "Thread 0x" in done.stderr


def _smoke(gpu_check: ModuleType, *results: tuple[int | None, str], left: float = 100.0) -> tuple[dict[str, Any], list[int]]:
    """What `smoke` says at the end of processes with these statuses and outputs, and how many cases each of them left out."""
    firsts: list[int] = []

    def call(stage: str, command: list[str]) -> dict[str, Any]:
        status, output = results[len(firsts)]
        firsts.append(int(command[-1]))
        return {"command": command, "status": status, "seconds": 1.0, "output": output}

    run = SimpleNamespace(call=call, left=lambda: left, arguments=SimpleNamespace(device="cpu"))
    *_, last = gpu_check.smoke(run, {})
    return last, firsts


_OK = 'CASE a\nRESULT {"name": "a", "right": true, "verdict": "ok"}\n'


def test_smoke_goes_on_behind_what_hangs_or_crashes(gpu_check: ModuleType) -> None:
    hang = "CASE b\nTimeout (0:01:30)!\nThread 1\n"
    found, firsts = _smoke(gpu_check, (1, _OK + hang), (None, "CASE c\n"))
    assert firsts == [0, 2] and [case["verdict"] for case in found["cases"]] == ["ok", "HUNG", "HUNG"]  # two hangs: enough
    assert found["status"] is None and "Thread 1" in found["cases"][1]["error"]
    found, firsts = _smoke(gpu_check, (-11, "CASE a\n"), (None, _OK + "CASE b\n"), (70, _OK), (0, ""))
    assert firsts == [0, 1, 3, 4] and [case["verdict"] for case in found["cases"]] == ["CRASHED (exit status -11)", "ok", "HUNG", "ok"]
    assert found["status"] == 70
    found, _ = _smoke(gpu_check, (None, _OK + "CASE b\n"), (None, "no time was left to start it"), left=1.0)
    assert [case["verdict"] for case in found["cases"]] == ["ok", "NOT DONE"] and found["status"] is None


def test_the_log_is_capped_and_the_end_of_the_output_is_found(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_LOG", 100_000)
    run = gpu_check.Run.__new__(gpu_check.Run)
    run.arguments, run.log, run.environment, run._end = SimpleNamespace(timeout=60.0), tmp_path / "log.txt", {}, float("inf")
    run.log.write_text("earlier\n" * 5000)
    assert run.call("smoke", [sys.executable, "-c", "print('short')"])["output"] == "short\n"
    result = run.call("smoke", [sys.executable, "-c", "print('x' * 200_000); print('RESULT')"])
    assert result["status"] == 0 and result["output"].endswith("xxx\nRESULT\n") and run.log.stat().st_size <= 100_000
    assert run.call("smoke", [sys.executable, "-c", "print('short')"])["output"] == "short\n"


def test_the_report_tells_sessions_and_the_peak_of_pytorchs_pool(gpu_check: ModuleType) -> None:
    details = {"sessions": 3, "python_op_names": ["aten.sort", "aten.topk"]}
    steps = {"error": None, "step_ms": {"median": 12.5}, "details": details, "allocator_peak_bytes": 7_000_000}
    process = {"allocator_peak_bytes": 8_000_000, "details": {**details, "sessions": 4}}
    figures = gpu_check._figures({"backends": {"ort_training": steps, "inductor": {**steps, "peak_bytes": 9e6, "process": process}}})
    table = __import__("gpu_report")._bench_table({"runs": {"": {"models": {"gpt": figures}}}})
    assert "| gpt | ort_training | 12.50 |  |  | 7 | 3 | aten.sort, aten.topk |  |" in table
    assert "| gpt | inductor | 12.50 |  | 9 | 8 | 4 | aten.sort, aten.topk |  |" in table


def test_results_are_replaced_whole_and_read_where_they_are(gpu_check: ModuleType, tmp_path: Path) -> None:
    kept = tmp_path / "gpu.json"
    assert gpu_check._stages(kept) == {}
    gpu_check._replace(kept, '{"stages": {"smoke": 1}}')
    assert gpu_check._stages(kept) == {"smoke": 1} and len(list(tmp_path.glob("*"))) == 1
    kept.write_text('{"stages": {"smo')
    assert gpu_check._stages(kept) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the provider may work here")
def test_a_provider_that_cannot_be_loaded_ends_it_with_the_reason(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"gpu": "one", "python": "3", "versions": {}, "commit": None, "date": "today"}
    monkeypatch.setattr(gpu_check, "machine", lambda device: about)
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu_check, "SCRATCH", tmp_path / "scratch")
    with pytest.raises(SystemExit, match="(?s)gpu-check: ONNX.*makes no session on the CUDAExecutionProvider: "):
        gpu_check.main(["--stages", "smoke", "--out", str(tmp_path / "out")])
    report = (tmp_path / "out" / "gpu.md").read_text()
    assert "## provider: FAILED" in report and "makes no session on the CUDAExecutionProvider: " in report and "## smoke" not in report
