"""Sizes that reach values without a copy between devices: the same numbers, shown on the CPU with the ways that are for a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ort_backend
from ort_backend.lowering.passes.host_values import is_about_sizes, keep_on_host
from ort_backend.target import OrtTarget

D = ir.DataType


@pytest.fixture(autouse=True)
def _as_for_a_device() -> Iterator[None]:
    with mock.patch.object(OrtTarget, "sizes_on_host", True):
        yield


def _constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(array), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
    graph.register_initializer(value)
    return value


def _run(write: Callable[[ir.Graph, Callable[..., ir.Value]], ir.Value], *shape: int) -> tuple[Any, list[str]]:
    """What a graph gives for zeros of this shape behind the pass, and its operators."""
    x = ir.Value(name="x", type=ir.TensorType(D.FLOAT), shape=ir.Shape([None] * len(shape)))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18})

    def op(op_type: str, *inputs: ir.Value, dtype: ir.DataType = D.INT64, rank: int = 0, **ints: int) -> ir.Value:
        node = ir.Node("", op_type, inputs, [ir.AttrInt64(name, value) for name, value in ints.items()])
        graph.append(node)
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(dtype), ir.Shape([len(shape)] * rank)
        return node.outputs[0]

    result = write(graph, op)
    graph.outputs.append(result)
    keep_on_host(graph)
    operators = [node.op_type for node in graph]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.zeros(shape, np.float32)})[0], operators


@pytest.mark.parametrize("n", [0, 1, 7])
def test_an_integer_scalar(n: int) -> None:
    def write(graph: ir.Graph, op: Callable[..., ir.Value]) -> ir.Value:
        nothing = op("Cast", op("ReduceSum", graph.inputs[0], dtype=D.FLOAT, keepdims=0), to=int(D.INT64))
        return op("Add", op("Size", graph.inputs[0]), nothing)

    result, operators = _run(write, n)
    assert result.shape == () and result == n and operators.count("Range") == 1


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("factor", [0.0, 1.0, -0.3, 1e-30, 3e7, -1e30])
def test_a_number_computed_in_floating_point(kind: type, factor: float) -> None:
    dtype = ir.DataType.from_numpy(np.dtype(kind))

    def write(graph: ir.Graph, op: Callable[..., ir.Value]) -> ir.Value:
        number = op(
            "Mul", op("Cast", op("Size", graph.inputs[0]), dtype=dtype, to=int(dtype)), _constant(graph, "f", np.array(factor, kind)), dtype=dtype
        )
        return op("Add", op("Cast", op("ReduceSum", graph.inputs[0], dtype=D.FLOAT, keepdims=0), dtype=dtype, to=int(dtype)), number, dtype=dtype)

    result, operators = _run(write, 5)
    assert result.shape == () and result == kind(5) * kind(factor)
    assert operators.count("Range") == 1


def test_sizes_beside_what_follows_from_constants_alone() -> None:
    """As the paddings of a gradient do: ONNX Runtime works these out in advance."""

    def write(graph: ir.Graph, op: Callable[..., ir.Value]) -> ir.Value:
        known = op("Neg", _constant(graph, "one", np.array([-1])), rank=1)
        sizes = op("Concat", op("Shape", graph.inputs[0], rank=1), known, rank=1, axis=0)
        assert is_about_sizes(sizes.producer()) and not is_about_sizes(known.producer())  # type: ignore[arg-type]
        return op("Pad", graph.inputs[0], sizes, dtype=D.FLOAT)

    result, operators = _run(write, 3)
    assert result.shape == (7,) and "Range" not in operators


def test_a_vector_of_sizes() -> None:
    def write(graph: ir.Graph, op: Callable[..., ir.Value]) -> ir.Value:
        count = op("Cast", op("ReduceSum", graph.inputs[0], dtype=D.FLOAT, keepdims=0), to=int(D.INT64))
        return op("Add", op("Shape", graph.inputs[0], rank=1), count, rank=1)

    result, operators = _run(write, 3, 4, 5)
    assert result.tolist() == [3, 4, 5] and operators.count("Range") == 3


@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0, 2)])
@pytest.mark.parametrize("dtype", [D.FLOAT, D.INT64, D.BOOL])
def test_a_tensor_behind_a_gradient(shape: tuple[int, ...], dtype: ir.DataType) -> None:
    def write(graph: ir.Graph, op: Callable[..., ir.Value]) -> ir.Value:
        ones = op("Cast", op("Cos", graph.inputs[0], dtype=D.FLOAT, rank=len(shape)), dtype=dtype, rank=len(shape), to=int(dtype))
        flat = op("Reshape", op("Sin", graph.inputs[0], dtype=D.FLOAT), _constant(graph, "all", np.array([-1])), dtype=D.FLOAT, rank=1)
        nothing = op("Gather", flat, _constant(graph, "none", np.zeros(0, np.int64)), dtype=D.FLOAT, rank=1)
        sizes = op("Concat", op("Shape", ones, rank=1), op("Cast", nothing, rank=1, to=int(D.INT64)), rank=1, axis=0)
        result = op("Reshape", ones, sizes, dtype=dtype, allowzero=1)
        for node in graph:
            node.outputs[0].shape = None
        return result

    result, operators = _run(write, *shape)
    np.testing.assert_array_equal(result, np.ones(shape, dtype.numpy()), strict=True)
    assert "Range" not in operators and operators[-2:] == ["Shape", "Reshape"] and operators.count("Cast") == 2


@pytest.mark.parametrize("declared", ["PythonOp", "TritonOp"])
def test_a_call_of_pytorch_gets_a_number_as_a_shape(declared: str) -> None:
    x = ir.Value(name="x", type=ir.TensorType(D.FLOAT), shape=ir.Shape([None]))
    size = ir.Node("", "Size", [x])
    size.outputs[0].type, size.outputs[0].shape = ir.TensorType(D.INT64), ir.Shape([])
    attributes = [ir.AttrInt64s("input_tensor_types", [1, 7]), ir.AttrInt64s("input_tensor_ranks", [1, 0])] if declared == "PythonOp" else []
    call = ir.Node("com.microsoft", declared, [x, size.outputs[0]], attributes)
    keep_on_host(ir.Graph([x], call.outputs, nodes=[size, call], opset_imports={"": 18}))
    number = call.inputs[1]
    assert number is not None and number.dtype == D.UINT8 and number.producer().op_type == "ConstantOfShape"  # type: ignore[union-attr]
    told = {name: list(attribute.as_ints()) for name, attribute in call.attributes.items()}
    assert told == ({"input_tensor_types": [1, int(D.UINT8)], "input_tensor_ranks": [1, 3]} if declared == "PythonOp" else {})


def test_what_is_about_sizes() -> None:
    x = ir.Value(name="x", type=ir.TensorType(D.FLOAT), shape=ir.Shape([None]))
    size = ir.Node("", "Size", [x])
    twice = ir.Node("", "Add", [size.outputs[0], size.outputs[0]])
    mixed = ir.Node("", "Add", [x, twice.outputs[0]])
    assert is_about_sizes(twice)
    assert not is_about_sizes(mixed) and not is_about_sizes(size)


class Sized(nn.Module):
    """Uses sizes as shapes, as values, and in an operator that runs in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, offset: int) -> torch.Tensor:
        hidden = self.layer(x).flatten(0, 1)
        hidden = hidden / x.shape[1] + x.shape[0] ** 0.5 + offset
        places = torch.arange(x.shape[1]).repeat(x.shape[0]) * x.shape[1]
        rolled = torch.special.scaled_modified_bessel_k0(hidden.abs() + 1).roll(x.shape[1] // 2, 0)
        windows = F.pad(rolled, (0, 0, x.shape[0], 1)).unfold(0, 2, x.shape[0])
        return (hidden * places[:, None]).mean() + windows.sum()


@pytest.mark.parametrize("offset", [3, -2])
def test_a_model_with_changing_sizes_trains_as_in_eager(offset: int) -> None:
    model = Sized()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ort_training", dynamic=True)
    before = len(ort_backend.report().graphs)
    for rows, columns in ((2, 3), (4, 5), (3, 7)):
        x = torch.randn(rows, columns, 6)
        losses = [module(x, offset + rows) for module in (compiled, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[0], losses[1])
        for parameter, expected in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
    graphs = ort_backend.report().graphs[before:]
    assert sum(graph.counts.backward for graph in graphs) == 3
