"""Dropout as PyTorch computes it on CUDA: by a fused kernel, whose mask depends on its input's layout and dtype. Nothing here needs a GPU."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ort_backend.lowering import registry
from ort_backend.lowering.passes.hoist_random import hoist
from ort_backend.target import OrtTarget

aten = torch.ops.aten


def _dropout(p: float, dtype: torch.dtype) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    dropped = graph.call_function(aten.native_dropout.default, (x, p, True))
    out = graph.call_function(operator.getitem, (dropped, 0))
    graph.output((out,))
    with FakeTensorMode():
        fake, mask = (torch.empty(6, 4, dtype=kind, device="cuda").t() for kind in (dtype, torch.bool))
    x.meta["val"], dropped.meta["val"], out.meta["val"] = fake, (fake, mask), fake
    return graph


def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tensors that are asked for from here on, which are made on the CPU."""
    asked: list[Any] = []
    empty: Callable[..., torch.Tensor] = torch.empty_strided

    def made(size: Any, stride: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append((tuple(size), tuple(stride), dtype, device.type))
        return empty(size, stride, dtype=dtype)

    monkeypatch.setattr(torch, "empty_strided", made)
    return asked


def test_the_mask_is_that_of_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _dropout(0.3, torch.float16)
    made = _on_the_cpu(monkeypatch)
    (draw,) = hoist(graph).draws
    torch.manual_seed(3)
    mask = draw(())
    torch.manual_seed(3)
    assert torch.equal(mask, aten.native_dropout(torch.empty(6, 4, dtype=torch.float16).t(), 0.3, True)[1])
    assert made == [((4, 6), (1, 4), torch.float16, "cuda")]


def test_everything_dropped_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _dropout(1.0, torch.float16)
    _on_the_cpu(monkeypatch)
    (draw,) = hoist(graph).draws
    before = torch.get_rng_state()
    assert not draw(()).any() and torch.equal(torch.get_rng_state(), before)


def test_the_scale_is_not_rounded_to_the_tensors_dtype() -> None:
    graph = _dropout(0.1, torch.bfloat16)
    hoist(graph)
    (product,) = (node for node in graph.nodes if node.target is aten.native_dropout_backward.default)
    assert product.args[2] == 1.0 / (1.0 - 0.1)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_half_products_are_made_in_float32(dtype: ir.DataType) -> None:
    target = dataclasses.replace(OrtTarget(), provider="CUDAExecutionProvider")
    lowering = next(registry.find(aten.native_dropout_backward.default, target))
    assert lowering.device == "cuda"

    class Builder:
        written: list[str] = []

        def __getattr__(self, name: str) -> Callable[..., ir.Value]:
            def write(*inputs: Any, **attributes: Any) -> ir.Value:
                self.written.append(f"{name} {attributes.get('to', '')}".strip())
                kind = attributes.get("to") or inputs[0].dtype
                return ir.Value(name="v", type=ir.TensorType(kind))

            return write

    op, grad, mask = Builder(), *(ir.Value(name=name, type=ir.TensorType(kind)) for name, kind in (("g", dtype), ("m", ir.DataType.BOOL)))
    assert lowering.function(op, grad, mask, 1 / 0.9).dtype == dtype
    assert op.written == ["Cast FLOAT", "Mul", "Cast FLOAT", "Mul", f"Cast {dtype.name}"]
