"""The choice of kernels for a CUDA device, from shapes and dtypes alone: nothing runs on one here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from ort_backend.lowering.kernels.device_kernels import faster_on_device
from ort_backend.lowering.passes.cheap import cheap_again

aten = torch.ops.aten
FLOAT, HALF = torch.float32, torch.bfloat16
LARGE, SMALL = (8192, 3072), (16, 3072)


def _call(target: Any, shape: tuple[int, ...], of: torch.dtype, *rest: Any, result: torch.dtype | None = None, **keywords: Any) -> fx.Node:
    """A call whose first argument and result have this shape. They have no memory: what is on no CPU counts as on a device."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(shape, dtype=of, device="meta")
    node = graph.call_function(target, (x, *rest), keywords)
    node.meta["val"] = torch.empty(shape, dtype=result or of, device="meta")
    return node


@pytest.mark.parametrize(
    ("node", "is_pytorchs"),
    [
        (_call(aten.gelu.default, SMALL, HALF), True),
        (_call(aten.gelu.default, LARGE, FLOAT), False),
        (_call(aten.nll_loss_forward.default, SMALL, FLOAT), True),
        (_call(aten.sum.dim_IntList, LARGE, FLOAT, [0]), True),
        (_call(aten.sum.dim_IntList, SMALL, FLOAT, [0]), False),
        (_call(aten.sum.dim_IntList, (1024, 3072), HALF, [0], result=FLOAT, dtype=FLOAT), True),
        (_call(aten.sum.dim_IntList, (1024, 3072), HALF, [0]), False),
        (_call(aten.sum.dim_IntList, SMALL, HALF, [0], result=FLOAT, dtype=FLOAT), False),
        (_call(aten.addmm.default, LARGE, HALF), True),
        (_call(aten.addmm.default, LARGE, FLOAT), False),
        (_call(aten.mul.Tensor, LARGE, HALF), False),
        (_call(aten.gelu.default, LARGE, torch.complex64), False),
    ],
    ids=str,
)
def test_large_tensors_and_many_nodes(node: fx.Node, is_pytorchs: bool) -> None:
    assert (faster_on_device(node) is not None) is is_pytorchs


@pytest.mark.parametrize(("device", "dtype", "count"), [("cpu", FLOAT, 1), ("cpu", HALF, 0), ("meta", FLOAT, 0)])
def test_nothing_is_computed_again_on_a_device_nor_exponentials_in_half_precision_unless_asked_for(
    device: str, dtype: torch.dtype, count: int
) -> None:
    graph = fx.Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangents_1")
    gelu = graph.call_function(aten.gelu.default, (x,))
    result = graph.call_function(aten.cos.default, (gelu,))
    gradient = graph.call_function(aten.gelu_backward.default, (graph.call_function(aten.mul.Tensor, (tangent, gelu)), x))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2048, 1024, dtype=dtype, device=device)
    graph.output([result, gradient])
    assert cheap_again(graph, {x, gelu, result}, [result]) == {gelu.name for _ in range(count)}
