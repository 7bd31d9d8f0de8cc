"""Results that no gradient comes for: eager computes nothing for them, and gives None to what only they would reach."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from behaviours.check import Both, compiled, on_ort, onnx_files, same_gradients, single_session
from default_device import seeded
from torch import fx, nn

from ort_backend.lowering.passes.tangents import loosen_tangents

ROWS, VOCABULARY, WIDTH = 24, 1024, 16
TOKENS = torch.randint(0, VOCABULARY, (2, ROWS), generator=seeded(0))


class Decoder(nn.Module):
    """As Hugging Face's: a loss, the logits that it comes from, and what the next call would read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.key, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.tokens(tokens)
        key = self.key(hidden)
        logits = self.head(hidden + key.tanh())
        return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1)), logits, key


class Apart(nn.Module):
    """Results that share no parameter, as large as each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, right = self.left(x), self.right(x)
        return left, right, left.sum() + 2 * right.sum()


def _step(chosen: Sequence[int], *args: Any) -> Callable[[Any, nn.Module], Any]:
    def do(call: Any, module: nn.Module) -> Any:
        module.zero_grad()
        results = call(*args)
        sum(results[i].square().mean() for i in chosen).backward()  # type: ignore[union-attr]
        return results

    return do


CHOICES = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]


class Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one.clone() for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None,) * len(gradients)


@pytest.mark.parametrize("count", [1, 2])
def test_results_whose_gradients_end_behind_them(count: int) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = self.linear(x).tanh()
            return tuple(hidden * (i + 2) for i in range(count))

    def step(call: Any, module: nn.Module) -> Any:
        module.zero_grad()
        results = Stopped.apply(*call(x))
        sum(one.sum() for one in results).backward()
        assert module.linear.weight.grad is None and x.grad is None
        return results

    x = torch.randn(2, WIDTH, generator=seeded(0)).requires_grad_()
    model = Both(Shared())
    with on_ort(graphs=1):
        for _ in range(3):  # the first step goes AOTAutograd's way
            model.step(step)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("chosen", CHOICES)
def test_a_loss_of_some_results(chosen: tuple[int, ...], dynamic: bool) -> None:
    model = Both(Decoder(), dynamic=dynamic)
    with on_ort(graphs=range(1, 3)):  # PyTorch compiles again where parameters have gradients, if their sizes may change
        for i in range(3):  # the first step goes AOTAutograd's way
            model.step(_step(chosen, TOKENS[:, : ROWS - i].contiguous() if dynamic else TOKENS))


def test_a_loss_of_others_at_each_step() -> None:
    model = Both(Decoder())
    with on_ort(graphs=1):
        for chosen in [(0, 1, 2), *CHOICES, (0,)]:
            model.step(_step(chosen, TOKENS))


@pytest.mark.parametrize("chosen", CHOICES)
def test_none_for_what_no_gradient_reaches(chosen: tuple[int, ...]) -> None:
    model = Both(Apart())
    with on_ort(graphs=1):
        for _ in range(3):
            model.step(_step(chosen, torch.ones(4, WIDTH)))
    assert (model.model.left.weight.grad is None) == (chosen == (1,))


class Waves(nn.Module):
    """Two results whose backwards compute sines again, each as soon as a gradient is there: that of either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)
        self.slow, self.fast = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.left(x), self.right(x)
        return left + torch.sin(self.slow * left).pow(2), right + torch.sin(self.fast * right).pow(2)


@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)])
def test_none_where_activations_are_computed_again(chosen: tuple[int, ...]) -> None:
    model = Both(Waves())
    with on_ort(graphs=1):
        for _ in range(2):
            model.step(_step(chosen, torch.ones(2048, WIDTH)))
    assert (model.model.left.weight.grad is None) == (chosen == (1,))


def test_a_second_backward_of_another_result() -> None:
    def do(call: Any, module: nn.Module) -> Any:
        module.zero_grad()
        left, right, _ = call(torch.ones(4, WIDTH))
        left.sum().backward(retain_graph=True)
        found = [one.grad is None for one in module.parameters()]
        right.sum().backward()
        return found

    model = Both(Apart())
    for _ in range(2):
        assert model.step(do) == [False, False, True, True]


def test_rows_of_a_batch_of_gradients() -> None:
    def do(call: Any, module: nn.Module) -> Any:
        _, logits, key = call(TOKENS)
        given = torch.arange(2 * key.numel(), dtype=key.dtype).view(2, *key.shape)
        return torch.autograd.grad(key, module.key.weight, given, is_grads_batched=True)

    model = Both(Decoder())
    for _ in range(2):
        model.step(do)


def test_no_zeros_are_made_for_them() -> None:
    model = Decoder()
    runner = compiled(model)
    runner(TOKENS)[0].backward()
    with torch.profiler.profile(record_shapes=True) as profile:
        loss = runner(TOKENS)[0]
        loss.backward()
    assert loss.grad_fn is not None and hasattr(loss.grad_fn, "run")
    made = [event for event in profile.events() if event.name in ("aten::zeros", "aten::full", "aten::fill_", "aten::zero_")]
    shapes = [shape for event in made for shape in event.input_shapes if shape]
    assert not [shape for shape in shapes if torch.Size(shape).numel() > ROWS], shapes


def test_no_zeros_are_made_for_what_was_written_to() -> None:
    """AOTAutograd puts the write back: this goes its way, in which autograd would make a gradient of zeros for the whole argument."""

    def write(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache[1:3] = x.tanh()
        return cache[:4].exp().sum(), cache.sum(1)

    runner = compiled(write, dynamic=False)
    for chosen in (0, 1):
        gradients = []
        for function in (write, runner):
            x = torch.randn(2, 4096, generator=seeded(0)).requires_grad_()
            result = function(torch.zeros(128, 4096), x)[chosen].sum()
            with torch.profiler.profile(record_shapes=True) as profile:
                result.backward()
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[1], gradients[0])
        shapes = [
            torch.Size(shape) for event in profile.events() if event.name in ("aten::fill_", "aten::zero_") for shape in event.input_shapes if shape
        ]
        assert not [shape for shape in shapes if shape.numel() >= 128 * 4096], shapes


def _joint_graph(model: nn.Module, *args: Any, **settings: Any) -> fx.Graph:
    seen: list[fx.GraphModule] = []
    compiled(model, options={"fx_passes": [lambda module: seen.append(copy.deepcopy(module))]}, **settings)(*args)
    return seen[0].graph


@torch.library.custom_op("ort_training_tests::shifted", mutates_args=())
def shifted(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x + by


shifted.register_fake(lambda x, by: torch.empty_like(x))
shifted.register_autograd(
    lambda ctx, grad: (grad + 0 * ctx.saved_tensors[0], None), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1])
)


@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_results_of_sizes_that_follow_from_values(chosen: tuple[int, ...]) -> None:
    def kept(x: torch.Tensor, mask: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x[mask]
        return shifted(rows, by), shifted(rows.sin(), by)

    runner = compiled(kept)
    for _ in range(2):
        sides = [torch.arange(6.0, requires_grad=True) for _ in range(2)]
        for call, x in zip((runner, kept), sides):
            results = call(x, x.detach() > 2, torch.ones(1))
            sum(results[i].sum() for i in chosen).backward()  # type: ignore[union-attr]
        same_gradients([sides[0]], [sides[1]])


class Reshaped(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.exp()
        return rows.sin().sum(), rows.view(-1, 2)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.exp()
        return rows.sum(), rows * 2


class Pictures(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.tanh(x).square().exp()
        return features.sin().cos().sum(), features


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)])
def test_results_in_another_memory_order(chosen: tuple[int, ...], dynamic: bool) -> None:
    runner = compiled(Pictures(), dynamic=dynamic)
    for _ in range(2):
        sides = [torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_() for _ in range(2)]
        for call, x in zip((runner, Pictures()), sides):
            results = call(x)
            sum(results[i].square().sum() for i in chosen).backward()  # type: ignore[union-attr]
        same_gradients([sides[0]], [sides[1]])


@single_session
@pytest.mark.parametrize(
    ("model", "dynamic", "count"), [(Decoder(), False, 2), (Decoder(), True, 2), (Reshaped(), False, 1), (Reshaped(), True, 0), (Scaled(), False, 0)]
)
def test_which_may_come_as_one_zero(model: nn.Module, dynamic: bool, count: int) -> None:
    args = (TOKENS,) if isinstance(model, Decoder) else (torch.randn(3, 4, requires_grad=True),)
    assert loosen_tangents(_joint_graph(model, *args, dynamic=dynamic)) == count


@pytest.mark.parametrize("model", [Reshaped(), Scaled()])
@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)])
def test_gradients_of_reshaped_and_scaled_results(model: nn.Module, chosen: tuple[int, ...]) -> None:
    runner = compiled(model)
    for _ in range(2):
        sides = [torch.ones(3, 4, requires_grad=True) for _ in range(2)]
        for call, x in zip((runner, model), sides):
            results = call(x)
            sum(results[i].sum() for i in chosen).backward()  # type: ignore[union-attr]
        same_gradients([sides[0]], [sides[1]])


@single_session
def test_a_large_reshaped_result_is_no_copy(tmp_path: Path) -> None:
    model = Both(Decoder(), options={"dump_dir": str(tmp_path)})
    results = model.step(_step((0,), TOKENS.clone()))  # PyTorch marks a tensor whose sizes it was told may change
    graph = onnx.load(onnx_files(tmp_path, "graph_*")[-1]).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    _, logits, key = next(node for node in graph.node if node.op_type == "YieldOp").input
    assert results[1].numel() >= 1 << 14 > results[2].numel()
    assert (makers[logits], makers[key]) == ("Gemm", "Reshape")


def test_a_reshaped_result_may_be_written_to() -> None:
    def do(call: Any, module: nn.Module) -> Any:
        loss, logits, _ = call(TOKENS)
        logits.add_(1)
        loss.backward()
        return logits.detach()

    model = Both(Decoder())
    for _ in range(2):
        model.step(do)


class Saved(nn.Module):
    """A large reshaped result whose memory the backward wants to read; batch normalization is for AOTAutograd's way of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(256)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.norm(x).exp()
        return rows.view(-1, 8, 256), rows.sin().sum()


@single_session  # without training kernels it is one memory, as with every backend of PyTorch
@pytest.mark.parametrize("normalized", [False, True])
def test_a_write_to_a_reshaped_result_does_not_reach_the_backward(normalized: bool) -> None:
    model = Saved()
    if not normalized:
        model.norm = nn.Identity()  # type: ignore[assignment]
    runner = compiled(copy.deepcopy(model))
    for _ in range(3):
        sides = [torch.linspace(-1, 1, 64 * 256).view(64, 256).requires_grad_() for _ in range(2)]
        for call, x in zip((runner, model), sides):
            rows, loss = call(x)
            if call is runner:  # eager PyTorch refuses it
                rows.zero_()
            loss.backward()
        same_gradients([sides[0]], [sides[1]])


def test_two_shapes_of_one_result_share_memory_as_in_eager() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.exp()
        return rows, rows.view(-1)

    runner = compiled(both)
    for _ in range(2):
        rows, flat = runner(torch.randn(128, 256))
        flat.zero_()
        assert not rows.any()


@single_session  # without training kernels they share it, as with every backend of PyTorch
def test_a_gradient_that_is_a_reshape_has_memory_of_its_own() -> None:
    """Two parameters get the same gradient in two shapes; optimizers write to gradients."""

    def loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first.view(-1) + second).sin().sum()

    runner = compiled(loss)
    for _ in range(2):
        first, second = torch.randn(128, 256, requires_grad=True), torch.randn(128 * 256, requires_grad=True)
        runner(first, second).backward()
        assert first.grad is not None and second.grad is not None
        torch.testing.assert_close(first.grad.view(-1), second.grad)
        before = second.grad.clone()
        first.grad.zero_()
        assert torch.equal(second.grad, before)


def test_the_only_results_are_what_was_written_to() -> None:
    """Autograd's node is found from there, too: what nothing was made of has no gradient."""

    def step(total: torch.Tensor, weight: torch.Tensor, idle: torch.Tensor, returns: bool) -> Any:
        with torch.no_grad():
            idle.mul_(2)
        total.copy_(weight)
        return total.view(-1) if returns else None

    for returns in (True, False):
        with on_ort(graphs=1):
            runner = compiled(step)
            for function in (runner, step):
                total, weight, idle = torch.zeros(3, 4), torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
                function(total, weight, idle, returns)
                total.sum().backward()
                assert idle.grad is None and torch.equal(idle, torch.full((2,), 2.0))
                assert torch.equal(weight.grad, torch.full((4,), 3.0))
