"""Calls of PyTorch in half precision on the CPU: several of them as one node of the graph."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from behaviours.check import single_session
from torch import nn
from torch._functorch import config as functorch_config

import ort_backend
from ort_backend.lowering.kernels import dense_products

pytestmark = [single_session, pytest.mark.cpu_only(reason="on a device all calls are merged (test_merged_calls)")]

ROWS, WIDTH = 256, 512


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _step(call: nn.Module, net: nn.Module, x: torch.Tensor, dtype: torch.dtype | None) -> list[torch.Tensor]:
    net.zero_grad()
    x.grad = None
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = call(x)
    y.float().square().mean().backward()
    return [y.detach().float(), *(one.grad for one in (x, *net.parameters()))]  # type: ignore[list-item]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype, is_merged", [(torch.bfloat16, True), (None, False)])
def test_calls_become_fewer_nodes(dtype: torch.dtype | None, is_merged: bool, dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_products, "processor_multiplies_bfloat16", lambda: True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, options, before = Perceptron(), {"dump_dir": str(tmp_path)}, len(ort_backend.report().graphs)
    compiled = torch.compile(net, backend="ort_training", fullgraph=True, dynamic=dynamic, options=options)
    for rows in (ROWS, ROWS + 64 * dynamic):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        wanted, found = (_step(call, net, x, dtype) for call in (net, compiled))
        for got, want in zip(found, wanted, strict=True):
            assert (got - want).norm() <= 2e-2 * want.norm()
    report = ort_backend.report()
    assert len(report.graphs) == before + 1
    calls = sum(one.count for one in report.graphs[-1].outside)
    nodes = [
        node for path in tmp_path.rglob("*.onnx") if "optimized" not in path.name for node in onnx.load(path).graph.node if node.op_type == "ATen"
    ]
    assert calls > 12 if is_merged else calls == len(nodes)
    assert not is_merged or 4 <= len(nodes) <= 0.6 * calls


def test_a_merged_graph_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_products, "processor_multiplies_bfloat16", lambda: True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    net, x = Perceptron(), torch.randn(ROWS, WIDTH, requires_grad=True)
    wanted = _step(net, net, x, torch.bfloat16)
    for is_cached in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(net, backend="ort_training", fullgraph=True)
        with functorch_config.patch(enable_autograd_cache=True):
            found = _step(compiled, net, x, torch.bfloat16)  # type: ignore[arg-type]
        for got, want in zip(found, wanted, strict=True):
            assert (got - want).norm() <= 2e-2 * want.norm()
        assert ort_backend.report().graphs[-1].from_cache is is_cached
