"""`torch.compiler.nested_compile_region`: what it marks is compiled where it is called."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from behaviours.check import call, compiled, on_ort, same_as_eager
from behaviours.operators import Cubed
from default_device import seeded
from torch import nn
from torch.nn import functional as F

from ort_backend.errors import LoweringError
from ort_backend.lowering.tracing.nested_regions import inline_regions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch._higher_order_ops.passes") is None, reason="this torch has no pass that inlines regions"
)
A, B = (torch.randn(4, 6, generator=seeded(seed)).requires_grad_() for seed in (0, 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.norm(self.linear(x)).relu(), 0.3)


def test_blocks_of_a_model() -> None:
    same_as_eager(nn.Sequential(Block(), Block(), nn.Linear(6, 2)), call(A), call(B), graphs=1)


@torch.compiler.nested_compile_region
def _inner(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x.sum()


@torch.compiler.nested_compile_region
def _outer(x: torch.Tensor) -> torch.Tensor:
    a, b = _inner(x)
    return torch.tanh(a) + b


@torch.compiler.nested_compile_region
def _some_rows(x: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
    return x[:count].sin(), count


@torch.compiler.nested_compile_region
def _cubed(x: torch.Tensor) -> torch.Tensor:
    return Cubed.apply(x) + 1


def test_regions_in_regions() -> None:
    same_as_eager(lambda x: _outer(_outer(x)), call(A), call(B), graphs=1)


def test_a_region_with_numbers() -> None:
    same_as_eager(lambda x: _some_rows(x, 2)[0].sum() + _some_rows(x, 3)[0] * _some_rows(x, 3)[1], call(A), graphs=1)


def test_a_function_in_a_region_that_is_called_twice() -> None:
    same_as_eager(lambda x: _cubed(_cubed(x)), call(A), call(B), graphs=1)


def test_a_checkpointed_region() -> None:
    same_as_eager(lambda x: torch.utils.checkpoint.checkpoint(_outer, x, use_reentrant=False), call(A), graphs=1)


def test_a_torch_that_cannot_inline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: _outer(_outer(x)), backend=keep)(A)
    monkeypatch.setitem(sys.modules, "torch._higher_order_ops.passes.inline_invoke_subgraph", None)
    with pytest.raises(LoweringError, match="nested_compile_region: torch .* leave the decorator out"):
        inline_regions(graphs[0])


def test_without_gradients() -> None:
    with torch.no_grad(), on_ort(graphs=1, idle=True):
        torch.testing.assert_close(compiled(lambda x: _outer(_outer(x)))(A), _outer(_outer(A)))
