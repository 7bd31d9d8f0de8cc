"""A transformer's graph behind ONNX Runtime's optimiser: the fusions that a step's time rests on are there, or their absence is known."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from behaviours.check import single_session
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, ROWS, LENGTH = 2, 32, 4, 2, 8


class Layer(nn.Module):
    """Attention with a scale and a mask, and a perceptron; residuals around both."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.approximate = approximate

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        normal = self.norms[0](x)
        query, key, value = (part(normal).view(ROWS, LENGTH, HEADS, -1).transpose(1, 2) for part in self.parts[:3])
        weights = (query @ key.transpose(-2, -1) / 3 + mask).softmax(-1)
        x = x + self.parts[3]((weights @ value).transpose(1, 2).reshape(ROWS, LENGTH, WIDTH))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate=self.approximate))


class Model(nn.Module):
    """Layers between an embedding and a cross entropy."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20, bias=False)
        self.layers = nn.ModuleList(Layer(approximate) for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Graph:
    """The nodes of an optimised training graph."""

    def __init__(self, path: Path) -> None:
        self.nodes = list(onnx.load(path).graph.node)
        self.counts = collections.Counter(node.op_type for node in self.nodes)
        self.makers = {name: node for node in self.nodes for name in node.output}

    def of(self, op_type: str, **attributes: Any) -> list[onnx.NodeProto]:
        """The nodes of a kind with these attributes."""
        found = [node for node in self.nodes if node.op_type == op_type]
        values = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in found]
        return [node for node, given in zip(found, values) if all(given.get(name) == pytest.approx(value) for name, value in attributes.items())]


def _step(path: Path, approximate: str = "none") -> Graph:
    """The graph of a step whose loss and gradients have been compared with eager's."""
    torch.manual_seed(0)
    tokens, mask = torch.randint(0, 20, (ROWS, LENGTH)), torch.full((LENGTH, LENGTH), -1e4).triu(1)
    return _compared(path, Model(approximate), tokens, mask)


def _compared(path: Path, model: nn.Module, *args: torch.Tensor) -> Graph:
    model(*args).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ort_training", options={"strict": True, "dump_dir": str(path)})
    compiled(*args).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    (made,) = path.glob("*.optimized.onnx")
    return Graph(made)


@pytest.fixture(scope="module", name="graph")
def _graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return _step(tmp_path_factory.mktemp("dump"))


@single_session
def test_biases_and_transposed_weights_are_part_of_the_product(graph: Graph) -> None:
    with_bias = [node for node in graph.of("Gemm", transB=1) if len(node.input) == 3]
    assert len(with_bias) == 6 * LAYERS


@single_session
def test_gradients_of_parameters_are_written_without_a_transposed_copy(graph: Graph) -> None:
    assert len(graph.of("Gemm", transA=1)) == 6 * LAYERS + 1
    swaps = [node for node in graph.of("Transpose") if list(node.attribute[0].ints) in ([1, 0], [0, 1, 3, 2])]
    assert not swaps


@single_session
def test_the_backward_of_attention_has_its_transposes_in_the_products(graph: Graph) -> None:
    """Scores and values forward; gradients of values, weights, queries and keys."""
    transposed = [node for node in graph.of("FusedMatMul") if any(a.name in ("transA", "transB") and a.i for a in node.attribute)]
    assert len(transposed) >= 3 * LAYERS


@single_session
def test_the_scale_of_the_scores_is_part_of_the_product(graph: Graph) -> None:
    """In the forward, and in the two gradients that it is a factor of."""
    assert len(graph.of("FusedMatMul", alpha=1 / 3)) == 3 * LAYERS


@single_session
def test_residuals_and_normalisation_keep_their_own_kernels(graph: Graph) -> None:
    """SkipLayerNormalization gives no mean and no deviation, which the backward needs: the sum stays a node of its own."""
    assert graph.counts["LayerNormalization"] == graph.counts["LayerNormalizationGrad"] == 2 * LAYERS
    assert graph.counts["SkipLayerNormalization"] == 0


@single_session
def test_softmax_is_one_kernel_in_each_direction(graph: Graph) -> None:
    assert graph.counts["Softmax"] + graph.counts["BiasSoftmax"] == graph.counts["SoftmaxGrad_13"] == LAYERS  # the latter, with the mask, on CUDA


@single_session
def test_the_cross_entropy_has_one_tensor_of_gradients(graph: Graph) -> None:
    assert graph.counts["ScatterElements"] == graph.counts["LogSoftmax"] == 1
    assert graph.counts["LogSoftmaxGrad_13"] == 0


@single_session
def test_no_two_reshapes_follow_each_other(graph: Graph) -> None:
    chained = [node.name for node in graph.of("Reshape") if (maker := graph.makers.get(node.input[0])) is not None and maker.op_type == "Reshape"]
    assert not chained


@single_session
@pytest.mark.parametrize("approximate, kernel", [("none", "Gelu"), ("tanh", "FastGelu")])
def test_gelu_is_one_kernel(tmp_path: Path, approximate: str, kernel: str) -> None:
    counts = _step(tmp_path, approximate).counts
    assert counts[kernel] + counts[f"Bias{kernel}"] == LAYERS


class Branches(nn.Module):
    """An embedding that several products read, so that as many gradients meet in it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return torch.stack([part(x).sin().sum() for part in self.parts]).sum()


@single_session
@pytest.mark.parametrize("count", [2, 3, 5])
def test_gradients_that_meet_in_a_tensor_are_added_without_anything_between(tmp_path: Path, count: int) -> None:
    """One sum less than gradients, each of the product's own result: no zeros to start from, no copies.

    `Sum` of all of them is no faster (`python -m benchmarks.fusions`) and keeps all of them until the last is there.
    """
    torch.manual_seed(0)
    graph = _compared(tmp_path, Branches(count), torch.randint(0, 20, (ROWS, LENGTH)))
    (scatter,) = graph.of("ScatterND")
    assert scatter.input[2] in graph.makers
    kinds = collections.Counter(node.op_type for node in _summed(graph, scatter.input[2]))
    assert kinds["Add"] == count - 1 and kinds["MatMul"] + kinds["Gemm"] + kinds["FusedMatMul"] == count
    assert set(kinds) <= {"Add", "Reshape", "MatMul", "Gemm", "FusedMatMul"}


def _summed(graph: Graph, name: str) -> list[onnx.NodeProto]:
    """The nodes from a sum of gradients up to the products whose results they are."""
    node = graph.makers[name]
    onward = {"Add": node.input, "Reshape": node.input[:1]}.get(node.op_type, ())
    return [node, *(found for one in onward for found in _summed(graph, one))]
