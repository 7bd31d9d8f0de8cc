"""Gradients of `nn.Embedding(sparse=True)` are sparse tensors, as in eager PyTorch: the sparse optimisers take nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ort_backend
from ort_backend.runtime import capabilities


class Words(nn.Module):
    """An embedding, used twice or once, and a bag."""

    def __init__(self, mode: str = "sum", *, checkpointed: bool = False, padding: int | None = None, twice: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True, padding_idx=padding)
        self.bags = nn.EmbeddingBag(10, 4, mode=mode, sparse=True)
        self.head = nn.Linear(4, 4)
        self.checkpointed, self.twice = checkpointed, twice

    def look_up(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.words(tokens.flip(0)) * 2 if self.twice else self.words(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        found = checkpoint(self.look_up, tokens, use_reentrant=False) if self.checkpointed else self.look_up(tokens)
        return self.head(found.tanh() + self.bags(tokens.view(-1, 1)))


def _pair(*args: str, **settings: object) -> tuple[Words, Words, nn.Module]:
    torch.manual_seed(0)
    eager = Words(*args, **settings)  # type: ignore[arg-type]
    own = copy.deepcopy(eager)
    return eager, own, torch.compile(own, backend="ort_training")


def _same_gradients(own: nn.Module, eager: nn.Module) -> None:
    for parameter, expected in zip(own.parameters(), eager.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        assert parameter.grad.layout == expected.grad.layout
        torch.testing.assert_close(parameter.grad.to_dense(), expected.grad.to_dense())


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
def test_the_gradients_are_sparse_and_equal(mode: str, checkpointed: bool, padding: int | None) -> None:
    eager, own, compiled = _pair(mode, checkpointed=checkpointed, padding=padding)
    for tokens in (torch.tensor([1, 2, 2, 5]), torch.tensor([3, 3, 0, 1])):
        for module in (compiled, eager):
            module(tokens).square().sum().backward()
        _same_gradients(own, eager)
        assert own.words.weight.grad.is_sparse and own.bags.weight.grad.is_sparse  # type: ignore[union-attr]
        own.zero_grad()
        eager.zero_grad()


def test_sizes_that_change() -> None:
    """Of an embedding used once: AOTAutograd cannot trace the sum of two sparse gradients of symbolic sizes (torch 2.13, `aot_eager`, too)."""
    eager, own, compiled = _pair(twice=False)
    before = len(ort_backend.report().graphs)
    for tokens in (torch.tensor([1, 2, 2, 5]), torch.tensor([3, 3, 0, 1, 9, 2]), torch.tensor([3, 1, 1])):
        for module in (compiled, eager):
            module.zero_grad()
            module(tokens).square().sum().backward()
        _same_gradients(own, eager)
    assert len(ort_backend.report().graphs) - before == 2


def test_sparse_adam_takes_them() -> None:
    eager, own, compiled = _pair()
    optimisers = [torch.optim.SparseAdam([*one.words.parameters(), *one.bags.parameters()]) for one in (own, eager)]
    for _ in range(5):
        tokens = torch.randint(0, 10, (6,))
        for module, optimiser in zip((compiled, eager), optimisers, strict=True):
            optimiser.zero_grad()
            module(tokens).square().sum().backward()
            optimiser.step()
        _same_gradients(own, eager)
    torch.testing.assert_close(own.words.weight, eager.words.weight)


def test_the_rest_of_the_graph_stays_whole() -> None:
    eager, own, compiled = _pair()
    for module in (compiled, eager):
        module(torch.tensor([1, 2, 2, 5])).square().sum().backward()
    graph = ort_backend.report().graphs[-1]
    assert "aten::_sparse_coo_tensor_with_dims_and_tensors" in {one.operator for one in graph.outside}
    assert graph.sessions == 1 or not capabilities.has_training()
    assert (graph.counts.forward, graph.counts.backward) == (1, 1)


def test_a_second_backward_gives_them_again() -> None:
    eager, own, compiled = _pair()
    for module in (compiled, eager):
        loss = module(torch.tensor([1, 2, 2, 5])).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    _same_gradients(own, eager)
