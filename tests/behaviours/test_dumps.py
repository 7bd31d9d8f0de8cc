"""`dump_dir` gets, for every graph, files that can be read, checked and run again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from behaviours.check import WHOLE_GRAPHS, call, compiled, on_ort, refused, same_as_eager, single_session
from default_device import seeded
from torch import nn

import ort_backend

X = torch.randn(4, 3, generator=seeded(0)).requires_grad_()
ENDINGS = ["fx.txt", "onnx", "optimized.onnx", "repro.pt", "repro.py"]
HALVES = [f"{half}.{ending}" for half in ("backward", "forward") for ending in ENDINGS[:3]]
TRAINING = ENDINGS if WHOLE_GRAPHS else sorted([*HALVES, "fx.txt", "repro.pt", "repro.py"])


class Model(nn.Module):
    """A constant, a buffer, parameters and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.linear.bias.requires_grad_(False)  # in front of the norm its gradient is nothing but rounding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x))) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def _files(folder: Path, name: str) -> list[str]:
    return sorted(path.name.removeprefix(f"{name}.") for path in folder.iterdir() if path.name.startswith(f"{name}."))


def test_every_graph_leaves_its_files_once(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    ran = same_as_eager(Model(), call(X), graphs=1, options={"dump_dir": folder})
    assert _files(folder, ran.graphs[0].name) == TRAINING
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    ran = same_as_eager(Model().eval(), call(X), call(X.detach()), graphs=2, repeat=3, options={"dump_dir": str(folder)})
    assert all(_files(folder, graph.name) == TRAINING for graph in ran.graphs)
    assert len(list(folder.iterdir())) == 3 * len(TRAINING)
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    same_as_eager(nn.Linear(3, 2), call(X), graphs=1)
    assert list(tmp_path.iterdir()) == []


def test_the_onnx_files_are_sound_and_name_the_users_lines(tmp_path: Path) -> None:
    with torch.no_grad():
        ran = same_as_eager(Model().eval(), call(X.detach()), graphs=1, train=False, options={"dump_dir": tmp_path})
    name = ran.graphs[0].name
    model = onnx.load(tmp_path / f"{name}.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert len(model.graph.node) == ran.graphs[0].onnx_nodes
    traces = [entry.value for node in model.graph.node for entry in node.metadata_props if entry.key == "stack_trace"]
    assert any("test_dumps.py" in trace and "torch.tensor([1.0, 2.0" in trace for trace in traces)
    assert onnx.load(tmp_path / f"{name}.optimized.onnx").graph.node
    text = (tmp_path / f"{name}.fx.txt").read_text()
    assert "torch.ops.aten" in text and "f32[4, 3]" in text


@single_session
def test_a_training_graph_has_one_yield(tmp_path: Path) -> None:
    ran = same_as_eager(Model(), call(X), graphs=1, options={"dump_dir": tmp_path})
    model = onnx.load(tmp_path / f"{ran.graphs[0].name}.onnx")
    assert [node.op_type for node in model.graph.node].count("YieldOp") == 1
    assert all(value.type.tensor_type.elem_type for value in model.graph.value_info)


@pytest.mark.parametrize("kind", ["training", "inference", "dynamic"])
def test_the_repro_script_runs(tmp_path: Path, kind: str) -> None:
    with on_ort(graphs=1, idle=True) as ran:
        step = compiled(Model().train(kind != "inference"), dynamic=kind == "dynamic", options={"dump_dir": tmp_path})
        with torch.set_grad_enabled(kind != "inference"):
            step(X)
    script = tmp_path / f"{ran.graphs[0].name}.repro.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "equal eager's" in done.stdout


def test_a_directory_that_cannot_be_written_to_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root may write anywhere
    with refused(ort_backend.OptionError, "option 'dump_dir'.*cannot be written to: .*Permission denied"):
        compiled(torch.sin, options={"dump_dir": str(tmp_path)})(X)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(ort_backend.OptionError, "dump_dir.*cannot be made"):
        compiled(nn.Linear(3, 2), options={"dump_dir": str(tmp_path / "file" / "below")})(X)


def test_pytorchs_debugging_writes_the_files_where_it_writes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        ran = same_as_eager(Model(), call(X), graphs=1)
        (folder,) = tmp_path.glob("run_*/ort_training")
        assert _files(folder, ran.graphs[0].name) == TRAINING


def test_pytorchs_log_of_compiles_has_the_graph(fresh_process: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """As text, for `tlparse`, and what lowering and sessions took, as `compile_times` has it."""
    code = """
import torch
from torch import nn
compiled = torch.compile(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), backend="ort_training")
compiled(torch.randn(2, 4)).sum().backward()
print(torch._dynamo.utils.compile_times())
"""
    done = fresh_process(code, TORCH_TRACE=str(tmp_path / "trace"))
    assert done.returncode == 0, done.stderr
    assert {"ort_training.lowering", "ort_training.session"} <= {line.split(",")[0] for line in done.stdout.splitlines()}
    (log,) = (tmp_path / "trace").iterdir()
    text = log.read_text(encoding="utf-8")
    assert '{"artifact": {"name": "ort_training_graph_' in text and "= Tanh" in text and '"ort_training.lowering"' in text
