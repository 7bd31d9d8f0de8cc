"""Gradients of biases under autocast: not rounded to half precision on the way to a float32 parameter, but where somebody reads that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ort_backend.lowering.passes.widened_sums import keep_sums_wide

Function = Callable[[torch.Tensor], object]
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def _kept(function: Function, x: torch.Tensor, name: str = "tangents_1") -> int:
    """How many sums stay float32 where the argument has this name; the rewritten graph is compared with the function."""
    traced = make_fx(function, tracing_mode="fake")(x)
    (argument,) = traced.graph.find_nodes(op="placeholder")
    argument.name = argument.target = name
    count = keep_sums_wide(traced.graph)
    traced.graph.lint()
    traced.recompile()
    torch.testing.assert_close(traced(x), function(x), rtol=1e-2, atol=1e-2)
    return count


@HALF
def test_a_sum_stays_wide(dtype: torch.dtype) -> None:
    x = torch.randn(64, 5).to(dtype)
    assert _kept(lambda x: x.sum(0, True, dtype=torch.float32).view(5).to(dtype).float(), x) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((low := x.sum(0, dtype=torch.float32).bfloat16()).float(), low),
        lambda x: x.float().sum(0, dtype=torch.float32).bfloat16().float(),
        lambda x: x.sum(0, dtype=torch.float32).half().float(),
        lambda x: x.sum(0, dtype=torch.float32).bfloat16().double(),
        lambda x: x.float().exp().bfloat16().float(),
    ],
    ids=["read as it is", "of wide numbers", "to another precision", "to float64", "no sum"],
)
def test_what_was_to_be_rounded_is_rounded(function: Function) -> None:
    assert _kept(function, torch.randn(64, 5).bfloat16()) == 0


def test_a_program_may_round_its_sums() -> None:
    assert _kept(lambda x: x.sum(0, dtype=torch.float32).bfloat16().float(), torch.randn(64, 5).bfloat16(), name="primals_1") == 0

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0, dtype=torch.float32).bfloat16().float()

    x = torch.randn(64, 5).bfloat16().requires_grad_()
    compiled = torch.compile(rounded, backend="ort_training")
    torch.testing.assert_close(compiled(x), rounded(x), rtol=0, atol=0)
