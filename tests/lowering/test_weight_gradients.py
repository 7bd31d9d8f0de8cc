"""Products with a transposed left side: a transpose in front of a plain product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn, randn
from torch.fx.experimental.proxy_tensor import make_fx

from ort_backend.lowering.ops.matmul import PLAIN_MM
from ort_backend.lowering.passes.weight_gradients import transpose_first
from ort_backend.runtime import capabilities
from ort_backend.target import OrtTarget

aten = torch.ops.aten
Function = Callable[..., torch.Tensor]


def _rewritten(function: Function, *inputs: torch.Tensor, target: OrtTarget = OrtTarget()) -> list[Any]:  # noqa: B008 - a frozen value
    """The operators behind the pass, views left out; the rewritten graph is compared with the function."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    transpose_first(traced.graph, target)
    traced.graph.lint()
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), function(*inputs), rtol=1e-4, atol=1e-3)
    return [node.target for node in traced.graph.nodes if node.op == "call_function" and node.target is not aten.detach.default]


@pytest.mark.parametrize(
    "transposed",
    [lambda grad: grad.t(), lambda grad: grad.transpose(0, 1), lambda grad: grad.transpose(-1, 0), lambda grad: grad.permute(1, 0)],
    ids=["t", "transpose", "from the end", "permute"],
)
def test_the_smaller_side_is_transposed(transposed: Function) -> None:
    narrow = _rewritten(lambda grad, input: torch.mm(transposed(grad), input), randn(256, 64), randn(256, 256))
    assert narrow[1:] == [PLAIN_MM]
    wide = _rewritten(lambda grad, input: torch.mm(transposed(grad), input), randn(256, 512), randn(256, 32))
    assert wide[1:] == [aten.t.default, PLAIN_MM, aten.t.default]


@pytest.mark.parametrize(
    "function, inputs",
    [
        (lambda a, b: torch.mm(a.t(), b), (randn(16, 16), randn(16, 16))),
        (lambda a, b: torch.mm(a, b), (randn(128, 256), randn(256, 128))),
        (lambda a, b: torch.mm(a, b.t()), (randn(128, 256), randn(128, 256))),
        (lambda a, b: torch.mm(a.t(), b.t()), (randn(256, 128), randn(128, 256))),
        (lambda a, b: torch.mm(a.t(), b), (randn(256, 128).double(), randn(256, 128).double())),
        (lambda a, b: torch.mm(a.transpose(0, 0), b), (randn(128, 256), randn(256, 128))),
        (lambda a, b: torch.bmm(a.transpose(1, 2), b), (randn(2, 256, 128), randn(2, 256, 128))),
    ],
    ids=["small", "plain", "right side", "both sides", "float64", "no transpose", "batched"],
)
def test_other_products_stay(function: Function, inputs: tuple[torch.Tensor, ...]) -> None:
    assert PLAIN_MM not in _rewritten(function, *inputs)


def test_products_of_a_gpu_stay() -> None:
    """cuBLAS takes transposed sides as they are."""
    target = OrtTarget(provider="CUDAExecutionProvider")
    assert PLAIN_MM not in _rewritten(lambda a, b: torch.mm(a.t(), b), randn(256, 128), randn(256, 128), target=target)


@pytest.mark.parametrize("outputs", [64, 1024], ids=["narrow", "wide"])
def test_onnx_runtime_leaves_the_transpose_where_it_is(outputs: int, tmp_path: Path) -> None:
    """Its own optimizers would take it into the product again."""
    layer, input = nn.Linear(96, outputs), randn(512, 96)
    saved = tmp_path / "optimized.onnx"
    compiled = torch.compile(layer, backend="ort_training", options={"session_options": {"optimized_model_filepath": str(saved)}})
    found = torch.autograd.grad(compiled(input).square().sum(), list(layer.parameters()))
    expected = torch.autograd.grad(layer(input).square().sum(), list(layer.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    if not capabilities.has_training():
        return  # several sessions write the one file
    nodes = onnx.load(saved).graph.node
    products = [node for node in nodes if node.op_type in ("Gemm", "FusedMatMul")]
    assert not any(attribute.i for node in products for attribute in node.attribute if attribute.name == "transA")
    assert sum(node.op_type == "Transpose" for node in nodes) == (1 if outputs == 64 else 2)
