"""Whether the installed packages can work together, asked once, at the first compile."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ort_backend.errors import EnvironmentProblem

# Distribution -> oldest version that works. pyproject.toml states the same, and a test holds the two together.
OLDEST = {
    "torch": (2, 11),  # what fails under it, of all that tools/torch_versions.py runs, is in LIMITS.md
    "onnx": (1, 17),
    "onnx-ir": (1, 0),
    "onnxscript": (0, 7),  # onnxscript.GraphBuilder is public since 0.7.0
}
OLDEST_ONNXRUNTIME = (1, 21)  # exchanges tensors by DLPack
OLDEST_ONNXRUNTIME_TRAINING = (1, 19)  # opset 21, IR version 10


@functools.cache
def check_environment() -> None:
    """Checks that every package that a compile needs is installed, recent enough and there once.

    A success is remembered; a failure is looked at again by the next call, so that a notebook can go on after it.

    Raises:
        EnvironmentProblem: names everything that is missing, too old or mixed up, and the commands that fix it.
    """
    problems = [*_missing_or_old(), *_onnxruntime_problems()]
    if problems:
        raise EnvironmentProblem('backend="ort_training" cannot run in this Python environment:\n' + "\n".join(problems))


def _missing_or_old() -> Iterator[str]:
    for name, oldest in OLDEST.items():
        wanted = f"{name}>={_dotted(oldest)}"
        fix = f"Fix: pip install --upgrade '{wanted}'"
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"- {name} is not installed. {fix}"
            continue
        if _release(installed) < oldest:
            yield f"- {name} {installed} is too old, {_dotted(oldest)} or newer is needed. {fix}"


def _onnxruntime_problems() -> Iterator[str]:
    owners = _onnxruntime_owners()
    if not owners:
        if _import_failure():  # else it has no metadata: a build of the user's own
            yield f"- onnxruntime is not installed. Fix: pip install {_onnxruntime_for_this_python()}"
        return
    if len(owners) > 1:
        named = " and ".join(f"{name} {version}" for name, version in owners.items())
        keep = _keep(list(owners))
        yield (
            f"- {named} are installed over each other: they share the import package `onnxruntime`, which is now a mixture of them. "
            f"Fix: pip uninstall -y {' '.join(owners)} && pip install {keep}=={owners[keep]}"
        )
        return
    (name, version), *_ = owners.items()
    oldest = OLDEST_ONNXRUNTIME_TRAINING if "training" in name else OLDEST_ONNXRUNTIME
    if _release(version) < oldest:
        yield f"- {name} {version} is too old, {_dotted(oldest)} or newer is needed. Fix: pip install --upgrade '{name}>={_dotted(oldest)}'"
        return
    failure = _import_failure()
    if failure:
        yield f"- {name} {version} is installed, but {failure}. Fix: pip install --force-reinstall --no-deps {name}=={version}"


def _import_failure() -> str | None:
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError as error:
        return f"importing it fails: {error}"
    if not hasattr(onnxruntime, "InferenceSession"):  # a directory without __init__.py, left by the removal of another onnxruntime
        return "its files are not all there"
    return None


def _onnxruntime_owners() -> dict[str, str]:
    """Distribution -> version of all whose files are the `onnxruntime` package that Python imports.

    A second copy in another directory of `sys.path` is only shadowed, not mixed up, and does not count.
    """
    homes: dict[Path, dict[str, str]] = {}  # in the order of sys.path
    for distribution in importlib.metadata.distributions():
        name = _name_of(distribution)
        if name and re.match(r"onnxruntime|ort[-_]", name, re.IGNORECASE) and _owns_onnxruntime(distribution):
            home = Path(str(distribution.locate_file("onnxruntime"))).resolve()
            homes.setdefault(home, {}).setdefault(name.lower().replace("_", "-"), distribution.version)
    return next(iter(homes.values()), {})


# `distribution.metadata` and `.files` parse all that is written there: a quarter of a second for the hundred packages of an environment.


def _name_of(distribution: importlib.metadata.Distribution) -> str | None:
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    found = re.search(r"^Name:\s*(\S+)", text, re.MULTILINE)
    return found and found[1]


def _owns_onnxruntime(distribution: importlib.metadata.Distribution) -> bool:
    record = distribution.read_text("RECORD")
    if record is not None:
        return re.search(r'^"?onnxruntime/__init__\.py"?,', record, re.MULTILINE) is not None
    return any(file.as_posix() == "onnxruntime/__init__.py" for file in distribution.files or ())


def _keep(owners: list[str]) -> str:
    """The distribution to keep out of a mixture: the one that can do most."""
    return next((name for kind in ("training", "gpu") for name in owners if kind in name), owners[0])


def _onnxruntime_for_this_python() -> str:
    # Wheels of onnxruntime-training exist for CPython 3.8 to 3.11 on Linux x86-64.
    has_wheel = sys.version_info < (3, 12) and sys.platform == "linux" and platform.machine() == "x86_64"
    return "onnxruntime-training" if has_wheel else "onnxruntime"


def _release(version: str) -> tuple[int, ...]:
    """`"2.13.0+cpu"` -> `(2, 13, 0)`."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0]))


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
