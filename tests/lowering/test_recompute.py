"""Checkpoints and memory budgets: the backward computes activations again, and they are not kept for it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from default_device import seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import ort_backend


class Block(nn.Module):
    """A sigmoid behind a product is what ONNX Runtime fuses in forwards, and must not in backwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.narrow(torch.sigmoid(self.wide(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self, layers: int = 4, width: int = 32, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def _step(call: Any, net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    x.grad = None
    loss = call(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in net.parameters())]


def _kept(net: Net, x: torch.Tensor, **options: Any) -> int:
    """Bytes kept for the backward, by the report; gradients are compared with eager's."""
    expected = [value.clone() for value in _step(net, net, x)]
    compiled = torch.compile(net, backend="ort_training", fullgraph=True, options=options)
    for got, want in zip(_step(compiled, net, x), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    graph = ort_backend.report().graphs[-1]
    assert graph.python_ops == 0
    return graph.kept_bytes


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(16, 32, generator=seeded(0), requires_grad=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_the_inputs_of_its_blocks_only(x: torch.Tensor, reentrant: bool) -> None:
    net = Net(reentrant=reentrant)
    assert _kept(net, x) <= x.nbytes * (len(net.blocks) + 1)
    torch._dynamo.reset()
    net.reentrant = None
    assert _kept(net, x) > 5 * x.nbytes * len(net.blocks)


def test_changing_batches(x: torch.Tensor) -> None:
    net = Net(reentrant=False)
    compiled = torch.compile(net, backend="ort_training", dynamic=True)
    for rows in (16, 24, 5):
        batch = torch.randn(rows, 32, requires_grad=True)
        expected = [value.clone() for value in _step(net, net, batch)]
        for got, want in zip(_step(compiled, net, batch), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_memory_budget(x: torch.Tensor) -> None:
    kept = []
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            kept.append(_kept(Net(), x))
    assert kept[0] > 1.2 * kept[1] > 1.2 * kept[2]


def test_a_memory_budget_beside_an_operator_without_a_result() -> None:
    """`cholesky` has one that raises the errors."""

    def function(points: torch.Tensor) -> torch.Tensor:
        kernel = torch.exp(-(points[:, None] - points[None]).square().sum(-1)) + torch.eye(6)
        return torch.linalg.cholesky(kernel).diagonal().log().sum()

    points = torch.randn(6, 2, requires_grad=True)
    (expected,) = torch.autograd.grad(function(points), points)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        result = torch.compile(function, backend="ort_training", fullgraph=True)(points)
    torch.testing.assert_close(torch.autograd.grad(result, points)[0], expected)
    assert ort_backend.report().graphs[-1].counts.backward == 1


@pytest.mark.parametrize("reentrant", [None, False])
def test_onnx_runtime_does_not_merge_what_is_computed_again(x: torch.Tensor, reentrant: bool | None, tmp_path: Path) -> None:
    net = Net(reentrant=reentrant)
    _kept(net, x, dump_dir=str(tmp_path))
    optimized = [onnx.load(path) for path in tmp_path.rglob("*optimized*.onnx")]
    count = Counter(node.op_type for model in optimized for node in model.graph.node)["LayerNormalization"]
    assert count == len(net.blocks) * (1 if reentrant is None else 2)


_PEAK = """
import re, sys
import torch
sys.path[:0] = ["tests/lowering", "tests"]
from test_recompute import Net

torch.set_num_threads(1)
net = Net(layers=12, width=128, reentrant=[None, False][int(sys.argv[1])])
compiled = torch.compile(net, backend="ort_training")
x = torch.randn(4096, 128, requires_grad=True)


def megabytes(name):  # getrusage would count the process that started this one as well
    with open("/proc/self/status") as file:
        return int(re.search(name + r":\\s*(\\d+)", file.read())[1]) / 1024


before = megabytes("VmRSS")
for _ in range(3):
    compiled(x).backward()
print(megabytes("VmHWM") - before)
"""


# The C library is to return what is freed: its heap's holes, other ones in each process, are up to 150 MB.
_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def test_the_peak_of_memory_is_lower() -> None:
    """Measured (glibc 2.36): 197 MB without checkpoints, 112 with them; with the plain package 223 to 228, and 145 to 151."""
    root = Path(__file__).parents[2]

    def peak(mode: str) -> float:
        command = [sys.executable, "-c", _PEAK, mode]
        run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, env={**os.environ, **_RETURNED})
        return float(run.stdout.splitlines()[-1])

    without, with_checkpoints = peak("0"), peak("1")
    assert with_checkpoints < 0.8 * without, (without, with_checkpoints)


class Convolutional(nn.Module):
    """BatchNorm's running averages change in the forward, and a checkpoint computes it again from its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.behind = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=1)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.behind(self.norm(self.before(x)).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False).square().mean()


def test_a_checkpointed_batch_norm_counts_once() -> None:
    """As under inductor; eager PyTorch counts a second time when it computes the block again."""
    model = Convolutional()
    own = copy.deepcopy(model)
    compiled = torch.compile(own, backend="ort_training", fullgraph=True)
    for seed in range(3):
        x = torch.randn(2, 3, 8, 8, generator=seeded(seed))
        model(x)
        once = {name: value.clone() for name, value in model.norm.state_dict().items()}
        model(x).backward()
        model.norm.load_state_dict(once)
        compiled(x).backward()
        torch.testing.assert_close(own.state_dict(), model.state_dict())
        torch.testing.assert_close([one.grad for one in own.parameters()], [one.grad for one in model.parameters()], rtol=1e-4, atol=1e-6)
