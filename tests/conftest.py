"""Fixtures that every test shares."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.guards
import torch._dynamo.variables.torch
import torch._functorch.config
import torch._logging._internal
import torch.utils._device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_version import FULLGRAPH_IS_GLOBAL

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda`: every tensor that a test makes without saying where is on the CUDA device, and so is what is compiled."""
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where tests make their tensors (default: cpu)")
    parser.addoption(
        "--every", action="append", default=[], metavar="N:PATH", help="of the tests under PATH, run the first of each and an Nth of the others"
    )
    parser.addoption("--compile-cache", metavar="DIRECTORY", help="let PyTorch keep compiled graphs there; run twice, the second run reads them")


def pytest_configure(config: pytest.Config) -> None:
    """Before test modules are imported: some make tensors then."""
    if config.getoption("--device") == "cuda":
        torch.set_default_device("cuda")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it PyTorch refuses products that are to be deterministic
        # Until torch 2.13 graphs have what `torch.tensor`, `torch.arange` and most others make on the CPU, with any backend.
        torch._dynamo.variables.torch.get_overridable_functions().update(torch.utils._device._device_constructors())
    torch.backends.cudnn.allow_tf32 = False  # eager is the measure: its convolutions are not to round float32 to TF32, as they do by default
    # Dynamo times every set of guards once, with cold caches: it writes 32 MB first, which takes 16 ms of each compile, an eighth of all tests' time.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    # Seeds for devices that are absent are kept for later, each with a stack trace: a millisecond for every `torch.manual_seed`.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None  # type: ignore[assignment]
    # pytest's handler would turn on PyTorch's structured trace (`TORCH_TRACE`), which records a stack for each step of a compile.
    torch._logging._internal.trace_log.propagate = True
    directory = config.getoption("--compile-cache")
    torch._functorch.config.enable_autograd_cache = directory is not None
    if not hasattr(config, "workerinput"):  # the workers of xdist inherit it
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory or _temporary(config)


def _temporary(config: pytest.Config) -> str:
    folder = tempfile.TemporaryDirectory(prefix="ort_training_tests_", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    return folder.name


def pytest_collection_finish() -> None:
    """What modules and the tests consist of is no garbage: to go through it, and that often, took a sixth of all tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)


@pytest.fixture(autouse=True)
def _fresh_torch() -> Iterator[None]:
    """Every test starts from one seed and leaves no compiled code behind."""
    torch.manual_seed(0)
    report = sys.modules.get("ort_backend.graph_report")
    if report is not None and len(report._graphs) > report.MAX_GRAPHS // 2:  # it keeps the last ones, and tests count what they add
        report._graphs.clear()
    yield
    torch._dynamo.reset()
    if len(FakeTensorMode.cache) > 1000:  # it forgets nothing, and each collection of garbage would go through it
        FakeTensorMode.cache_clear()
    if FULLGRAPH_IS_GLOBAL:
        set_mode = torch._C._dynamo.eval_frame.set_eval_frame_override  # type: ignore[attr-defined]
        set_mode(torch._C._dynamo.eval_frame._EvalFrameOverride.NONE)  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> Iterator[None]:
    """What a module's tests leave is no garbage either: they import most of PyTorch's compiler, and some tests collect garbage again and again."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what is marked `cuda` where there is no CUDA device, and what is marked `cpu_only` where tests make their tensors on one.

    Under `--every N:PATH` of the parameters of each test there the first stays, and about every Nth of the others, the same ones in each run.
    """
    lacks_cuda, on_cuda = not torch.cuda.is_available(), config.getoption("--device") == "cuda"
    for item in items:
        if lacks_cuda and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
        only = item.get_closest_marker("cpu_only")
        if on_cuda and only is not None:
            item.add_marker(pytest.mark.skip(reason=f"of the CPU alone: {only.kwargs['reason']}"))
    for every, path in (one.split(":", 1) for one in config.getoption("--every")):
        seen: set[str] = set()
        left = {item for item in items if item.nodeid.startswith(path) and _is_left_out(item.nodeid, int(every), seen)}
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


def _is_left_out(test: str, every: int, seen: set[str]) -> bool:
    name = test.partition("[")[0]
    first = name not in seen
    seen.add(name)
    return not first and zlib.crc32(test.encode()) % every != 0  # not by its place: parameters are products, and the last one has two values often


@pytest.fixture
def fresh_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`fresh_process(code, *arguments)`: what a fresh interpreter, started in an empty directory, printed and wrote to stderr."""

    def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        neutral = tmp_path / "neutral"
        neutral.mkdir(exist_ok=True)
        cached = str(int(torch._functorch.config.enable_autograd_cache))
        process = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=neutral,
            env={"TORCHINDUCTOR_AUTOGRAD_CACHE": cached, **os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        return process

    return run


@pytest.fixture
def python(fresh_process: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """`python(code, *arguments)`: what a fresh interpreter prints; a failure shows its stderr."""
    return lambda *arguments, **environment: fresh_process(*arguments, **environment).stdout.strip()
