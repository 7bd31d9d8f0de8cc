"""A CUDA provider that cannot be loaded: ONNX Runtime makes sessions on the CPU then, without an error."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest
import torch

from ort_backend.errors import EnvironmentProblem
from ort_backend.runtime import capabilities, cuda
from ort_backend.runtime.session import Program, Session, SessionConfig

ROOT = Path(__file__).resolve().parents[2]
CUDA = "CUDAExecutionProvider"
WHY = "libcublasLt|no CUDA-capable" if CUDA in ort.get_available_providers() else "this build has"

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the provider may be loaded here")


@without_cuda
def test_nothing_is_asked_of_a_provider_that_cannot_be_loaded() -> None:
    with pytest.raises(EnvironmentProblem, match=f"makes no session on the {CUDA}: .*({WHY})"):
        capabilities.target(CUDA, 18)


@without_cuda
def test_a_compile_says_so() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    with pytest.raises(Exception, match=f"makes no session on the {CUDA}"):
        torch.compile(module, backend="ort_training", options={"provider": CUDA})(torch.randn(2, 4))


@without_cuda
def test_a_session_on_the_cpu_is_not_taken_for_one_on_the_device() -> None:
    import onnx_ir as ir

    x, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4])) for name in "xy")
    model = ir.Model(ir.Graph([x], [y], nodes=[ir.Node("", "Relu", [x], outputs=[y])], opset_imports={"": 18}), ir_version=9)
    with pytest.raises(EnvironmentProblem, match=f"makes no session on the {CUDA}"):
        Session(Program.of(model, CUDA), SessionConfig(provider=CUDA), ())


CODE = """
import torch, ort_backend
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
compiled = torch.compile(model, backend="ort_training", options={"provider": "CUDAExecutionProvider"})
try:
    compiled(torch.randn(3, 8)).sum().backward()
except Exception as error:
    print(type(error).__name__)
print([(graph.sessions, graph.from_cache) for graph in ort_backend.report().graphs])
"""


@without_cuda
def test_the_cache_keeps_nothing_of_it(over_stand_in: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    own = {**os.environ, **cache, "OMP_NUM_THREADS": "1"}
    without = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    assert without.stdout.splitlines()[-2:] == ["BackendCompilerFailed", "[]"], without.stdout
    assert over_stand_in(CODE, **cache).stdout.splitlines()[-1] == "[(1, False)]"


def test_an_option_that_the_provider_refuses_is_an_error(over_stand_in: Callable[..., object]) -> None:
    """Of the device, which 1.19 takes the CPU for."""
    over_stand_in("""
import torch, ort_backend
options = {"provider": "CUDAExecutionProvider", "provider_options": {"nonsense": "1"}}
try:
    torch.compile(torch.nn.Linear(4, 4), backend="ort_training", options=options)(torch.randn(2, 4))
except Exception as error:
    assert "makes no session on the CUDAExecutionProvider" in str(error), error
else:
    raise AssertionError
""")


def test_sessions_are_made_and_ended_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider changes PyTorch's current device, which is restored around that."""
    current, seen = [0], []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    class Made:
        def __init__(self, *args: Any, **settings: Any) -> None:
            seen.append(("made", current[0]))

        def get_providers(self) -> list[str]:
            return [cuda.PROVIDER]

        def __del__(self) -> None:
            seen.append(("ended", current[0]))

    monkeypatch.setattr(cuda, "device", device)
    monkeypatch.setattr(cuda, "finish", lambda index: seen.append(("waited for", index)))
    monkeypatch.setattr("onnxruntime.InferenceSession", Made)
    capabilities.check_provider.__wrapped__(cuda.PROVIDER, 1)
    assert seen == [("made", 1), ("ended", 1)]
    one = Session.__new__(Session)
    one.on_cuda, one._config, one._open = True, SessionConfig(provider=cuda.PROVIDER, device=2), Made()  # type: ignore[assignment]
    one.close()
    assert seen[2:] == [("made", 0), ("waited for", 2), ("ended", 2)]


@pytest.fixture
def gpu_smoke(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`tools/gpu_smoke.py`, which is not run as a part of a package."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("gpu_smoke")


def test_a_case_of_the_smoke_test_needs_sessions(gpu_smoke: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that ran in PyTorch has eager's gradients."""
    monkeypatch.setattr(capabilities, "has_kernel", lambda node, **where: False)
    name, make, autocast, tolerance = gpu_smoke.CASES[0]
    found = gpu_smoke.run(make, autocast, tolerance, "cpu", "")
    assert found["worst"] <= tolerance and not found["right"] and "aten::addmm" in found["unexpected"], (name, found)


def test_later_cases_of_the_smoke_test_are_compiled_too(gpu_smoke: ModuleType) -> None:
    """Though they share code with more of them than Dynamo compiles it for."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for name, make, autocast, tolerance in gpu_smoke.CASES[1:3]:
            assert gpu_smoke.run(make, autocast, tolerance, "cpu", "")["right"], name


def test_a_side_stream_waits_for_model_and_input(gpu_smoke: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=waited.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "current")
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    name, make, autocast, tolerance = gpu_smoke.CASES[0]
    assert gpu_smoke.run(make, autocast, tolerance, "cpu", "side stream")["right"] and waited == ["current"], name
