"""`tools/gpu_check.py` under an interpreter that has little: no pytest of its own, packages of another Python's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

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


def test_convolutions_of_eager_are_computed_in_float32() -> None:
    """Where they are what others are compared with."""
    assert torch.backends.cudnn.conv.fp32_precision != "tf32"  # type: ignore[attr-defined]  # here: tests/conftest.py
    code = f"import sys, torch; sys.path.insert(0, {str(TOOLS)!r}); import gpu_smoke; gpu_smoke.CASES = (); assert gpu_smoke.main() == 0"
    code += "; assert torch.backends.cudnn.conv.fp32_precision != 'tf32'"
    subprocess.run([sys.executable, "-c", code, "--device", "cpu"], check=True)
