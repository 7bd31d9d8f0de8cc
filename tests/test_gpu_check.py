"""`tools/gpu_check.py` under an interpreter that has little: no pytest of its own, packages of another Python's."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


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


@pytest.fixture
def gpu_check(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`tools/gpu_check.py`, which is not run as a part of a package."""
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.import_module("gpu_check")
    monkeypatch.setattr(module, "SCRATCH", tmp_path_factory.mktemp("scratch"))
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    return module


def test_a_file_of_results_that_was_copied_half_written_counts_as_none(gpu_check: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    assert gpu_check._stages(file) == {}
    gpu_check._write(file, '{"stages": {"smoke": {}}}')
    assert gpu_check._stages(file) == {"smoke": {}} and list(tmp_path.iterdir()) == [file]
    file.write_text('{"stages": {"sm')
    assert gpu_check._stages(file) == {}


class _Smoke:
    """A run whose calls of the smoke test say what a list has, one after the other."""

    def __init__(self, *results: tuple[int | None, str]) -> None:
        self.arguments, self.firsts, self._results = SimpleNamespace(device="cpu"), [], iter(results)

    def call(self, command: Sequence[str]) -> dict[str, Any]:
        self.firsts.append(command[-1])
        status, output = next(self._results)
        return {"command": command, "status": status, "seconds": 1.0, "output": output}


def test_the_smoke_test_goes_on_behind_a_case_that_hangs(gpu_check: ModuleType) -> None:
    right = 'RESULT {"name": "a", "right": true, "verdict": "ok"}'
    run = _Smoke((1, f"CASE a\n{right}\nCASE b\nTimeout (0:01:30)!\n"), (None, "CASE c\n"), (0, f"CASE d\n{right}\n"))
    *_, last = gpu_check.smoke(run, {})
    assert run.firsts == ["0", "2", "3"]
    assert [case["verdict"] for case in last["cases"]] == ["ok", "NOT DONE", "NOT DONE", "ok"] and last["status"] == 1


def test_the_log_stays_small_enough_to_come_back(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_LONGEST_LOG", 1000)
    run = gpu_check.Run(gpu_check.parse(["--out", str(tmp_path), "--device", "cpu"]))
    assert run.environment["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    result = run.call([sys.executable, "-c", "print('x' * 5000 + 'end')"])
    assert len(result["output"]) == 5004 and run.log.stat().st_size < 1000 and run.log.read_text().endswith("end\n")


def test_nothing_is_run_where_the_provider_cannot_be_loaded(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "machine", lambda device: {"gpu": "one", "python": "3", "versions": {}, "commit": None, "date": ""})
    monkeypatch.setattr(gpu_check, "_PROVIDER", "NoExecutionProvider")
    with pytest.raises(SystemExit, match="makes no session on the NoExecutionProvider: this build has"):
        gpu_check.main(["--out", str(tmp_path)])
    assert "makes no session" in (tmp_path / "gpu.md").read_text() and not (tmp_path / "gpu.json").exists()
