"""check_environment(): what it finds wrong, and the commands it gives."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomllib

from ort_backend import environment
from ort_backend.environment import check_environment
from ort_backend.errors import EnvironmentProblem, OrtBackendError

Install = Callable[..., None]


@pytest.fixture(autouse=True)
def _forget_success() -> Iterator[None]:
    check_environment.cache_clear()
    yield
    check_environment.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """An environment of its own, in which `install(name, version, *files)` leaves the metadata of a distribution."""
    site = tmp_path / "site-packages"
    site.mkdir()
    real = importlib.metadata.distributions

    def add(name: str, version: str, *files: str, directory: Path = site) -> None:
        info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))

    def distribution(name: str) -> importlib.metadata.Distribution:
        return next(iter(real(name=name, path=[str(site)])), None) or missing(name)

    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    paths = [str(site), str(tmp_path / "other")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: real(path=paths))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: distribution(name).version)
    return add


def install_all(install: Install, **versions: str | None) -> None:
    """A sound environment, but for the `versions` given; None leaves a distribution out."""
    sound = {"torch": "2.13.0+cpu", "onnx": "1.23.2", "onnx_ir": "1.1.0", "onnxscript": "0.7.2", "onnxruntime_training": "1.19.2"}
    for name, version in {**sound, **versions}.items():
        if version is not None:
            files = ["onnxruntime/__init__.py"] if name.startswith("onnxruntime") else []
            install(name.replace("_", "-"), version, *files)


def problems() -> str:
    with pytest.raises(EnvironmentProblem) as caught:
        check_environment()
    return str(caught.value)


def test_this_environment_is_sound() -> None:
    check_environment()


def test_a_sound_environment_passes(install: Install) -> None:
    install_all(install)
    check_environment()


@pytest.mark.parametrize("name", ["torch", "onnx", "onnx-ir", "onnxscript"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(install: Install, name: str) -> None:
    install_all(install, **{name.replace("-", "_"): None})
    assert re.search(rf"- {name} is not installed\. Fix: pip install --upgrade '{name}>=[\d.]+'", problems())


@pytest.mark.parametrize(
    ("name", "version", "needed"),
    [("torch", "2.9.1+cu128", "2.11"), ("onnx", "1.16.2", "1.17"), ("onnx_ir", "0.1.16", "1.0"), ("onnxscript", "0.6.2", "0.7")],
)
def test_an_old_package_is_named_with_its_version_and_the_one_needed(install: Install, name: str, version: str, needed: str) -> None:
    install_all(install, **{name: version})
    dashed = name.replace("_", "-")
    assert f"- {dashed} {version} is too old, {needed} or newer is needed. Fix: pip install --upgrade '{dashed}>={needed}'" in problems()


@pytest.mark.parametrize("version", ["2.11", "2.11.0", "2.11.0a0+git1234", "2.14.0.dev20260101+cpu", "10.0"])
def test_versions_compare_as_numbers(install: Install, version: str) -> None:
    install_all(install, torch=version)
    check_environment()


def test_no_onnxruntime(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_all(install, onnxruntime_training=None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert re.search(r"- onnxruntime is not installed\. Fix: pip install onnxruntime(-training)?$", problems())


def test_an_onnxruntime_without_metadata_is_taken_as_it_is(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_all(install, onnxruntime_training=None)
    monkeypatch.setitem(sys.modules, "onnxruntime", types.SimpleNamespace(InferenceSession=object))
    check_environment()


@pytest.mark.parametrize(
    ("other", "keep"),
    [("onnxruntime", "onnxruntime-training==1.19.2"), ("onnxruntime-gpu", "onnxruntime-training==1.19.2")],
)
def test_two_onnxruntime_packages_over_each_other(install: Install, other: str, keep: str) -> None:
    install_all(install, **{other.replace("-", "_"): "1.31.0"})
    message = problems()
    assert f"{other} 1.31.0" in message
    assert "onnxruntime-training 1.19.2" in message
    assert re.search(rf"pip uninstall -y (\S+ )*{other}( |$)", message)
    assert message.endswith(f"&& pip install {keep}")


def test_of_two_onnxruntimes_without_training_the_gpu_one_is_kept(install: Install) -> None:
    install_all(install, onnxruntime_training=None, onnxruntime="1.31.0", onnxruntime_gpu="1.31.0")
    assert problems().endswith("&& pip install onnxruntime-gpu==1.31.0")


def test_packages_that_only_sound_like_onnxruntime_are_no_mixture(install: Install) -> None:
    install_all(install)
    install("onnxruntime-extensions", "0.14.0", "onnxruntime_extensions/__init__.py")
    install("onnxruntime-genai", "0.9.0")
    check_environment()


def test_a_shadowed_onnxruntime_in_another_directory_is_no_mixture(install: Install, tmp_path: Path) -> None:
    install_all(install)
    install("onnxruntime", "1.31.0", "onnxruntime/__init__.py", directory=tmp_path / "other")
    check_environment()


def test_an_old_onnxruntime(install: Install) -> None:
    install_all(install, onnxruntime_training="1.17.3")
    assert "- onnxruntime-training 1.17.3 is too old, 1.19 or newer is needed." in problems()


def test_an_old_onnxruntime_without_training(install: Install) -> None:
    install_all(install, onnxruntime_training=None)
    install("onnxruntime", "1.20.1", "onnxruntime/__init__.py")
    assert "- onnxruntime 1.20.1 is too old, 1.21 or newer is needed." in problems()


def test_an_onnxruntime_that_does_not_import(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_all(install)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "pip install --force-reinstall --no-deps onnxruntime-training==1.19.2" in problems()


def test_what_an_uninstall_left_behind(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_all(install)
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    message = problems()
    assert "its files are not all there" in message
    assert "--force-reinstall" in message


def test_every_problem_is_named_at_once(install: Install) -> None:
    install_all(install, torch="2.0.0", onnxscript=None, onnxruntime="1.31.0")
    assert problems().count("Fix: ") == 3


def test_a_failure_is_looked_at_again(install: Install) -> None:
    install_all(install, onnx_ir=None)
    problems()
    install("onnx-ir", "1.1.0")
    check_environment()


def test_the_error_is_one_of_ours_and_an_import_error() -> None:
    assert issubclass(EnvironmentProblem, OrtBackendError)
    assert issubclass(EnvironmentProblem, ImportError)


def test_pyproject_asks_for_what_is_checked() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    asked = dict(re.match(r"([a-z-]+)(?:>=([\d.]+))?", line).groups() for line in pyproject["project"]["dependencies"])
    checked = {**environment.OLDEST, "onnxruntime": environment.OLDEST_ONNXRUNTIME}
    assert {name: tuple(map(int, asked[name].split("."))) for name in checked} == checked
