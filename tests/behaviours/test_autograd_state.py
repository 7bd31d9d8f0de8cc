"""Gradients, their flags, hooks and pending forwards behave as in eager, step after step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import Both, call, compiled, if_on_cuda, on_ort, same_as_eager, same_gradients, same_module, same_tree, twin
from default_device import DEVICE, seeded
from torch import nn
from torch.nn import functional as F
from torch_version import GUARDS_PARAMETERS, TORCH


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*(shape or (4, 3)), generator=seeded(seed))
    return made.requires_grad_()


A, B = tensor(), tensor(seed=1)
X = A.detach()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_step(x: torch.Tensor = X) -> Callable[[Any, nn.Module], Any]:
    def do(runner: Any, module: nn.Module) -> torch.Tensor:
        module.zero_grad()
        loss = runner(x).sin().square().mean()
        loss.backward()
        return loss.detach()

    return do


def test_the_gradient_of_an_input() -> None:
    same_as_eager(mlp(), call(A), graphs=1)
    same_as_eager(mlp(), call(X), graphs=1)


def test_an_input_may_begin_and_cease_to_require_grad() -> None:
    ran = same_as_eager(mlp(), call(X), call(A), call(X), call(A), graphs=2, repeat=1)
    assert [graph.counts.backward for graph in ran.graphs] == [2, 2]


def test_freezing_and_unfreezing_parameters_between_steps() -> None:
    both = Both(mlp())
    with on_ort(graphs=range(2, 4) if TORCH >= GUARDS_PARAMETERS else 1):
        for frozen in (False, True, False, True):
            for _, module in both.sides:
                module[0].weight.requires_grad_(not frozen)
            for _ in range(2):

                def do(runner: Any, module: nn.Module) -> Any:
                    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
                    return loss_step()(runner, module), optimizer.step()

                before = both.model[0].weight.detach().clone()
                both.step(do)
                assert torch.equal(before, both.model[0].weight) == frozen
                assert (both.model[0].weight.grad is None) == frozen


class Spare(nn.Module):
    """Parameters that the forward does not use: the first, one in the middle, and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.linear = nn.Linear(3, 4)
        self.spare = nn.Linear(9, 9)
        self.head = nn.Linear(4, 2)
        self.last = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.linear(x).relu())


@pytest.mark.parametrize("frozen", [(), ("first",), ("linear.weight",), ("head.bias", "last"), ("linear.weight", "linear.bias")])
def test_frozen_and_unused_parameters_have_no_gradient(frozen: tuple[str, ...]) -> None:
    model = Spare()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    same_as_eager(model, call(X), graphs=1)
    assert all(model.get_parameter(name).grad is None for name in (*frozen, "first", "spare.weight", "last"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_graph_has_no_backward(mode: Any) -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    with on_ort(graphs=1, forwards=2) as ran, mode():
        runner = compiled(model)
        for x in (X, B.detach()):
            result = runner(x)
            same_tree(result, reference(x))
            assert result.is_inference() == (mode is torch.inference_mode) and not result.requires_grad
    assert ran.graphs[0].kind == "inference"


def test_eval_with_gradients_enabled_still_trains() -> None:
    ran = same_as_eager(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval(), call(A), graphs=1)
    assert ran.graphs[0].kind == "training"


def test_grad_mode_may_alternate() -> None:
    both = Both(mlp())
    with on_ort(graphs=2, forwards=6, backwards=3):
        for i in range(6):
            if i % 2:
                both.step(loss_step())
            else:
                with torch.no_grad():
                    both.step(lambda runner, module: runner(X))


class Modes(nn.Module):
    """Dropout, batch norm, and one result more in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.drop(self.norm(self.linear(x)))
        return (hidden, hidden.square().mean()) if self.training else hidden


def test_train_and_eval_may_alternate() -> None:
    both = Both(Modes())
    with on_ort(graphs=2, forwards=8):
        for i in range(8):
            for runner, module in both.sides:
                runner.train(i % 2 == 0)
                assert module.training == (i % 2 == 0)
            before = both.model.norm.running_mean.clone()

            def do(runner: Any, module: nn.Module) -> Any:
                module.zero_grad()
                result = runner(X)
                sum(part.sin().mean() for part in (result if isinstance(result, tuple) else (result,))).backward()
                return result

            both.step(do)
            assert torch.equal(before, both.model.norm.running_mean) == (i % 2 == 1)


def test_compiled_modules_in_a_chain() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    references = copy.deepcopy((first, second))
    with on_ort(graphs=2, forwards=4, backwards=4):
        one, other = compiled(first), compiled(second)
        for _ in range(2):
            x, y = twin(A), twin(A)
            other(one(x).relu()).square().sum().backward()
            references[1](references[0](y).relu()).square().sum().backward()
            same_gradients([x], [y])
            same_module(first, references[0])
            same_module(second, references[1])


def test_compiled_modules_between_plain_ones() -> None:
    both = Both(nn.Linear(3, 4))
    before, after = nn.Linear(3, 3), nn.Linear(4, 2)
    with on_ort(graphs=1):

        def do(runner: Any, module: nn.Module) -> Any:
            before.zero_grad()
            after(runner(before(X)).tanh()).square().sum().backward()
            return [p.grad.clone() for p in before.parameters()]

        both.step(do)


def test_two_compiled_modules_over_one_backbone() -> None:
    class Task(nn.Module):
        def __init__(self, backbone: nn.Module, size: int) -> None:
            super().__init__()
            self.backbone, self.head = backbone, nn.Linear(5, size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(x).relu())

    backbone = nn.Linear(3, 5)
    tasks = (Task(backbone, 2), Task(backbone, 7))
    references = copy.deepcopy(tasks)
    assert references[0].backbone is references[1].backbone
    with on_ort(graphs=2):
        runners = [compiled(task) for task in tasks]
        for _ in range(2):
            for sides in (runners, references):
                sum(side(X).square().sum() for side in sides).backward()
            for task, reference in zip(tasks, references, strict=True):
                same_module(task, reference)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_accumulate_over_micro_batches(autocast: bool) -> None:
    both = Both(mlp())
    context = torch.autocast(DEVICE, torch.bfloat16) if autocast else contextlib.nullcontext()
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if autocast else {}
    with on_ort(graphs=1, forwards=4):
        for seed in range(4):
            for runner, _ in both.sides:
                with context:
                    loss = F.mse_loss(runner(tensor(seed=seed).detach()), torch.ones(4, 2))
                (loss / 4).backward()
            same_module(both.model, both.reference, **tolerance)
    assert both.model[0].weight.grad.dtype == torch.float32


def test_gradients_of_some_inputs_only() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() * y.exp()).sum()

    with on_ort(graphs=1, backwards=3):
        step = compiled(function)
        for pick in ([0], [1], [1, 0]):
            grads = [torch.autograd.grad(side(A, B), [(A, B)[i] for i in pick]) for side in (step, function)]
            same_tree(*grads)
    assert A.grad is None and B.grad is None


def test_a_gradient_of_what_is_not_used_is_none_if_allowed() -> None:
    with on_ort(graphs=1):
        result = compiled(lambda x, y: x.sin())(A, B).sum()
        found, missing = torch.autograd.grad(result, [A, B], allow_unused=True)
        assert missing is None
        same_tree(found, A.detach().cos())


def test_gradients_with_given_vectors() -> None:
    vector = torch.randn(4, 3)
    with on_ort(graphs=1):
        grads = [torch.autograd.grad(side(A), A, vector) for side in (compiled(torch.sin), torch.sin)]
        same_tree(*grads)


def test_hooks_fire_with_eagers_values() -> None:
    both = Both(mlp())
    for _, module in both.sides:
        module.seen = []
        seen = module.seen
        module[0].weight.register_hook(lambda grad, seen=seen: seen.append(("weight", grad.clone())) or grad * 2)
        module[2].bias.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(("bias", p.grad.clone())))
    with on_ort(graphs=1):

        def do(runner: Any, module: nn.Module) -> Any:
            module.seen.clear()
            x = twin(A)
            x.register_hook(lambda grad: module.seen.append(("input", grad.clone())))
            result = runner(x)
            result.register_hook(lambda grad: module.seen.append(("result", grad.clone())) or grad * 3)
            result.square().sum().backward()
            return x.grad, dict(sorted(module.seen))

        _, seen = both.step(do)
    assert list(seen) == ["bias", "input", "result", "weight"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_hooks_on_what_the_loss_does_not_reach(dynamic: bool) -> None:
    """Eager PyTorch does not call them; here they see zeros, not None."""
    w, seen = torch.ones(3, requires_grad=True), []
    w.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    with on_ort(graphs=1):
        step = compiled(lambda x, w: (x.sin(), x * w), dynamic=dynamic)
        step(A, w)[0].sum().backward(inputs=[A, w])
        same_tree(seen, [torch.zeros(3)])
        step(A, w)[1].sum().backward(inputs=[w])
        same_tree(w.grad, 2 * A.detach().sum(0))
    A.grad = None


def test_hooks_on_the_compiled_module() -> None:
    both = Both(mlp())
    with on_ort(graphs=1):

        def do(runner: Any, module: nn.Module) -> Any:
            seen: list[Any] = []
            handles = [
                runner.register_forward_pre_hook(lambda m, args: seen.append(args) or (args[0] * 2,)),
                runner.register_forward_hook(lambda m, args, result: seen.append(result.detach().clone()) or result + 1),
            ]
            runner(X).square().sum().backward()
            for handle in handles:
                handle.remove()
            return seen

        assert len(both.step(do)) == 2  # a backward hook of a compiled module fires in no backend of torch.compile


def test_hooks_on_a_module_inside() -> None:
    model = mlp()
    model[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model[2].register_forward_hook(lambda m, args, result: result * 2)
    same_as_eager(model, call(A), graphs=1)


def test_a_double_backward_is_a_clear_error() -> None:
    with on_ort(graphs=1):
        (grad,) = torch.autograd.grad(compiled(lambda x: (x**3).sum())(A), A, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward|does not require grad|twice"):
            grad.sum().backward()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-5),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-5, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-5, fused=True),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_loop_follows_eager(name: str, set_to_none: bool) -> None:
    both = Both(mlp())
    optimizers = {id(module): OPTIMIZERS[name](module.parameters()) for _, module in both.sides}
    schedulers = {key: torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for key, one in optimizers.items()}
    with on_ort(graphs=1, forwards=8, backwards=8):
        losses = []
        for seed in range(8):

            def do(runner: Any, module: nn.Module, seed: int = seed) -> Any:
                optimizers[id(module)].zero_grad(set_to_none=set_to_none)
                loss = F.mse_loss(runner(tensor(8, 3, seed=seed).detach()), torch.ones(8, 2))
                loss.backward()
                norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizers[id(module)].step()
                schedulers[id(module)].step()
                return loss.detach(), norm

            losses.append(both.step(do)[0].item())
    assert losses[-1] < losses[0]


class Counting(nn.Module):
    """Buffers that the forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("newest", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(x))
        if self.training:
            self.steps += 1
            self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            self.newest = hidden.detach().amax(0)
        return hidden * self.steps


def test_buffers_updated_in_the_forward() -> None:
    both = Both(Counting())
    address = both.model.average.data_ptr()
    with on_ort(graphs=2, python_ops=if_on_cuda("aten::amax")):
        for i in range(6):
            for runner, _ in both.sides:
                runner.train(i < 4)
            both.step(loss_step(tensor(seed=i).detach()))
    assert both.model.steps == 4 and both.model.norm.num_batches_tracked == 4
    assert both.model.average.data_ptr() == address


def test_values_loaded_or_put_in_between_steps_are_used() -> None:
    both = Both(mlp())
    other = mlp().state_dict()

    def replace(module: nn.Module) -> None:
        module[0].weight.data = other["0.weight"] * 2

    def new_parameter(module: nn.Module) -> None:
        module[2].weight = nn.Parameter(other["2.weight"] * 3)

    def in_place(module: nn.Module) -> None:
        with torch.no_grad():
            module[2].bias.copy_(torch.ones(2))

    def swap(module: nn.Module) -> None:
        module[0] = nn.Linear(3, 5, bias=False)
        module[0].weight.data = other["0.weight"].clone()

    with on_ort(graphs=range(1, 4)):
        both.step(loss_step())
        for change in (lambda m: m.load_state_dict(other), replace, new_parameter, in_place, lambda m: m.load_state_dict(other, assign=True), swap):
            for _, module in both.sides:
                change(module)
            both.step(loss_step())


def test_a_change_of_dtype_between_steps() -> None:
    both = Both(mlp())
    with on_ort(graphs=2):
        both.step(loss_step())
        for _, module in both.sides:
            module.double()
        loss = both.step(loss_step(X.double()))
        assert loss.dtype == torch.float64
