"""The API of torch.autograd.Function, and Functions among other things of PyTorch."""

from __future__ import annotations

import weakref

import pytest
import torch
from autograd_function.harness import leaves, same_as_eager
from default_device import DEVICE
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from torch_version import TORCH


class Scale(Function):
    @staticmethod
    def forward(ctx, x, factor=2.0):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


@torch.jit.script
def gelu_gradient(x: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    return 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)


def test_a_scripted_function_inside_and_a_gradient_of_ones_own() -> None:
    class Gelu(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.nn.functional.gelu(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * gelu_gradient(x) * 10  # not what autograd would say

    same_as_eager(lambda x, w: Gelu.apply(Gelu.apply(x @ w)) + x, (4, 3), (3, 3), functions=2)


def test_arguments_of_every_kind_arrive_as_what_they_are() -> None:
    arrived = []

    class Kinds(Function):
        @staticmethod
        def forward(ctx, i, f, x, b, ints, floats, bools, nothing, text, module, things):
            values = (i, f, b, ints, floats, bools, nothing, text, module, things)
            arrived.append([type(value) for value in values] + [i, f, b, ints, floats, bools, text, module])
            return x * f

        @staticmethod
        def backward(ctx, g):
            return None, None, g * 0.1, *[None] * 8

    module = nn.Linear(2, 2)
    same_as_eager(lambda x: Kinds.apply(3, 0.1, x, True, (1, 2), (0.5, 0.1), (True, False), None, "text", module, [1, None]), (3,), functions=1)
    assert len(arrived) >= 4
    assert all(one == arrived[0] for one in arrived)


def test_outputs_that_are_no_tensors_and_none_gradients() -> None:
    class Mixed(Function):
        @staticmethod
        def forward(ctx, x, y):
            fixed = x * 2
            ctx.mark_non_differentiable(fixed)
            return fixed, x + y, x.argmax(-1), None, "text", 3, x > 0

        @staticmethod
        def backward(ctx, *gradients):
            assert [gradient is None for gradient in gradients] == [False, False, False, True, True, True, False]
            return gradients[1], None

    same_as_eager(lambda x, y: Mixed.apply(x * 1, y), (4, 3), (4, 3), functions=1, fullgraph=True)


@pytest.mark.parametrize("materialize", [True, False])
def test_gradients_that_there_are_none_of(materialize: bool) -> None:
    class Two(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(materialize)
            return x * 2, x * 3, x > 0

        @staticmethod
        def backward(ctx, first, second, third):
            assert (second is None) == (not materialize)
            assert (third is None) == (not materialize)
            return first * 2

    same_as_eager(lambda x: Two.apply(x)[0], (4,), functions=1)


@pytest.mark.parametrize("materialize", [True, False])
def test_outputs_of_the_graph_that_nobody_differentiates(materialize: bool) -> None:
    arrived: list[tuple[bool, bool]] = []

    class Two(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(materialize)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            arrived.append((first is None, second is None))
            return first * 2 if first is not None else second * 3

    compiled = torch.compile(lambda x: Two.apply(x), backend="ort_training")
    for function in (Two.apply, compiled):
        x = torch.ones(3, requires_grad=True)
        function(x)
        arrived.clear()
        function(x)[0].sum().backward()
        assert arrived == [(False, not materialize)]
        assert x.grad.tolist() == [2.0] * 3


def test_no_differentiable_output() -> None:
    class Positive(Function):
        @staticmethod
        def forward(ctx, x):
            made = (x > 0).float()
            ctx.mark_non_differentiable(made)
            return made

        @staticmethod
        def backward(ctx, g):
            raise AssertionError

    same_as_eager(lambda x: x * Positive.apply(x), (4,), functions=1)


def test_an_output_that_is_an_input() -> None:
    class Same(Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, g):
            return g * 3

    same_as_eager(lambda x: Same.apply(x), (4,), functions=1)
    same_as_eager(lambda x: Same.apply(x * 2) + x, (4,), functions=1)


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("needs", [True, False])
def test_in_place(returned: bool, marked: bool, needs: bool) -> None:
    if marked and not returned:
        pytest.skip("PyTorch wants what is marked to be returned")

    class Write(Function):
        @staticmethod
        def forward(ctx, x, y):
            if marked:
                ctx.mark_dirty(y)
            y.add_(1)
            ctx.save_for_backward(x)
            return (x * 2, y) if returned else x * 2

        @staticmethod
        def backward(ctx, g, *rest):
            (x,) = ctx.saved_tensors
            return g * 2 + 0 * x, rest[0] if rest and needs else None

    def model(x, y):
        z = y * 3 if needs else (y * 3).detach()
        made = Write.apply(x, z)
        return (made[0] + made[1], z) if returned else (made, z)

    same_as_eager(model, (4,), (4,), functions=1)


def test_in_place_on_what_the_caller_holds() -> None:
    class Count(Function):
        @staticmethod
        def forward(ctx, x, counter):
            counter.add_(1)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2, None

    counter = torch.zeros(1)
    compiled = torch.compile(lambda x: Count.apply(x, counter) + counter, backend="ort_training")
    for i in range(1, 4):
        x = torch.ones(2, requires_grad=True)
        assert compiled(x).tolist() == [2 + i, 2 + i]
        assert counter.item() == i


@pytest.mark.skipif(TORCH < (2, 13), reason="apply() takes no keyword arguments before 2.13")
def test_keywords_as_pytorch_takes_them() -> None:
    same_as_eager(lambda x: Scale.apply(x, factor=3.0), (3,), functions=1)


def test_a_function_and_a_module_and_a_checkpoint_inside() -> None:
    layer = nn.Linear(3, 3)

    class Outer(Function):
        @staticmethod
        def forward(ctx, x, module):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = Scale.apply(checkpoint(lambda a: module(a).tanh(), ctx.x, use_reentrant=False), 2.0)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, g):
            ctx.y.backward(g)
            return ctx.x.grad, None

    same_as_eager(lambda x: Outer.apply(x.relu(), layer), (4, 3), functions=1)
    both = layer.weight.grad.clone()
    layer.zero_grad()
    (x,) = leaves((4, 3))
    Outer.apply(x.relu(), layer).backward((torch.arange(12) + 1.0).view(4, 3))
    torch.testing.assert_close(both, layer.weight.grad * 4)


def test_checkpoint_around_with_dropout() -> None:
    def block(x, w):
        return nn.functional.dropout(Scale.apply(x @ w, 1.5), 0.5)

    same_as_eager(lambda x, w: checkpoint(block, x, w, use_reentrant=False) * 2, (4, 3), (3, 3), functions=1)


def test_custom_fwd_and_bwd_under_autocast() -> None:
    dtypes = []

    class Product(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=DEVICE, cast_inputs=torch.float32)
        def forward(ctx, x, w):
            dtypes.append((x.dtype, torch.is_autocast_enabled(DEVICE)))
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type=DEVICE)
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    def model(x, w):
        with torch.autocast(DEVICE, torch.bfloat16):
            return Product.apply(x, w)

    same_as_eager(model, (4, 3), (3, 3), functions=1)
    assert set(dtypes) == {(torch.float32, False)}


def test_a_module_under_autocast() -> None:
    class Called(Function):
        @staticmethod
        def forward(ctx, x, module):
            return module(x)

        @staticmethod
        def backward(ctx, g):
            return g * 2, None

    gradients, module = [], nn.Linear(3, 3).to(DEVICE)
    for compile_it in (True, False):
        run = torch.compile(Called.apply, backend="ort_training", fullgraph=True) if compile_it else Called.apply
        (x,) = leaves((4, 3))
        with torch.autocast(DEVICE, torch.bfloat16):
            y = run(x, module)
            z = module(x)  # by the cast that the first call of the module has left
        z.sum().backward()
        gradients.append((y, z, *(one.grad.clone() for one in module.parameters())))
        module.zero_grad()
    torch.testing.assert_close(*gradients)


def test_hooks_on_outputs() -> None:
    def model(x):
        y = Scale.apply(x)
        y.register_hook(lambda g: g * 5)
        return y * 3

    graphs = same_as_eager(model, (3,))
    assert [graph.functions for graph in graphs] == [1]


def test_one_tensor_in_two_functions_and_classes_of_one_name() -> None:
    def define(factor):
        class Named(Function):
            @staticmethod
            def forward(ctx, x):
                return x * factor

            @staticmethod
            def backward(ctx, g):
                return g * factor

        return Named

    first, second = define(2.0), define(5.0)
    same_as_eager(lambda x: first.apply(x) - second.apply(x) * first.apply(x), (3,), functions=3)


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_without_gradients_nothing_is_kept(how: str) -> None:
    kept = []

    class Keeps(Function):
        @staticmethod
        def forward(ctx, x, w):
            kept.append(weakref.ref(ctx))
            ctx.save_for_backward(x)
            return x * w

        @staticmethod
        def backward(ctx, g):
            return g, g

    compiled = torch.compile(lambda x, w: Keeps.apply(x, w), backend="ort_training")
    x, w = torch.ones(3), torch.full((3,), 2.0, requires_grad=how == "no_grad")
    with torch.no_grad():
        y = compiled(x, w)
    assert y.tolist() == [2.0] * 3 and not y.requires_grad
    assert all(ctx() is None for ctx in kept)


def test_the_same_function_a_hundred_times() -> None:
    def model(x):
        for i in range(100):
            x = Scale.apply(x, 1 + i / 1000)
        return x

    same_as_eager(model, (5,), functions=100)


def test_order_is_the_users_also_where_nothing_uses_the_results() -> None:
    order = []

    class Note(Function):
        @staticmethod
        def forward(ctx, x, name):
            order.append(name)
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            order.append(ctx.name)
            return g, None

    def model(x):
        a = Note.apply(x, 1)
        Note.apply(x.detach(), 2)
        b = Note.apply(a * 2, 3)
        Note.apply(b, 4)
        return b

    compiled = torch.compile(model, backend="ort_training")
    compiled(torch.ones(2, requires_grad=True)).sum().backward()
    orders = []
    for function in (model, compiled):
        order.clear()
        made = function(torch.ones(2, requires_grad=True))
        order.append("backward")
        made.sum().backward()
        orders.append(list(order))
    assert orders[0] == orders[1]
