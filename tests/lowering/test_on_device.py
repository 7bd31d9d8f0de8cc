"""What is lowered otherwise for a CUDA device, since the provider's kernels are wrong there (1.19.2, seen on an H200). Nothing runs here."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.lowered import NotOnOrt
from ort_backend.lowering.tracing.decompositions import table
from ort_backend.runtime import capabilities

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernels, taken for those of a device."""
    target = capabilities.target

    def on_device(*args: Any) -> Any:
        return dataclasses.replace(target(*args), provider="CUDAExecutionProvider", has_kernel=lambda node: True)

    monkeypatch.setattr(capabilities, "target", on_device)


def _lower(function: Any, *inputs: torch.Tensor) -> set[str]:
    """The kinds of the nodes that are written for a function."""
    traced = make_fx(function, decomposition_table=table(), tracing_mode="fake")(*inputs)
    lowering = GraphLowering(dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), python_op=False), "test")
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            lowering.add_input(node, node.name)
    lowering.run(node for node in traced.graph.nodes if node.op in ("call_function", "get_attr"))
    return {node.op_type for node in lowering.graph}


@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d])
def test_poolings_padded_otherwise_behind_are_pytorchs(pool: Any) -> None:
    x = torch.randn(2, 3, 7, 8)
    assert _lower(lambda x: pool(x, 3, 2, 1), x) & {"AveragePool", "MaxPool"}
    with pytest.raises(NotOnOrt, match="more padding behind than in front"):
        _lower(lambda x: pool(x, 3, 2, 1, ceil_mode=True), x)


def test_poolings_to_a_size_have_no_padding() -> None:
    assert "MaxPool" in _lower(lambda x: F.adaptive_max_pool2d(x, 2), torch.randn(2, 3, 4, 6))


def test_sigmoids_keep_their_tail() -> None:
    """The provider's kernel is 0 where a logarithm of it must not be infinite."""
    assert "Sigmoid" not in _lower(torch.sigmoid, torch.randn(2, 3))
    assert "Sigmoid" in _lower(torch.sigmoid, torch.randn(2, 3).half())


@pytest.mark.parametrize("function", [lambda x: x.softmax(1), lambda x: aten._safe_softmax(x, 1)], ids=["softmax", "attention"])
def test_softmax_of_float64_is_of_float64(function: Any) -> None:
    assert "Softmax" in _lower(function, torch.randn(2, 3))
    assert "Softmax" not in _lower(function, torch.randn(2, 3).double())


def test_norms_of_single_elements_are_made_of_primitives() -> None:
    for norm in (lambda x: F.layer_norm(x, (1,)), lambda x: F.group_norm(x, 2)):
        assert "LayerNormalization" not in _lower(norm, torch.randn(3, 2, 1))
    assert "LayerNormalization" in _lower(lambda x: F.layer_norm(x, (2, 1)), torch.randn(3, 2, 1))


OF_NOTHING: dict[str, Any] = {
    "sum": lambda x: x.sum(0),
    "softmax": lambda x: x.softmax(-1),
    "amax": lambda x: x.amax(1),
    "layer_norm": lambda x: aten.native_layer_norm_backward(x, x, [3], x[:, :1], x[:, :1], x.new_ones(3), x.new_ones(3), [True, True, True]),
}


@pytest.mark.parametrize("name", OF_NOTHING)
def test_kernels_that_fail_on_nothing_are_pytorchs(name: str) -> None:
    if name == "layer_norm" and not capabilities.has_training():
        pytest.skip("the kernel is of onnxruntime-training")
    _lower(OF_NOTHING[name], torch.randn(2, 3))
    with pytest.raises(NotOnOrt, match="is not for a tensor without elements"):
        _lower(OF_NOTHING[name], torch.randn(0, 3))


def test_dropout_of_nothing_has_another_kernel() -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return aten.native_dropout_backward(x, x > 0, 2.0)

    assert ("DropoutGrad" in _lower(dropped, torch.randn(2, 3))) is capabilities.has_training()
    assert "DropoutGrad" not in _lower(dropped, torch.randn(0, 3))


def test_the_graph_tells_what_it_is_for() -> None:
    assert GraphLowering(capabilities.target("CPUExecutionProvider", 18), "test").op.builder.device_type == "cuda"
