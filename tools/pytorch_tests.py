"""PyTorch's own tests with this backend in the place of inductor, and of the other backends that they name.

    python -m tools.pytorch_tests ~/pytorch/test/dynamo/test_repros.py -k test_a
    python -m tools.pytorch_tests ~/pytorch/test/test_autograd.py --every    # each test compiled, whatever it is about

What fails is run again with `aot_eager` in that place; what fails here alone is printed, and the exit status is 1 then. Tests that read inductor's
code, or count its kernels, fail in both. The source should be that of the installed torch: files of another may not import. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

ROOT = Path(__file__).resolve().parents[1]
# To the plugin, which this file is: the backend, and the file that gets a line for each failure.
_BACKEND, _FAILURES = "ORT_TRAINING_IN_PLACE", "ORT_TRAINING_FAILURES"
_REPLACED = ("inductor", "eager", "aot_eager", "aot_eager_decomp_partition")
_COULD_NOT_RUN = 2
_STDERR = 2


def main(arguments: list[str] | None = None) -> int:
    """Runs the tests and prints what fails; the exit status is 1 if anything does, 2 if pytest could not run."""
    parser = argparse.ArgumentParser(prog="python -m tools.pytorch_tests", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("tests", nargs="+", help="files of PyTorch's, or tests in them (`FILE::CLASS::NAME`)")
    parser.add_argument("-k", dest="expression", default="", help="which tests, as pytest takes it")
    parser.add_argument("--every", action="store_true", help="compile every test, also those that compile nothing themselves")
    options = parser.parse_args(arguments)
    console = Console()
    chosen = ["-k", options.expression] if options.expression else []
    failures = _run("ort_training", [os.path.abspath(one) for one in options.tests], chosen, every=options.every)
    if failures is None:
        return _COULD_NOT_RUN
    known = _run("aot_eager", list(failures), [], every=options.every) if failures else {}
    ours = {name: text for name, text in failures.items() if name not in (known or {})}
    for name, text in ours.items():
        console.print(f"[bold]{escape(name)}[/bold]\n  {escape(text)}", highlight=False, soft_wrap=True)
    console.print(f"{len(failures)} failed, {len(ours)} of them not with aot_eager", highlight=False)
    return int(bool(ours))


def _run(backend: str, tests: Sequence[str], chosen: Sequence[str], *, every: bool) -> Mapping[str, str] | None:
    """The tests that fail, each with the last line of what is wrong; None if pytest could not run. What it prints goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "failures.jsonl"
        found.touch()
        # In a process of its own, which pytest-xdist starts again after a crash. No settings but these: neither ours nor PyTorch's.
        command = [sys.executable, "-m", "pytest", "-p", "tools.pytorch_tests", "-p", "no:cacheprovider", "-n", "1", "-q", "--tb=short"]
        command += ["-c", os.devnull, "--rootdir", os.sep, "--show-capture=no", "--noconftest", *tests, *chosen]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}  # of a worker that this may run in
        environment = {**inherited, _BACKEND: backend, _FAILURES: str(found), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        if every:
            environment |= {"PYTORCH_TEST_WITH_INDUCTOR": "1", "STRICT_DEFAULT": "1"}
        finished = subprocess.run(command, cwd=Path(tests[0].split("::")[0]).parent, env=environment, stdout=_STDERR, check=False)
        if finished.returncode > 1:
            return None
        return {one["name"]: one["text"] for one in map(json.loads, found.read_text().splitlines())}


# -- the plugin


def pytest_configure() -> None:
    """Called by pytest before it reads the tests."""
    if name := os.environ.get(_BACKEND):
        put_in_place(name)


def pytest_runtest_logreport(report: Any) -> None:
    """Called by pytest for each part of a test, by the process that collects what others run as well."""
    path = os.environ.get(_FAILURES)
    if report.failed and path and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = [line.removeprefix("E").strip() for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
        text = next(iter(filter(None, lines)), str(report.longrepr).strip().rpartition("\n")[2])
        with open(path, "a") as file:
            file.write(json.dumps({"name": os.sep + report.nodeid.lstrip(os.sep), "text": text}) + "\n")


def put_in_place(name: str) -> None:
    """Makes PyTorch, in this process, compile with the backend of that name wherever inductor or another is asked for (read in torch 2.13)."""
    import torch
    import torch._dynamo.testing
    import torch._inductor.compile_fx
    from torch._dynamo.backends import registry

    torch.set_num_threads(1)
    original, backend = registry.lookup_backend, registry.lookup_backend(name)

    def lookup(compiler_fn: Any) -> Any:
        return backend if isinstance(compiler_fn, str) and compiler_fn in _REPLACED else original(compiler_fn)

    for module in [module for key, module in sys.modules.items() if key.startswith("torch._dynamo")]:
        if getattr(module, "lookup_backend", None) is original:
            setattr(module, "lookup_backend", lookup)  # noqa: B010  (mypy knows no such attribute)

    def compile_fx(gm: Any, example_inputs: Any, *_: Any, **__: Any) -> Any:
        return backend(gm, example_inputs)

    def count(self: Any, gm: Any, example_inputs: Any) -> Any:
        self.frame_count += 1
        self.op_count += sum("call" in node.op for node in gm.graph.nodes)
        return backend(gm, example_inputs)

    changed: dict[Any, dict[str, Any]] = {
        torch._inductor.compile_fx: {"compile_fx": compile_fx},
        torch._dynamo.testing.CompileCounter: {"__call__": count},
        torch._TorchCompileInductorWrapper: {
            "__call__": lambda self, gm, example_inputs: backend(gm, example_inputs),
            "get_compiler_config": lambda self: None,
        },
    }
    for target, attributes in changed.items():
        for key, value in attributes.items():
            setattr(target, key, value)


if __name__ == "__main__":
    sys.exit(main())
