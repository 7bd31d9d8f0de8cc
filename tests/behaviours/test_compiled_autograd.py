"""PyTorch's compiled autograd: backwards inside a compiled function become graphs, of which ONNX Runtime runs the operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from behaviours.check import WHOLE_GRAPHS, Ran, compiled, on_ort, same_tree
from behaviours.operators import Cubed
from default_device import ON_CPU
from torch import fx, nn
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.convert_frame import register_bytecode_hook
from torch.utils.checkpoint import checkpoint

from ort_backend import compiled_autograd
from ort_backend.errors import LoweringError


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(Cubed.apply(self.inner(x)))


class Tied(nn.Module):
    """A weight with two gradients, buffers, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 10)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x[:, 0].abs().long().clamp(0, 9))))


def _turn(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.neg_()


class Hooked(nn.Module):
    """Hooks on a gradient of a parameter, and on an accumulated one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.inner.weight.register_hook(lambda gradient: gradient * 2)
        self.inner.bias.register_post_accumulate_grad_hook(_turn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x).tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1)),
    "function": WithFunction,
    "tied": Tied,
    "hooked": Hooked,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)),
}


def _trained(model: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]], sizes: Sequence[int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    one = make(step)
    losses = [one(torch.randn(size, 6)) for size in sizes]
    return [*losses, *(value.detach() for value in model.state_dict().values())]


def _both(make: Callable[[], nn.Module], sizes: Sequence[int], **options: Any) -> Ran:
    """Trains compiled and in eager PyTorch, and compares."""
    results = []
    torch.manual_seed(1)
    with on_ort(idle=True) as ran, torch._dynamo.config.patch(compiled_autograd=True):
        results.append(_trained(make(), lambda step: compiled(step, fullgraph=False, options=options), sizes))
    torch.manual_seed(1)
    results.append(_trained(make(), lambda step: step, sizes))
    same_tree(*results, atol=1e-5 if ON_CPU else 1e-4)  # five steps from kernels that round differently
    return ran


@pytest.mark.parametrize("model", MODELS)
def test_a_whole_step(model: str) -> None:
    ran = _both(MODELS[model], [4] * 4)
    assert sum(graph.counts.backward for graph in ran.graphs) == 0, "the backward was not traced"
    assert [graph.kind for graph in ran.graphs].count("training") == 1


@pytest.mark.parametrize("model", ["dropout", "tied"])
def test_sizes_that_change(model: str) -> None:
    _both(MODELS[model], [4, 5, 6, 7, 4])


@pytest.mark.parametrize("model", ["dropout", "function", "convolution"])
def test_verified(model: str) -> None:
    _both(MODELS[model], [4, 4], verify=1)


def test_a_backward_that_is_not_traced() -> None:
    """Behind the compiled function, where compiled autograd is off."""
    model, x = nn.Linear(6, 2), torch.randn(4, 6)
    with on_ort(backwards=1), torch._dynamo.config.patch(compiled_autograd=True):
        compiled(model)(x).square().sum().backward()
    found = model.weight.grad
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, model.weight.grad)


def test_dynamo_does_not_compile_the_backend_itself() -> None:
    """A backward that nobody traces is compiled when it first runs: here inside a function that Dynamo compiles."""
    model, x = nn.Linear(6, 2), torch.randn(4, 6)

    def backward(y: torch.Tensor) -> torch.Tensor:
        loss = y.square().sum()
        loss.backward()
        return loss.detach()

    files: list[str] = []
    handle = register_bytecode_hook(lambda code, new: files.append(code.co_filename))
    with on_ort(idle=True) as ran:
        with _enable(torch.compile(backend="eager")):
            y = compiled(model)(x)
        compiled(backward, fullgraph=False)(y)
    handle.remove()
    assert sum(graph.counts.backward for graph in ran.graphs) == 2
    assert __file__ in files
    assert [file for file in files if file != __file__ and "/torch/" not in file] == []


def test_a_backward_that_another_backend_compiles() -> None:
    model, x = nn.Linear(6, 2), torch.randn(4, 6)
    with on_ort(idle=True), _enable(torch.compile(backend="eager")):
        compiled(model)(x).square().sum().backward()
    found = model.weight.grad
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, model.weight.grad)


@pytest.mark.skipif(not WHOLE_GRAPHS, reason="forward and backward are graphs of their own there")
def test_a_forward_that_was_compiled_without_it() -> None:
    torch._dynamo.reset()
    step, x = compiled(nn.Linear(6, 2)), torch.randn(4, 6)
    step(x).sum().backward()
    with _enable(torch.compile(backend="ort_training")), pytest.raises(Exception, match="before the first call, or call torch._dynamo.reset"):
        step(x).sum().backward()


def test_dumps_of_a_traced_backward_have_no_repro(tmp_path: Path) -> None:
    """No program can name the operators that compiled autograd makes for it."""
    _both(MODELS["dropout"], [4], dump_dir=str(tmp_path))
    dumped = {path.name for path in tmp_path.iterdir()}
    assert [name for name in dumped if name.endswith("repro.py")]
    for path in tmp_path.glob("*repro.py"):
        assert "compiled_autograd_ops" not in path.read_text()


def test_lists_are_spread() -> None:
    graph = fx.Graph()
    both, number = graph.placeholder("both"), graph.placeholder("number")
    first, second = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    graph.output((graph.call_function(operator.mul, (first, number)), second))
    gm = fx.GraphModule({}, graph)
    flat, row = compiled_autograd.spread(gm, [[1, 2], 3])
    assert row == [1, 2, 3]
    assert flat(4, 5, 6) == (24, 5)
    given = [4, 5]
    assert compiled_autograd.with_lists(flat)(given, 6) == (24, 5)
    assert given == []
    assert gm([4, 5], 6) == (24, 5), "Dynamo's own graph has changed"


def test_a_list_that_is_used_as_such() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(len, (graph.placeholder("both"),)))
    with pytest.raises(LoweringError, match="the list 'both' otherwise than by its elements"):
        compiled_autograd.spread(fx.GraphModule({}, graph), [[1, 2]])


def test_a_checkpoint_with_dropout_is_verified() -> None:
    """Dynamo's graph alone draws other numbers when it runs the block again: eager PyTorch, and what verification compares with, do not."""
    inner, head, x = nn.Linear(6, 6), nn.Linear(6, 2), torch.randn(4, 6)

    def function(x: torch.Tensor) -> torch.Tensor:
        return head(checkpoint(lambda x: nn.functional.dropout(inner(x).tanh(), 0.3), x, use_reentrant=False))

    torch._dynamo.reset()
    torch.compile(function, backend="ort_training", options={"verify": 1})(x).sum().backward()
