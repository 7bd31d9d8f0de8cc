"""Runs the tests under other versions of torch, each in a virtual environment of its own, and prints what passed.

    python tools/torch_versions.py 2.11.0 2.15.0 --tests tests/guards

An environment gets that torch, and of everything else what constraints.txt pins. It takes minutes to install and some gigabytes, and is deleted
after its run unless `--keep` says where it stays for the next one. What pytest prints goes to out/torch_versions.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tomllib
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "out" / "torch_versions"
# A file with far too many tests for every version -> one of so many runs. It is chosen by its name: every version runs the same ones.
ONE_OF = {"tests/ops/test_opinfo.py": 8}
PINNED_BY_TORCH = ("torch", "sympy", "setuptools")
OLDEST_WITH_NUMPY_2 = (2, 3)
SHOWN_FAILURES = 20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one version gave: numbers of tests, the names of those that failed, or the problem that kept them from running."""

    version: str
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""


class CommandFailed(Exception):
    """A command that this script needs failed; the text says which, and ends with what it printed last."""


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; the exit status is 1 where tests failed or could not run."""
    options = _options(arguments)
    console = Console()
    outcomes = []
    for version in options.versions:
        console.print(f"torch {version}: installing and testing ...", highlight=False)
        outcomes.append(_outcome(version, options))
    console.print(_table(outcomes))
    return int(any(outcome.failed or outcome.problem for outcome in outcomes))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the tests under other versions of torch.")
    parser.add_argument("versions", nargs="+", type=_version, metavar="VERSION", help="releases on PyPI, such as 2.9.1")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="files and folders of tests (default: tests)")
    parser.add_argument("--deselect", nargs="+", default=[], metavar="NAME", help="tests to leave out")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the environments there, and use those that are there")
    return parser.parse_args(arguments)


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no release; one reads 2.9.1")
    return text


def _outcome(version: str, options: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="torch-versions-") as temporary:
        try:
            python = _environment(Path(options.keep or temporary).resolve() / version, version)
            return _test(python, version, options, Path(temporary) / "junit.xml")
        except CommandFailed as problem:
            return Outcome(version, problem=str(problem))


def _environment(folder: Path, version: str) -> Path:
    """The interpreter of the environment in `folder`, which is made if it is not complete."""
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(_constraints(version)))
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # The wheels are gigabytes: pip's cache would keep a second copy of each.
    _run([*pip, "--no-cache-dir", "--constraint", str(constraints), f"torch=={version}", *_requirements()])
    _run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])  # whatever torch it asks for
    complete.touch()
    return python


def _constraints(version: str) -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if "==" in line and line.partition("==")[0] not in PINNED_BY_TORCH]
    if tuple(map(int, version.split("."))) < OLDEST_WITH_NUMPY_2:
        return ["numpy<2" if pin.startswith("numpy==") else pin for pin in pins]
    return pins


def _requirements() -> list[str]:
    """What the project and its tests need, but for torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    every = [*project["dependencies"], *extras["test"], *extras["benchmarks"]]
    return [requirement for requirement in every if not re.match(r"torch\b", requirement)]


def _test(python: Path, version: str, options: argparse.Namespace, junit: Path) -> Outcome:
    plugin = Path(__file__)
    command = [str(python), "-m", "pytest", "-p", plugin.stem, "-p", "no:cacheprovider", "--tb=short", f"--junitxml={junit}"]
    # In a process of its own, which pytest-xdist starts again after a crash.
    command += ["--numprocesses=1", "--continue-on-collection-errors", *(f"--deselect={name}" for name in options.deselect)]
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{version}.txt"
    status = _run([*command, *options.tests], log=log, allowed=(0, 1), PYTHONPATH=str(plugin.parent), OMP_NUM_THREADS="1")
    outcome = _read(version, junit)
    if status and not outcome.failed:
        return dataclasses.replace(outcome, problem=f"pytest failed: see {log}")
    return outcome


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Called by pytest, whose plugin this file is in `_test`: takes out what `ONE_OF` says."""
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % ONE_OF.get(item.nodeid.partition("::")[0], 1) == 0]


def _read(version: str, junit: Path) -> Outcome:
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None
    failed, skipped, cases = [], 0, suite.findall("testcase")
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname', '')}::{case.get('name')}".lstrip(":"))
        elif case.find("skipped") is not None:
            skipped += 1
    return Outcome(version, len(cases) - len(failed) - skipped, skipped, tuple(failed), float(suite.get("time", 0)))


def _run(command: Sequence[str], log: Path | None = None, allowed: tuple[int, ...] = (0,), **environment: str) -> int:
    """The status of a command; what it prints goes to `log`.

    Raises:
        CommandFailed: for a status that is not allowed.
    """
    finished = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if log is not None:
        log.write_text(finished.stdout)
    if finished.returncode not in allowed:
        shown = " ".join(command[:6])
        raise CommandFailed(f"`{shown} ...` ended with status {finished.returncode}:\n" + "\n".join(finished.stdout.splitlines()[-15:]))
    return finished.returncode


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("torch", "passed", "failed", "skipped", "seconds", Column("failures", overflow="fold"))
    for one in outcomes:
        names = [*one.failed[:SHOWN_FAILURES], *([f"... and {len(one.failed) - SHOWN_FAILURES} more"] if len(one.failed) > SHOWN_FAILURES else [])]
        counts = map(str, (one.passed, len(one.failed), one.skipped, round(one.seconds)))
        table.add_row(one.version, *counts, escape("\n".join([*names, *filter(None, [one.problem])])))
    return table


if __name__ == "__main__":
    sys.exit(main())
