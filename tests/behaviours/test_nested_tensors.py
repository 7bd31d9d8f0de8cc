"""Nested tensors of ragged rows (`torch.jagged`): one compiled graph for every batch, as with inductor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ort_backend


class Perceptron(nn.Module):
    """Rows of width 8, each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, rows: Tensor) -> Tensor:
        return F.dropout(self.norm(self.narrow(F.gelu(self.wide(rows))) + rows), 0.3)


class Attention(nn.Module):
    """Two heads over rows of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        query, key, value = (torch.unflatten(layer(rows), -1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2))


class Padded(Perceptron):
    """The rows, padded."""

    def forward(self, rows: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(super().forward(rows), 0.0)


class Shares(Perceptron):
    """Each row weighed by the softmax of its values."""

    def forward(self, rows: Tensor) -> Tensor:
        return torch.softmax(super().forward(rows), -1) * rows


def _ragged(*lengths: int) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(length, 8) for length in lengths], layout=torch.jagged)


def _loss(result: Tensor) -> Tensor:
    return (result.values() if result.is_nested else result).square().mean()


@pytest.mark.parametrize("kind", [Perceptron, Attention, Padded, Shares])
def test_training_on_ragged_batches(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    eager = kind()
    own = copy.deepcopy(eager)
    compiled = torch.compile(own, backend="ort_training")
    before = len(ort_backend.report().graphs)
    for lengths in ((3, 5, 2), (4, 1, 6), (2, 2, 7), (1, 9, 1)):
        batch = _ragged(*lengths)
        losses = []
        for module in (compiled, eager):
            torch.manual_seed(1)
            losses.append(_loss(module(batch)))
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1])
        for parameter, expected in zip(own.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
    graphs = ort_backend.report().graphs[before:]
    assert len(graphs) <= 2 and sum(graph.counts.backward for graph in graphs) == 4


def test_results_are_nested_as_the_inputs() -> None:
    own = Attention()
    compiled = torch.compile(own, backend="ort_training")
    batch = _ragged(3, 1, 4)
    with torch.no_grad():
        result, expected = compiled(batch), own(batch)
    assert result.is_nested and result.size(0) == 3
    for row, wanted in zip(result.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(row, wanted)
    torch.testing.assert_close((result + batch).values(), (expected + batch).values())  # of the same ragged size


@pytest.mark.parametrize("retain", [False, True])
def test_the_gradient_of_an_argument_has_its_shape(retain: bool) -> None:
    """Also where the result is none, so that no nested tangent brings the offsets along."""
    nested = _ragged(2, 5, 1).detach().requires_grad_()
    compiled = torch.compile(lambda x: (x * 2).sin().values(), backend="ort_training", fullgraph=True)
    for _ in range(2):
        result = compiled(nested)
        expected = torch.autograd.grad((nested * 2).sin().values().square().sum(), nested)[0]
        for _ in range(1 + retain):
            (gradient,) = torch.autograd.grad(result.square().sum(), nested, retain_graph=retain)
            assert gradient.shape == nested.shape
            torch.testing.assert_close(gradient.values(), expected.values())
    assert ort_backend.report().graphs[-1].counts.backward == 2 * (1 + retain)
