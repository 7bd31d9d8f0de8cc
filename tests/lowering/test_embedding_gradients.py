"""Gradients of embeddings: their rows are added where they belong, with eager's numbers, those of large weights in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import compiled, same_module, same_tree, twin
from default_device import DEVICE, ON_CPU, seeded
from torch import Tensor, nn
from torch.nn import functional as F

from ort_backend import joint, regions
from ort_backend.lowering.passes import embedding_gradients

WORDS = torch.tensor([[3, 0, 3, 1], [6, 3, 2, 0]], device=DEVICE)


@pytest.fixture(name="rewritten")
def _rewritten(counted: Callable[..., list[int]]) -> list[int]:
    """How many sums each run of the pass rewrote."""
    return counted("add_to_tied_gradients", embedding_gradients.add_to_tied_gradients, joint, regions)


@pytest.fixture(name="in_place")
def _in_place(counted: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many results each run of the other pass rewrote, for which every weight is a large one."""
    monkeypatch.setattr(embedding_gradients, "_LARGE", 0)
    return counted("add_rows_in_place", embedding_gradients.add_rows_in_place, joint, regions)


class Model(nn.Module):
    def __init__(self, padding: int | None = None, *, by_frequency: bool = False, segments: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=padding, scale_grad_by_freq=by_frequency)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.randn(7, 5, generator=seeded(0)))
        self.segments = segments

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        if self.segments:
            hidden = hidden + self.embedding(words // 3)
        return F.linear(hidden.tanh(), self.embedding.weight)


def _check(model: nn.Module, *batches: Tensor, dynamic: bool | None = None) -> None:
    model = model.to(DEVICE)
    other = twin(model)
    run = compiled(model, dynamic=dynamic)
    for words in batches:
        results = run(words), other(words)
        same_tree(*results)
        for result in results:
            (result.square().sum() / 7).backward()
        same_module(model, other)


@pytest.mark.skipif(not ON_CPU, reason="on CUDA as they were")
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("padding", "segments", "sums"), [(None, False, 1), (3, False, 1), (-1, False, 1), (0, True, 2)])
def test_tied(rewritten: list[int], padding: int | None, segments: bool, sums: int, dynamic: bool | None) -> None:
    _check(Model(padding, segments=segments), WORDS, dynamic=dynamic)
    assert sum(rewritten) == sums


def test_other_batches() -> None:
    _check(Model(1), WORDS, WORDS[:1], WORDS[:, :3])


def test_gradients_scaled_by_frequency_stay(rewritten: list[int]) -> None:
    _check(Model(by_frequency=True), WORDS)
    assert not sum(rewritten)


@pytest.mark.skipif(not ON_CPU, reason="on CUDA as they were")
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("padding", "segments"), [(None, False), (3, False), (-1, False), (0, True)])
def test_tied_in_place(in_place: list[int], rewritten: list[int], padding: int | None, segments: bool, dynamic: bool | None) -> None:
    _check(Model(padding, segments=segments), WORDS, WORDS[:1], WORDS[:, :3], dynamic=dynamic)
    assert sum(in_place) >= 1 and not sum(rewritten)


@pytest.mark.skipif(not ON_CPU, reason="on CUDA as they were")
def test_tied_in_place_under_autocast(in_place: list[int]) -> None:
    """The product's gradient of the weight is a cast of one in bfloat16."""
    model = Model(1)
    other = twin(model)
    run = compiled(model)
    for one in (run, other):
        with torch.autocast("cpu", torch.bfloat16):
            result = one(WORDS)
        result.float().square().sum().backward()
    assert sum(in_place)
    same_module(model, other, rtol=1e-2, atol=1e-2)


class Alone(nn.Module):
    """An embedding, once or twice, whose weight is also written to a second place of its own."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.embedding, self.other = nn.Embedding(7, 5, padding_idx=2), nn.Embedding(4, 5)
        with torch.no_grad():
            for i, one in enumerate((self.embedding, self.other)):
                one.weight.copy_(torch.randn(one.weight.shape, generator=seeded(i)))
        self.twice = twice

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words) * self.other(words // 2)
        return hidden.tanh() + self.embedding(words.flip(0)) if self.twice else hidden.tanh()


@pytest.mark.skipif(not ON_CPU, reason="on CUDA as they were")
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_alone_in_place(in_place: list[int], twice: bool, dynamic: bool | None) -> None:
    _check(Alone(twice=twice), WORDS, WORDS[:1], dynamic=dynamic)
    assert max(in_place) == 2


@pytest.mark.skipif(not ON_CPU, reason="on CUDA as they were")
def test_a_gradient_that_something_else_reads_is_not_written_to(in_place: list[int]) -> None:
    """The product's gradient of the weight is that of a second tensor as well."""

    def step(weight: Tensor, offset: Tensor) -> Tensor:
        return F.linear(F.embedding(WORDS, weight).tanh(), weight + offset)

    given = [torch.randn(7, 5, generator=seeded(i), device=DEVICE).requires_grad_() for i in range(2)]
    other = [one.detach().clone().requires_grad_() for one in given]
    compiled(step)(*given).square().sum().backward()
    step(*other).square().sum().backward()
    assert not sum(in_place)
    for one, expected in zip(given, other, strict=True):
        torch.testing.assert_close(one.grad, expected.grad)


@pytest.mark.skipif(not ON_CPU, reason="on CUDA as they were")
def test_every_backward_has_memory_of_its_own(in_place: list[int]) -> None:
    model = Model(1).to(DEVICE)
    run = compiled(model)
    gradients = []
    for _ in range(2):
        loss = run(WORDS).square().sum()
        gradients += torch.autograd.grad(loss, model.embedding.weight, retain_graph=True)
        gradients += torch.autograd.grad(loss, model.embedding.weight)
    assert sum(in_place) and len({one.data_ptr() for one in gradients}) == 4
    for one in gradients[1:]:
        torch.testing.assert_close(one, gradients[0])


@pytest.mark.skipif(not ON_CPU, reason="on CUDA as they were")
def test_under_compiled_autograd(in_place: list[int]) -> None:
    """It traces the backward once more, with what the pass has written."""
    model = Model(1, segments=True)
    other = twin(model)

    def step() -> None:
        model(WORDS).square().sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled(step, fullgraph=False)()
    other(WORDS).square().sum().backward()
    assert sum(in_place)
    same_module(model, other)


@pytest.mark.parametrize("options", [{"strict": True}, {"kernels": "onnxruntime"}], ids=["strict", "ONNX Runtime's kernels"])
def test_not_in_place_without_pytorch(in_place: list[int], options: dict[str, object]) -> None:
    model = Model(1).to(DEVICE)
    other = twin(model)
    compiled(model, options=options)(WORDS).square().sum().backward()
    other(WORDS).square().sum().backward()
    assert not sum(in_place)
    same_module(model, other)


def test_half_precision_stays(rewritten: list[int]) -> None:
    model = Model(1).to(DEVICE, torch.bfloat16)
    compiled(model)(WORDS).float().square().mean().backward()
    assert model.embedding.weight.grad is not None and not sum(rewritten)


@pytest.mark.parametrize("is_tied", [False, True], ids=["alone", "tied"])
def test_nothing_reaches_the_row_of_padding(is_tied: bool) -> None:
    """Not even what is infinite, or no number."""

    def step(weight: Tensor, scale: Tensor) -> Tensor:
        hidden = F.embedding(WORDS, weight, padding_idx=3) * scale
        return hidden.sum() + weight.square().sum() if is_tied else hidden.sum()

    scale = torch.ones(2, 4, 1, device=DEVICE)
    scale[WORDS == 3] = torch.tensor([float("nan"), float("inf"), -float("inf")], device=DEVICE)[:, None]
    own, other = (torch.linspace(-1, 1, 35, device=DEVICE).view(7, 5).requires_grad_() for _ in range(2))
    compiled(step)(own, scale).backward()
    step(other, scale).backward()
    assert own.grad is not None and own.grad.isfinite().all()
    torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("options", [{}, {"kernels": "onnxruntime"}], ids=["default", "ONNX Runtime's kernels"])
def test_the_same_words_twice(options: dict[str, object]) -> None:
    """Both gradients are one to the partitioner, so that a sum is of one and the same."""

    def step(weight: Tensor) -> Tensor:
        return F.embedding(WORDS, weight) + F.embedding(WORDS, weight)

    own, other = (torch.linspace(-1, 1, 35, device=DEVICE).view(7, 5).requires_grad_() for _ in range(2))
    compiled(step, options=options)(own).square().sum().backward()
    step(other).square().sum().backward()
    torch.testing.assert_close(own.grad, other.grad)
