"""A cheap part of the zoo trains on ONNX Runtime as in eager PyTorch; its command line reports what is wrong and what is broken."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import zoo, zoo_process, zoo_step
from benchmarks.zoo_models import WORKLOADS, Workload
from benchmarks.zoo_models.workload import Loss, labels
from ort_backend.runtime import capabilities

# The families of the 128 training workloads that the operators were counted in, as this zoo calls them.
FAMILIES = {
    "hf (encoders)": "transformers: encoders",
    "hf (decoders)": "transformers: decoders",
    "hf (encoder-decoders)": "transformers: encoder-decoders",
    "hf (vision)": "transformers: vision",
    "hf (audio)": "transformers: audio",
    "hf (CLIP)": "transformers: multimodal",
    "hf (time series)": "transformers: time series",
    "timm": "timm",
    "cnn": "convolutional",
    "gen": "generative",
    "gnn": "graph",
    "mlp": "dense",
    "nn (recurrent)": "recurrent",
    "nn (transformers)": "attention",
    "rec": "recommender",
    "rl": "reinforcement learning",
    "sci": "scientific",
    "seq": "sequence",
    "amp, pure_bf16": "lower precision",
    "py": "programs",
}
# One a family, those that compile fast.
CHEAP = ("mlp", "vae", "residual", "rnn", "attention_masked", "graph_attention", "double_dqn", "deep_fm", "in_place", "mlp_bf16", "opt")
PYTHON_OPS = dict.fromkeys(CHEAP, 0)
# The slowest to compile, with others of their kind beside them: `python -m benchmarks.zoo` runs them, with either package.
SLOW = {"autoformer", "informer", "cvt", "segformer", "levit", "mobilenet_v1", "mobilenet_v2", "regnet", "swinv2"}
SLOW |= {"mamba", "hubert", "wav2vec2", "time_series_transformer", "vilt"}
# Without training kernels every other workload runs here, its first size: each compiles to sessions of its own there.
PLAIN = () if capabilities.has_training() else tuple(name for name in WORKLOADS if name not in SLOW)


def test_every_family_is_in_the_zoo() -> None:
    assert len(WORKLOADS) >= 60 and set(WORKLOADS) >= SLOW
    families = {one.family for one in WORKLOADS.values()}
    assert set(FAMILIES.values()) <= families
    assert len([one for one in WORKLOADS.values() if not zoo_step.missing(one)]) >= 60, "too many need packages that are not installed"


@pytest.mark.parametrize("name", CHEAP)
def test_a_workload_equals_eager_on_onnx_runtime(name: str) -> None:
    result = zoo_step.compare(WORKLOADS[name])
    assert [call.problems for call in result.calls] == [(), (), ()]
    first, second, third = result.calls
    assert first.compiles > 0 and second.compiles > 0 and third.compiles == 0, "the third call runs what the second one compiled"
    assert first.nodes > 0 and second.nodes > 0
    assert sum(sum(call.python_ops.values()) for call in result.calls) == PYTHON_OPS[name]


@pytest.mark.parametrize("name", PLAIN)
def test_a_workload_equals_eager_without_training_kernels(name: str) -> None:
    result = zoo_step.compare(WORKLOADS[name], "static")
    if result.skipped:
        pytest.skip(result.skipped)
    (call,) = result.calls
    assert call.problems == ()
    assert call.compiles > 0 and call.nodes > 0


class Drifting(nn.Module):
    """Another result, another gradient, and another buffer each time it is copied."""

    copies = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)
        self.register_buffer("seen", torch.zeros(3))

    def __deepcopy__(self, memo: dict[int, object]) -> Drifting:
        other = Drifting()
        other.layer.weight.data = self.layer.weight.data * 1.001
        other.layer.bias.data = self.layer.bias.data.clone()
        other.seen.add_(1.0)
        return other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_step, "ROUNDINGS", 0)  # whose copies would drift as well
    made = Workload("drifting", "test", lambda: (Loss(Drifting()), lambda b, _: {"input": torch.randn(b, 12), "target": labels(b)}))
    (call,) = zoo_step.compare(made, "static").calls
    named = [problem.partition(":")[0] for problem in call.problems]
    assert named == ["loss", "gradient network.layer.weight", "gradient network.layer.bias", "buffer network.seen"]


@pytest.mark.parametrize(("at_the_kink", "left"), [(True, 0), (False, 1)])
def test_a_difference_counts_unless_rounding_makes_it_in_eager_too(at_the_kink: bool, left: int) -> None:
    """At a kink of ReLU the gradient of one neuron is there or not, as rounding decides."""

    class Neuron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 1.0))

        def forward(self) -> torch.Tensor:
            return (self.weight - (1.0 if at_the_kink else 0.5)).relu().sum()

    def step(module: nn.Module) -> None:
        module.zero_grad()
        module().backward()

    own, eager = Neuron(), Neuron()
    step(eager)
    assert eager.weight.grad is not None
    own.weight.grad = 1 - eager.weight.grad
    problems = zoo_step._gradient_problems(own, eager, 1e-3)
    assert len(problems) == 1
    assert len(zoo_step._beyond_rounding(problems, own, eager, Neuron(), step)) == left


def test_eager_does_not_pass_for_onnx_runtime() -> None:
    class Uncompiled(nn.Module):
        """Never captured."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 5)

        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    made = Workload("uncompiled", "test", lambda: (Uncompiled(), lambda b, _: {"x": torch.randn(b, 12)}))
    (call,) = zoo_step.compare(made, "static").calls
    assert call.problems == ("no training graph ran forward and backward on ONNX Runtime",)


def test_a_process_that_ends_is_broken() -> None:
    assert zoo_process.isolated(os.abort) == (None, "the process ended: SIGABRT")
    result, problem = zoo_process.isolated(sys.exit)
    assert result is None and problem.startswith("the process ended")


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert zoo.main(["--only", "mlp", "--static", "--json", str(tmp_path / "zoo.json")]) == 0
    ((result),) = json.loads((tmp_path / "zoo.json").read_text())
    assert result["name"] == "mlp" and len(result["calls"]) == 1 and result["calls"][0]["nodes"] > 0
    assert "mlp" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no workload"):
        zoo.main(["--only", "nothing_of_the_kind"])
