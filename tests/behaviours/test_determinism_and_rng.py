"""Compiling draws nothing; what the graph draws is what eager draws; a run can be repeated bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from behaviours.check import call, compiled, if_on_cuda, on_ort, same_as_eager, same_tree
from default_device import DEVICE, random_state, seeded
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch.nn import functional as F

X = torch.randn(6, 4, generator=seeded(0)).requires_grad_()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 2))


def test_compiling_touches_no_random_state() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16))
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    with on_ort(graphs=1):
        compiled(model)(X).sum().backward()
    assert random.getstate() == states[0]
    assert all(np.array_equal(one, other) for one, other in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])
    assert not cuda or all(torch.equal(one, other) for one, other in zip(torch.cuda.get_rng_state_all(), cuda, strict=True))


def test_verify_touches_no_random_state() -> None:
    with on_ort(graphs=2):
        results: list[Any] = []
        for options in ({}, {"verify": 1}):
            torch.manual_seed(3)
            results.append(compiled(lambda x: F.dropout(x), options=options)(X.detach()))
            results.append(random_state())
        same_tree(results[:2], results[2:])


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("train", [True, False])
def test_dropout_drops_what_eager_drops(p: float, train: bool) -> None:
    same_as_eager(nn.Sequential(nn.Linear(4, 8), nn.Dropout(p)).train(train), call(X), graphs=1)


def test_the_backward_uses_the_mask_of_the_forward() -> None:
    x = torch.ones(50, 20, requires_grad=True)
    with on_ort(graphs=1):
        result = compiled(lambda x: F.dropout(x, 0.5))(x)
        result.sum().backward()
    assert torch.equal(x.grad, result.detach()) and 0.3 < float((result == 0).float().mean()) < 0.7


DRAWS: dict[str, Any] = {
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand": lambda x: x * torch.rand(6, 4),
    "randn_then_dropout": lambda x: F.dropout(x * torch.randn(4), 0.5),
    "randint": lambda x: x * torch.randint(0, 9, (4,)),
    "randperm": lambda x: x[torch.randperm(6)],
    "no_generator": lambda x: torch.rand(6, 4, generator=None) * x + torch.randn(4, generator=None)[torch.randperm(4, generator=None)] * F.dropout(x),
    "integers_of_no_generator": lambda x: x * torch.randint(9, (4,), generator=None) + torch.randint(2, 9, (4,), generator=None),
    "uniform_of_no_generator": lambda x: F.dropout(x) * torch.empty_like(x).uniform_(generator=None),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(-1, 1),
    "normal": lambda x: x * torch.empty_like(x).normal_(1.0, 2.0),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(),
    "several": lambda x: torch.rand_like(x) * x + torch.randn(4) * F.dropout(x) - torch.rand(()),
    "feature_dropout": lambda x: F.dropout1d(x.unsqueeze(0), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "behind_unread_ones": lambda x: (F.dropout(x), torch.randperm(6), F.dropout(x.sin() * torch.rand(4)))[2],
    "before_unread_ones": lambda x: (F.dropout(x), torch.randn(3), F.dropout(x.sin()))[0],
    "behind_unread_dependent_ones": lambda x: (torch.bernoulli(x.sigmoid()), F.dropout(x.sin()))[1],
}


# Draws whose distribution or number depends on values: PyTorch makes them in the midst of the graph.
DEPENDENT = {
    "bernoulli": ["aten::bernoulli"],
    "rrelu": ["aten::rrelu_with_noise_functional"],
    "behind_unread_dependent_ones": ["aten::bernoulli", "aten::native_dropout"],
}


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_are_eagers_draws(kind: str) -> None:
    same_as_eager(DRAWS[kind], call(X), graphs=1, python_ops=DEPENDENT.get(kind, []))


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[:, 1:].transpose(0, 1).bernoulli_(0.5)
    return y


# Where the elements lie in memory decides which of them a draw is for, and PyTorch's fake tensors do not always know it.
LAID_OUT: dict[str, Any] = {
    "batch_norm": lambda x: F.dropout(F.batch_norm(x, None, None, training=True), 0.5),
    "averages": lambda x: F.dropout(F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), training=True), 0.5),
    "evaluated": lambda x: F.dropout(F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])), 0.5),
    "log_sigmoid": lambda x: F.dropout(F.logsigmoid(x), 0.5),
    "roll": lambda x: F.dropout(x.roll((1, 1), (0, -1)), 0.5),
    "roll_flat": lambda x: F.dropout(x.roll(3), 0.5),
    "shuffle": lambda x: F.dropout(F.channel_shuffle(x, 2) if x.dim() == 4 else x, 0.5),
    "angle": lambda x: F.dropout(torch.complex(x, x * 2).angle(), 0.5),
    "unpool": lambda x: F.dropout(F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape) if x.dim() == 4 else x, 0.5),
    "power": lambda x: F.dropout(2**x, 0.5) + F.dropout(torch.ldexp(x[:1, :1], x), 0.5),
    "logaddexp": lambda x: F.dropout(torch.logaddexp(x[:1, :1], x), 0.5) + F.dropout(torch.logaddexp2(x[0], x), 0.5),
    "heaviside": lambda x: x * F.dropout(torch.heaviside(x[0].detach(), x.detach()), 0.5),
    "logical_or": lambda x: x * F.dropout(torch.logical_or(x[:1, :1].detach(), x.detach().relu()).float(), 0.5),
    "logical_and": lambda x: x * F.dropout(torch.logical_and(x[:1, :1].detach(), x.detach().relu()).float(), 0.5),
    "logical_xor": lambda x: x * F.dropout(torch.logical_xor(x[:1, :1].detach(), x.detach().relu()).float(), 0.5),
    "xlogy": lambda x: F.dropout(torch.xlogy(x, 2 + x.square().contiguous()), 0.5),
    "xlog1py": lambda x: F.dropout(torch.special.xlog1py(x.contiguous(), x.square()), 0.5),
    "copysign": lambda x: F.dropout(x.copysign(x[0]), 0.5) + F.dropout(x.contiguous().copysign(x), 0.5),
    "floor": lambda x: x * F.dropout(x.detach() // (x[0].detach().abs() + 1), 0.5),
    "rounded": lambda x: x + F.dropout(x.contiguous().div(x.abs() + 1, rounding_mode="floor"), 0.5),
    "complex": lambda x: F.dropout(torch.complex(x[:1, :1].expand_as(x), x).real, 0.5),
    "entropy": lambda x: F.dropout(F.binary_cross_entropy(x.sigmoid(), x.contiguous().sigmoid(), reduction="none"), 0.5),
    "dropout_in_place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "bernoulli_in_place": lambda x: x * torch.zeros_like(x).bernoulli_(0.5),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach(), 0.5) + x.detach().bernoulli(p=0.3),
    "parts": _written,
}


@pytest.mark.cpu_only(reason="PyTorch's kernels of CUDA lay out other results")
@pytest.mark.parametrize("kind", LAID_OUT)
def test_draws_are_for_the_elements_of_eager(kind: str) -> None:
    pictures = torch.randn(3, 5, 2, 4).transpose(1, 3)
    layouts = [torch.randn(3, 6, 4).transpose(1, 2), torch.randn(3, 5, 4), torch.randn(4, 3, 6)[..., ::2].transpose(0, 1)]
    layouts += [pictures, pictures.contiguous(memory_format=torch.channels_last), pictures.contiguous()]
    for x in layouts:
        same_as_eager(LAID_OUT[kind], call(x.requires_grad_()), graphs=1)
        torch._dynamo.reset()


# Likewise, of draws that PyTorch makes in the midst of the graph.
DEPENDENT_AND_LAID_OUT: dict[str, Any] = {
    "rrelu": lambda x: F.dropout(F.rrelu(x, training=True), 0.5),
    "evaluated_rrelu": lambda x: F.dropout(F.rrelu(x), 0.5),
    "normal": lambda x: x * F.dropout(torch.normal(x.detach(), x.detach().abs()), 0.5),
    "normal_of_number": lambda x: x * F.dropout(torch.normal(0.5, x.detach().abs()) + torch.normal(x.detach(), 0.5), 0.5),
}


@pytest.mark.cpu_only(reason="PyTorch's kernels of CUDA lay out other results")
@pytest.mark.parametrize("kind", DEPENDENT_AND_LAID_OUT)
def test_draws_behind_dependent_draws_are_for_the_elements_of_eager(kind: str) -> None:
    x = torch.randn(3, 6, 4).transpose(1, 2).requires_grad_()
    same_as_eager(DEPENDENT_AND_LAID_OUT[kind], call(x), graphs=1, python_ops=None)


@pytest.mark.cpu_only(reason="PyTorch's kernels of CUDA lay out other results")
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
def test_draws_for_padded_volumes_are_for_the_elements_of_eager(mode: str) -> None:
    x = torch.randn(2, 3, 4, 3, 5).to(memory_format=torch.channels_last_3d).requires_grad_()
    same_as_eager(lambda x: F.dropout(F.pad(x, (1, 1, 2, 0, 1, 1), mode=mode), 0.5), call(x), graphs=1)


@pytest.mark.cpu_only(reason="PyTorch's kernels of CUDA lay out other results")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("transposed", [False, True])
def test_draws_for_convolved_volumes_are_for_the_elements_of_eager(transposed: bool, layout: torch.memory_format) -> None:
    convolution = nn.ConvTranspose3d(2, 8, 2, 2) if transposed else nn.Conv3d(2, 8, 3, padding=1, padding_mode="replicate")
    model = nn.Sequential(nn.Dropout3d(0.2), convolution, nn.Dropout(0.3)).to(memory_format=torch.channels_last_3d)
    same_as_eager(model, call(torch.randn(2, 2, 5, 6, 7).to(memory_format=layout).requires_grad_()), graphs=1)


@pytest.mark.parametrize("train", [True, False])
def test_a_draw_is_a_result(train: bool) -> None:
    """Nothing of the graph computes with it."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask, noise = torch.rand(3, 5), torch.randn(4)
        return mask, (x * 2).sum() + noise.sum(), noise, mask

    x, results = X.detach().clone().requires_grad_(train), []
    with on_ort(graphs=1):
        for one in (compiled(function), function):
            torch.manual_seed(3)
            results.append((one(x), random_state()))
            if train:
                results[-1][0][1].backward()
    same_tree(*results)


def test_draws_that_depend_on_values_keep_their_order() -> None:
    def function(x: torch.Tensor) -> Any:
        first = torch.bernoulli(x.detach().sigmoid())
        second = torch.rand_like(x)
        third = torch.multinomial(x.detach().softmax(-1), 2)
        return first * x, second * x, third

    with on_ort(graphs=1, python_ops=["aten::bernoulli", "aten::multinomial", "aten::rand_like"]):
        step = compiled(function)
        for seed in range(2):
            results, states = [], []
            for side in (step, function):
                torch.manual_seed(seed)
                results.append(side(X))
                states.append(random_state())
            same_tree(*results)
            assert torch.equal(*states)
            (results[0][0].sum() + results[0][1].sum()).backward()
    X.grad = None


@pytest.mark.parametrize("dynamic", [False, True])
def test_draws_inside_a_graph_fill_memory_in_eagers_order(dynamic: bool) -> None:
    """A draw that depends on values keeps the next ones in the graph, too, which draw for tensors that are not contiguous, or have gaps."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = F.conv1d(x, torch.ones(4, 3, 1)).transpose(1, 2)
        chances = x[:1, :1].sigmoid()
        spread, gaps = torch.bernoulli(chances.expand(2, 4, -1).transpose(1, 2)), torch.bernoulli(y.sigmoid()[:, ::2])
        return (y + torch.bernoulli(y.sigmoid()) + torch.randn_like(y) + spread).sum(1) + gaps.sum(1)

    with on_ort(graphs=1, python_ops=["aten::bernoulli", "aten::randn_like"]):
        step = compiled(function, dynamic=dynamic)
        for length in (5, 6) if dynamic else (5,):
            x = torch.randn(2, 3, length, requires_grad=True)
            results = []
            for side in (step, function):
                torch.manual_seed(length)
                result = side(x)
                results.append((result, torch.autograd.grad(result.square().sum(), x)))
            same_tree(*results)


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_have_eagers_strides(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.transpose(0, 1) * 2, x.permute(2, 0, 1).sin(), x.to(memory_format=torch.contiguous_format) + 1

    step = compiled(function, dynamic=dynamic)
    for length in (4, 5) if dynamic else (4,):
        x = torch.randn(3, length, 6, requires_grad=True)
        actual, expected = step(x), function(x)
        assert [one.stride() for one in actual] == [one.stride() for one in expected]
        same_tree(actual, expected)


def test_one_seed_gives_one_run() -> None:
    model = dropping()
    runs = []
    for _ in range(2):
        mine = copy.deepcopy(model)
        with on_ort(graphs=1, forwards=5):
            step, optimizer = compiled(mine), torch.optim.AdamW(mine.parameters(), 0.01)
            torch.manual_seed(1)
            for _ in range(5):
                optimizer.zero_grad()
                step(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
        runs.append([p.detach().clone() for p in mine.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.fixture
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [True, False], indirect=True)
@pytest.mark.parametrize("train", [True, False])
def test_torchs_determinism_flag_reaches_the_session(deterministic: bool, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    make = onnxruntime.InferenceSession.__init__

    def spy(self: Any, model: Any, options: Any = None, *args: Any, **more: Any) -> None:
        seen.append(options)
        make(self, model, options, *args, **more)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", spy)
    same_as_eager(dropping().train(train), call(X), graphs=1)
    assert seen[-1].use_deterministic_compute == deterministic


@pytest.mark.parametrize("deterministic", [True], indirect=True)
@pytest.mark.parametrize("train", [True, False])
def test_two_runs_are_bit_equal(deterministic: bool, train: bool) -> None:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Flatten(), nn.Linear(32, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)).train(train)
    ids = torch.randint(0, 7, (16, 4))
    # On a device ONNX Runtime's kernel adds in the order in which threads come.
    with on_ort(graphs=1, forwards=3, python_ops=if_on_cuda("aten::embedding_dense_backward")):
        step = compiled(model)
        runs = []
        for _ in range(3):
            model.zero_grad()
            torch.manual_seed(5)
            result = step(ids)
            result.square().sum().backward()
            runs.append([result.detach().clone(), *(p.grad.clone() for p in model.parameters())])
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))


def test_recomputed_dropout_is_the_same_dropout() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False).sin()

    model = Model()
    reference = copy.deepcopy(model)
    torch.manual_seed(4)
    with on_ort(graphs=1):
        own = compiled(model)(X)
        own.sum().backward()
    torch.manual_seed(4)
    expected = reference.block(X.detach()).sin()
    expected.sum().backward()
    same_tree(own.detach(), expected.detach())
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        same_tree(one.grad, other.grad)
    X.grad = None


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("read", [True, False])
def test_dropout_in_a_checkpoint_that_needs_no_gradient(read: bool, grad: bool) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(x, 0.3)
        return (dropped if read else x).sin()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) + nn.functional.dropout(x, 0.5)

    with torch.set_grad_enabled(grad):
        same_as_eager(function, call(torch.randn(8, 16)), train=False)


@pytest.mark.parametrize("read", [True, False])
def test_dropout_in_a_checkpoint_whose_result_is_detached(read: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        made = torch.utils.checkpoint.checkpoint(lambda x: nn.functional.dropout(x.sin(), 0.3), x, use_reentrant=False).detach()
        return (made if read else x.detach()) + nn.functional.dropout(x.detach(), 0.5)

    same_as_eager(function, call(torch.randn(8, 16).requires_grad_()), train=False)


@torch.library.custom_op("determinism::drop", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,))
def drop(x: torch.Tensor, p: float) -> None:
    x.mul_(torch.rand(x.shape, device=x.device) > p)


def _branch(x: torch.Tensor) -> torch.Tensor:
    parts = (lambda x: F.dropout(x, 0.5) * torch.rand(3, device=DEVICE)), (lambda x: x - torch.randn(3, device=DEVICE))
    return torch.cond(x.sum() > 0, *parts, (x,))


def _loop(x: torch.Tensor) -> torch.Tensor:
    first = torch.tensor(0, device=DEVICE), x * 1
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, F.dropout(y, 0.2) + torch.rand(3, device=DEVICE)), first)[1]


def _steps(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda h, row: (h + F.dropout(row, 0.5), h * torch.rand(3, device=DEVICE)), x[0] * 1, x)[1]


def _in_place(x: torch.Tensor) -> torch.Tensor:
    made = x.detach() * 1
    drop(made[0], 0.5)
    return x * made


TRAINED = [_branch, _steps, _in_place]


@pytest.mark.parametrize(("inner", "train"), [*((inner, True) for inner in TRAINED), *((inner, False) for inner in (*TRAINED, _loop))])
def test_draws_around_those_inside_an_operator(inner: Callable[[torch.Tensor], torch.Tensor], train: bool) -> None:
    """Bodies of control flow draw where the program does, and so does an operator that says that it draws."""

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn = inner(F.dropout(x, 0.2))
        return drawn + F.dropout(x, 0.5) + torch.rand(3, device=DEVICE)

    with on_ort(graphs=1, forwards=2, python_ops=None):
        run = compiled(function)
        for sign in (1, -1):
            results = []
            for side in (run, function):
                torch.manual_seed(5)
                x = (sign * torch.rand(4, 3, generator=seeded(0))).requires_grad_(train)
                made = side(x)
                if train:
                    made.square().sum().backward()
                results.append((made.detach(), x.grad, random_state()))
            same_tree(*results)


@pytest.mark.parametrize("train", [False, True])
def test_numbers_that_python_draws(train: bool) -> None:
    """Dynamo draws them before a call, and hands them to the graph."""

    def function(x: torch.Tensor) -> torch.Tensor:
        own = random.Random(7)
        return (x * random.random() + random.randint(1, 5) - random.uniform(3.0, 4.0)) * own.uniform(0.5, 1.0)

    x = torch.ones(3, requires_grad=train)
    found = []
    with on_ort(idle=True):
        for side in (compiled(function, fullgraph=False), function):
            random.seed(3)
            results = [side(x) for _ in range(3)]
            found.append((results, torch.autograd.grad(results[1].sum(), x) if train else None, random.getstate()))
    same_tree(*found)
