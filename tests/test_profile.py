"""Where a step's time goes: the profiles of sessions, and what `ort_backend.profile` reads in them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from behaviours.check import compiled, single_session
from default_device import ON_CPU
from torch import nn

from ort_backend import profile
from ort_backend.runtime import profiling

pytestmark = pytest.mark.skipif(not ON_CPU, reason="about kernels on the CPU")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)  # FIRST
        return hidden.sin().softmax(-1)  # SECOND


class _Inverse(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.layer(x) + 9 * torch.eye(8))


def _line(mark: str) -> str:
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"test_profile.py:{next(i for i, line in enumerate(text, 1) if line.endswith(f'# {mark}'))}"


def _recorded(model: nn.Module, folder: Path, *inputs: torch.Tensor) -> list[str]:
    profiling.end_profiles()  # of other tests' sessions
    settings = {"session_options": {"enable_profiling": True, "profile_file_prefix": str(folder / "profile")}}
    run = compiled(model, options=settings)
    for _ in range(3):
        run(*inputs).square().mean().backward()
    return profile.end()


def test_lines_and_operators(tmp_path: Path) -> None:
    paths = _recorded(_Model(), tmp_path, torch.randn(16, 8))
    assert paths and all(Path(path).parent == tmp_path for path in paths)
    found = profile.read(paths)
    for mark in ("FIRST", "SECOND"):
        (cost,) = (one for one in found.lines if one.name.endswith(_line(mark)))
        assert cost.forward > 0 and cost.backward > 0 and cost.nodes > 1
    by_operator = {cost.name: cost for cost in found.operators}
    assert by_operator["Gemm"].forward > 0 and by_operator["Gemm"].backward > 0
    assert sum(cost.total for cost in found.operators) == pytest.approx(found.total)
    assert sum(cost.total for cost in found.lines) == pytest.approx(found.total)
    assert list(found.lines) == sorted(found.lines, key=lambda cost: -cost.total)
    assert _line("FIRST") in str(found) and "Gemm" in str(found)


@single_session
def test_what_pytorch_runs_has_its_name(tmp_path: Path) -> None:
    """Between sessions it is in no profile of theirs."""
    found = profile.read(_recorded(_Inverse(), tmp_path, torch.randn(8, 8)))
    assert "aten::linalg_inv_ex" in {cost.name for cost in found.operators}


def test_a_profile_ends_once(tmp_path: Path) -> None:
    model = _Model()
    assert _recorded(model, tmp_path, torch.randn(16, 8))
    assert profile.end() == []


def test_a_loop_counts_once(tmp_path: Path) -> None:
    class Layer(nn.GRU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    with torch._dynamo.config.patch(allow_rnn=True):
        paths = _recorded(Layer(8, 16), tmp_path, torch.randn(20, 4, 8))
    events = [event for path in paths for event in json.loads(Path(path).read_text(encoding="utf-8")) if event["cat"] == "Node"]
    loops = [event for event in events if event["name"].startswith("Scan") and event["name"].endswith("kernel_time")]
    assert loops, "the layer is no Scan: this test needs another one"
    inside = [one for one in events if any(loop["ts"] <= one["ts"] < loop["ts"] + loop["dur"] for loop in loops) and one not in loops]
    assert inside
    operators = {cost.name for cost in profile.read(paths).operators}
    assert "Scan" in operators and "Tanh" not in operators


def test_written_at_the_end_of_the_process(fresh_process: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    code = """
import sys
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
options = {"session_options": {"enable_profiling": True, "profile_file_prefix": sys.argv[1]}}
compiled = torch.compile(model, backend="ort_training", options=options)
for _ in range(2):
    compiled(torch.randn(4, 8)).sum().backward()
"""
    done = fresh_process(code, str(tmp_path / "profile"))
    assert done.returncode == 0, done.stderr
    paths = sorted(tmp_path.glob("profile*.json"))
    assert paths and profile.read(paths).total > 0
    assert profile.main([*map(str, paths), "--top", "1"]) == 0


@pytest.mark.parametrize(
    ("text", "message"), [("", "is empty: a session writes"), ("[\n{", "no complete profile"), ('{"a": 1}', "no complete profile")]
)
def test_what_is_no_profile(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        profile.read([path])
    assert profile.main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile.main(["no/such/file.json"]) == 2
    assert "no/such/file.json" in capsys.readouterr().err
