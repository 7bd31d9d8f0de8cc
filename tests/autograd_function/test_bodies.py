"""Whatever the Python of a Function does, it is one opaque call in one graph, for fixed and for changing sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from autograd_function.harness import same_as_eager
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

seen: list[str] = []


class Sine(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Affine(Function):
    """Arguments that are no tensors."""

    @staticmethod
    def forward(ctx, x, alpha, mode, dims, flag=None):
        ctx.alpha, ctx.mode = alpha, mode
        y = x * alpha if mode == "mul" else x + alpha
        return y.sum(dims, keepdim=True).expand_as(x).contiguous() if flag is None else y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.alpha if ctx.mode == "mul" else g, None, None, None, None


class Three(Function):
    @staticmethod
    def forward(ctx, x, w):
        y = x @ w
        z = y.relu()
        ctx.save_for_backward(x, w, z)
        return y, z, z > 0

    @staticmethod
    def backward(ctx, gy, gz, gm):
        x, w, z = ctx.saved_tensors
        g = gy + gz * (z > 0)
        return g @ w.t(), x.t() @ g


class Attributes(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.shape, ctx.n, ctx.t, ctx.need = x.shape, x.numel(), x * 2, ctx.needs_input_grad
        ctx.save_for_backward(w)
        return (ctx.t * w).sum() / ctx.n

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        first = (g * 2 * w / ctx.n).expand(ctx.shape).clone() if ctx.need[0] else None
        return first, (g * ctx.t / ctx.n).sum(0) if ctx.need[1] else None


class Sort(Function):
    @staticmethod
    def forward(ctx, x):
        values, places = x.sort(-1)
        ctx.mark_non_differentiable(places)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(ctx, gv, gi):
        (places,) = ctx.saved_tensors
        return None if gv is None else torch.zeros_like(gv).scatter(-1, places, gv)


class Numpy(Function):
    """Leaves PyTorch, and has a side effect."""

    @staticmethod
    def forward(ctx, x, k):
        seen.append("forward")
        ctx.array, ctx.k = x.detach().cpu().numpy(), k
        return torch.from_numpy(np.sin(ctx.array) * np.float32(k)).to(x.device)

    @staticmethod
    def backward(ctx, g):
        seen.append("backward")
        return torch.from_numpy(np.cos(ctx.array) * g.cpu().numpy() * np.float32(ctx.k)).to(g.device), None


class Item(Function):
    """Branches on the data."""

    @staticmethod
    def forward(ctx, x):
        largest = x.abs().max().item()
        ctx.scale = largest if largest > 1 else 1.0
        return x / ctx.scale

    @staticmethod
    def backward(ctx, g):
        return g / ctx.scale


class Separate(Function):
    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Flat(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx, g):
        return g.view(ctx.shape)


class Straight(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.scale * g, None


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class Dropout(Function):
    @staticmethod
    def forward(ctx, x, p):
        mask = (torch.rand_like(x) > p).to(x.dtype) / (1 - p)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask, None


class Product(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, g * a


class Containers(Function):
    @staticmethod
    def forward(ctx, x, settings, pair):
        ctx.save_for_backward(*pair)
        return x * settings["scale"] + pair[0] * pair[1]

    @staticmethod
    def backward(ctx, g):
        return g * 2.0, None, None


class Double(Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


CASES: dict[str, tuple[Any, int]] = {
    "saves its input": (lambda x, w: Sine.apply(x), 1),
    "constants": (lambda x, w: Affine.apply(x, 0.1, "mul", [0, 1], None), 1),
    "three outputs": (lambda x, w: Three.apply(x, w), 1),
    "three outputs, one used": (lambda x, w: Three.apply(x, w)[1] * 2, 1),
    "ctx attributes": (lambda x, w: Attributes.apply(x, w[0]), 1),
    "not differentiable output": (lambda x, w: Sort.apply(x)[0] * Sort.apply(x)[1], 2),
    "numpy": (lambda x, w: Numpy.apply(x, 1.5), 1),
    "branches on data": (lambda x, w: Item.apply(x), 1),
    "setup_context": (lambda x, w: Separate.apply(x, w[0]), 1),
    "returns a view": (lambda x, w: Flat.apply(x), 1),
    "straight through": (lambda x, w: Straight.apply(x), 1),
    "reversed gradient": (lambda x, w: Reverse.apply(x, 0.3), 1),
    "once_differentiable": (lambda x, w: Once.apply(x), 1),
    "draws random numbers": (lambda x, w: torch.dropout(Dropout.apply(torch.dropout(x, 0.5, True), 0.5), 0.5, True), 1),
    "one tensor twice": (lambda x, w: Product.apply(x, x), 1),
    "containers": (lambda x, w: Containers.apply(x, {"scale": 2.0}, [w[0], w[1]]), 1),
    "in place": (lambda x, w: Double.apply(x), 1),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_one_graph_with_eagers_results(name: str, dynamic: bool) -> None:
    function, count = CASES[name]

    def model(x, w):
        return function(x * 2.0, w)

    sweep = [[(6, 5), (5, 5)], [(3, 5), (5, 5)]] if dynamic else []
    graphs = same_as_eager(model, (4, 5), (5, 5), sweep=sweep, functions=count, fullgraph=True, dynamic=dynamic)
    assert len(graphs) == 1
    assert all(one.is_choice for one in graphs[0].outside) or name == "draws random numbers"


class Reversible(Function):
    """Keeps its result alone: the backward computes the input again, and adds to the gradients of its block's parameters itself."""

    @staticmethod
    def forward(ctx, x, block, numpy):
        ctx.block = block
        if numpy:  # it does not run on fake tensors then
            x.detach().cpu().numpy()
        y = x + block(x.detach().mean(0, keepdim=True).expand_as(x))
        ctx.x = x.detach()
        return y

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.x.mean(0, keepdim=True).expand_as(ctx.x)
            torch.autograd.backward(ctx.block(x), g)
        return g, None, None


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.BatchNorm1d])
def test_a_backward_that_adds_to_gradients_itself(norm: type[torch.nn.Module], numpy: bool) -> None:
    found = []
    for compile_it in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(5, 5), norm(5))
        block[0].weight.grad = torch.ones(5, 5)  # of a step before

        def model(x, block=block):
            return Reversible.apply(x * 2.0, block, numpy).square()

        run = torch.compile(model, backend="ort_training", fullgraph=True) if compile_it else model
        x = torch.linspace(-1, 1, 20).view(4, 5).requires_grad_()
        for _ in range(2):
            run(x).sum().backward()
        found.append(([x.grad, *(one.grad for one in block.parameters())], dict(block.state_dict())))
    torch.testing.assert_close(*found)


class Implicit(Function):
    """Differentiates a block that it gets, at a point alone: gradients of the parameters that it saves, or of those among its attributes."""

    @staticmethod
    def forward(ctx, block, unused, x, *parameters):
        ctx.block, ctx.unused, ctx.parameters = block, unused, list(parameters)
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, g):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.block(x)
        wanted = (x, *(ctx.parameters if ctx.unused else parameters))
        return None, None, *torch.autograd.grad(y, wanted, g, allow_unused=ctx.unused)


class Layer(torch.nn.Module):
    def __init__(self, unused: bool, checkpointed: bool) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh())
        self.unused, self.checkpointed = unused, checkpointed

    def layer(self, x):
        return Implicit.apply(self.block, self.unused, x * 2.0, *self.block.parameters()).sin()

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("unused", [False, True], ids=["saved", "attribute"])
def test_gradients_of_parameters_that_a_block_reads_by_itself(unused: bool, checkpointed: bool) -> None:
    found = []
    for compile_it in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Layer(unused, checkpointed)
        run = torch.compile(model, backend="ort_training", fullgraph=True) if compile_it else model
        gradients = []
        for step in range(4):
            if step == 2:  # the graph stays, the parameter is another
                model.block[0].weight = torch.nn.Parameter(torch.linspace(-1, 1, 25).view(5, 5))
            model.zero_grad()
            x = torch.randn(4 + step, 5, requires_grad=True)
            y = run(x).sum()
            y.backward(retain_graph=step == 3)
            if step == 3:
                y.backward()
            gradients += [x.grad, *(one.grad for one in model.parameters())]
        found.append(gradients)
    torch.testing.assert_close(*found)


class Remembering(torch.nn.Module):
    """Keeps what it made in its first call, in each of the places there are for it, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings = torch.nn.Linear(4, 4), Settings()
        self.table, self.tables, self.listed, self.calls = None, {}, [], 0
        self.register_buffer("buffer", None)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        if self.table is None:
            self.table = self.tables[4] = torch.arange(4.0)
            self.settings.table = self.buffer = torch.ones(4)
            self.listed.append(self.table)
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        return self.linear(x) * self.table * self.buffer + self.settings.table * self.tables[4] * self.listed[0] + self.mean


class Settings:
    table: Any = None


class Called(Function):
    """Calls what it gets, in its forward and in its backward, and draws a number."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module, ctx.scale = module, np.random.rand()
        ctx.save_for_backward(x)
        return module(x) * ctx.scale

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.module(x).backward(g * ctx.scale)
        return x.grad, None


@pytest.mark.parametrize("numpy", [False, True], ids=["fake", "numpy"])
def test_nothing_of_the_run_that_tries_it_out_stays_with_a_module(numpy: bool) -> None:
    class Tried(Called):
        @staticmethod
        def forward(ctx, x, module):
            return Called.forward(ctx, torch.from_numpy(x.numpy()) if numpy else x, module)

    found = []
    for compile_it in (True, False):
        torch.manual_seed(0)
        np.random.seed(0)
        module = Remembering()
        run = torch.compile(Tried.apply, backend="ort_training", fullgraph=True) if compile_it else Tried.apply
        results = []
        for size in (3, 5, 7):
            x = torch.randn(size, 4, requires_grad=True)
            y = run(x, module)
            y.sum().backward()
            results += [y, x.grad, module.calls, module.mean.clone(), len(module.listed)]
        found.append([*results, module.linear.weight.grad, module.table, module.settings.table, np.random.rand()])
    torch.testing.assert_close(*found)


def test_hooks_on_parameters_do_not_run_where_a_backward_is_tried_out() -> None:
    found = []
    for compile_it in (True, False):
        torch.manual_seed(0)
        np.random.seed(0)
        module, seen = torch.nn.Linear(4, 4), []
        optimizers = {one: torch.optim.Adam([one]) for one in module.parameters()}

        def update(parameter, optimizers=optimizers):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for one in module.parameters():
            one.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))
            one.register_post_accumulate_grad_hook(update)
        run = torch.compile(Called.apply, backend="ort_training", fullgraph=True) if compile_it else Called.apply
        for size in (3, 5):
            run(torch.randn(size, 4, requires_grad=True), module).sum().backward()
        found.append([*seen, *module.parameters(), *(len(one.state) for one in optimizers.values())])
    torch.testing.assert_close(*found)


class Polynomial:
    def __init__(self, a: torch.Tensor) -> None:
        self.a = a

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x).tanh()


def test_a_gradient_of_what_eager_pytorch_computed_that_an_object_has() -> None:
    found = []
    for compile_it in (True, False):
        torch._dynamo.reset()
        w, x = torch.linspace(-1, 1, 5).requires_grad_(), torch.linspace(-1, 1, 15).view(3, 5)
        step = lambda f, x: Implicit.apply(f, False, x * 2.0, f.a).square()  # noqa: E731
        run = torch.compile(step, backend="ort_training", fullgraph=True) if compile_it else step
        run(Polynomial(w * 2.0), x).sum().backward()
        found.append(w.grad)
    torch.testing.assert_close(*found)


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, weight):
        seen.append(type(x).__name__)
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g * weight, (g * x).sum(0)


def test_layers_that_differ_in_their_parameters_alone_are_tried_out_once() -> None:
    seen.clear()
    weights = [torch.full((5,), float(i), requires_grad=True) for i in range(1, 4)]

    def step(x):
        for weight in weights:
            x = Scaled.apply(x, weight)
        return x.sum()

    torch.compile(step, backend="ort_training", fullgraph=True)(torch.ones(3, 5, requires_grad=True)).backward()
    assert seen.count("FakeTensor") == 1
    assert [weight.grad.tolist() for weight in weights] == [[18.0] * 5, [9.0] * 5, [6.0] * 5]


class Out(Function):
    """Writes into memory that it makes, on zeros when it is compiled."""

    @staticmethod
    def forward(ctx, x):
        x.detach().cpu().numpy()
        return torch.mul(x, 2, out=torch.empty(0, device=x.device))

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_an_out_argument_that_grows() -> None:
    same_as_eager(lambda x, w: Out.apply(x * 2.0), (4, 5), (5, 5), functions=1, fullgraph=True)


@pytest.mark.cpu_only(reason="arrays of NumPy in a traced body")
def test_side_effects_happen_once_a_step() -> None:
    compiled = torch.compile(lambda x: Numpy.apply(x, 2.0).sum(), backend="ort_training")
    x = torch.ones(3, requires_grad=True)
    compiled(x).backward()
    seen.clear()
    for _ in range(3):
        compiled(x).backward()
    assert seen == ["forward", "backward"] * 3
