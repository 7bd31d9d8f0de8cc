"""What is installed, and what importing it costs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import ort_backend

ROOT = Path(__file__).parents[1]
LINKED = ("lowering", "runtime", "guards")
PACKAGED = ("ort_backend", *LINKED, "pyproject.toml")

Python = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network from a copy of the checkout: a build in place would leave its folders there."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, checkout / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-w", str(out), str(checkout)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (file,) = out.glob("*.whl")
    return file


def test_the_checkout_links_its_folders_into_the_package() -> None:
    for name in LINKED:
        link = ROOT / "ort_backend" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {entry.filename for entry in archive.infolist()}
        modes = {entry.external_attr >> 16 & 0o170000 for entry in archive.infolist()}
    assert {name.split("/")[0] for name in files} == {"ort_backend", f"ort_training-{ort_backend.__version__}.dist-info"}
    assert 0o120000 not in modes, "a symlink"
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "ort_backend").glob("*.py")}
    sources |= {f"ort_backend/{path.relative_to(ROOT)}" for name in LINKED for path in (ROOT / name).rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == sources
    assert "ort_backend/py.typed" in files


def test_the_wheel_works_from_a_neutral_directory(wheel: Path, python: Python, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = """
import importlib, sys
import ort_backend.lowering.registry, ort_backend.runtime, ort_backend.guards
names = ("ort_backend", "ort_backend.lowering", "ort_backend.runtime", "ort_backend.guards")
print(all(importlib.import_module(name).__file__.startswith(sys.argv[1]) for name in names))
"""
    assert python(code, str(tmp_path), PYTHONPATH=str(tmp_path / "site")) == "True"


def test_a_users_own_runtime_module_shadows_nothing(python: Python, tmp_path: Path) -> None:
    (tmp_path / "neutral").mkdir()
    for name in LINKED:
        (tmp_path / "neutral" / f"{name}.py").write_text("")
    assert python("import lowering, runtime, guards, ort_backend.runtime; print(ort_backend.runtime is not runtime)") == "True"


def test_the_backend_is_listed_with_nothing_imported(python: Python) -> None:
    printed = python("import sys, torch; print('ort_training' in torch._dynamo.list_backends(), 'ort_backend' in sys.modules)")
    assert printed == "True False"


def test_importing_the_package_imports_nothing_heavy(python: Python) -> None:
    code = """
import sys
import ort_backend
heavy = {"torch", "numpy", "onnxruntime", "onnx", "onnx_ir", "onnxscript", "rich", "ort_backend.compiler"}
print(sorted(heavy & set(sys.modules)))
"""
    assert python(code) == "[]"


def test_the_options_and_errors_come_without_onnxruntime(python: Python) -> None:
    code = "import sys, ort_backend; ort_backend.CompileOptions(strict=True), ort_backend.OptionError; print('onnxruntime' in sys.modules)"
    assert python(code) == "False"


def test_every_public_name_is_there(python: Python) -> None:
    code = """
import json, ort_backend
print(json.dumps({name: type(getattr(ort_backend, name)).__name__ for name in ort_backend.__all__}))
"""
    kinds = json.loads(python(code))
    assert kinds["__version__"] == "str"
    assert {kinds[name] for name in ("ort_training", "report", "register_lowering")} == {"function"}
    assert set(ort_backend.__all__) <= set(dir(ort_backend))


def test_no_module_takes_the_place_of_a_public_name(python: Python) -> None:
    """Importing a submodule puts it into its package: one called `report` would hide the function."""
    assert python("import ort_backend, ort_backend.compiler; print(callable(ort_backend.report))") == "True"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'reports'"):
        ort_backend.reports  # noqa: B018
