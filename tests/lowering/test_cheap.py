"""What the backward computes again unasked: cheap results of what it reads anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from behaviours.check import single_session
from default_device import random_state, seeded
from torch import nn

import ort_backend
import ort_backend.graph_report

pytestmark = pytest.mark.cpu_only(reason="on a device nothing is computed again unasked")

ROWS, WIDTH = 2048, 128
_ACTIVATION = ROWS * WIDTH * 4  # bytes


class Mlp(nn.Module):
    """As transformers have it, with dropout inside."""

    def __init__(self, activation: nn.Module, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation, self.dropout = activation, nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.dropout(self.activation(self.wide(self.norm(x)))))


class Gated(nn.Module):
    """Llama's perceptron: a SiLU times another product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class HandsOut(Mlp):
    """The user holds the GELU's result: computing it again frees nothing."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden = self.activation(self.wide(self.norm(x)))
        return self.narrow(hidden), hidden


def _step(call: Any, net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    x.grad = None
    results = call(x)
    results = results if isinstance(results, tuple) else (results,)
    sum(result.square().mean() for result in results).backward()
    return [*(result.detach() for result in results), x.grad, *(p.grad for p in net.parameters()), random_state()]  # type: ignore[list-item]


def _compiled(net: nn.Module, *, rows: int = ROWS, **options: Any) -> ort_backend.graph_report.GraphReport:
    """The report of a step that was compared with eager's: results, gradients, and the generator's state."""
    x = torch.randn(rows, WIDTH, generator=seeded(0), requires_grad=True)
    expected = [value.clone() for value in _step(net, net, x)]
    compiled = torch.compile(net, backend="ort_training", fullgraph=True, options=options)
    for got, want in zip(_step(compiled, net, x), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    return ort_backend.report().graphs[-1]


@pytest.mark.parametrize("kernels", ["onnxruntime", "measured"])
@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU()], ids=["gelu", "silu"])
def test_of_a_perceptron_only_the_hidden_product_is_kept(activation: nn.Module, kernels: str) -> None:
    graph = _compiled(Mlp(activation), kernels=kernels)
    statistics = 2 * ROWS * 4  # of the LayerNorm
    assert 4 * _ACTIVATION <= graph.kept_bytes <= 4 * _ACTIVATION + statistics


@single_session
def test_of_a_small_graph_all_is_kept() -> None:
    """The results of the LayerNorm and of the GELU are a few rows less than what is worth the time."""
    rows = ROWS * 4 // 5 - 1
    kept = _compiled(Mlp(nn.GELU()), rows=rows).kept_bytes
    assert kept >= rows * WIDTH * 4 * (1 + 4 + 4)


def test_of_a_gated_perceptron_both_products_are_kept() -> None:
    assert _compiled(Gated()).kept_bytes == 8 * _ACTIVATION


@single_session
@pytest.mark.parametrize("kernels", ["onnxruntime", "measured"])
def test_a_mask_is_drawn_once(kernels: str) -> None:
    torch.manual_seed(0)
    graph = _compiled(Mlp(nn.GELU(), p=0.3), kernels=kernels)
    assert graph.kept_bytes < 5 * _ACTIVATION  # the mask came from outside, it is not a node's result


@single_session
def test_what_the_user_holds_is_not_computed_again(tmp_path: Path) -> None:
    _compiled(HandsOut(nn.GELU()), rows=4 * ROWS, kernels="onnxruntime", dump_dir=str(tmp_path))
    assert _behind_yield(tmp_path).count("LayerNormalization") == 1
    assert _behind_yield(tmp_path).count("Gelu") == 0


@single_session
def test_onnx_runtime_does_not_merge_them(tmp_path: Path) -> None:
    _compiled(Mlp(nn.GELU()), kernels="onnxruntime", dump_dir=str(tmp_path))
    assert _behind_yield(tmp_path).count("LayerNormalization") == 1
    assert _behind_yield(tmp_path).count("Gelu") == 1


def test_small_tensors_are_kept(tmp_path: Path) -> None:
    net = Mlp(nn.GELU())
    compiled = torch.compile(net, backend="ort_training", options={"kernels": "onnxruntime", "dump_dir": str(tmp_path)})
    compiled(torch.randn(8, WIDTH)).sum().backward()
    assert not {"LayerNormalization", "Gelu"} & set(_behind_yield(tmp_path))


def _behind_yield(folder: Path) -> list[str]:
    """Operators of the optimized graph that depend on a tangent."""
    graph = onnx.load(next(folder.rglob("*optimized*.onnx"))).graph
    behind: set[str] = set()
    found = []
    for node in graph.node:
        if node.op_type == "YieldOp" or not behind.isdisjoint(node.input):
            behind.update(node.output)
            found.append(node.op_type)
    return found
