"""Memory, exceptions, threads: what a Function keeps lives as long as it must, and no longer."""

from __future__ import annotations

import gc
import re
import subprocess
import threading
import time
import traceback
from collections.abc import Callable

import pytest
import torch
from autograd_function.harness import leaves, same_as_eager
from behaviours.check import single_session
from default_device import on_this_thread, random_state
from heap import growth
from torch.autograd import Function

import ort_backend
from ort_backend.lowering.functions.function_site import SITES, Context
from ort_backend.runtime import capabilities


class Keeper(Function):
    """Keeps an input, an output, and what is neither; some of it in attributes."""

    @staticmethod
    def forward(ctx, x, i):
        y = x * 1.5 + i
        ctx.save_for_backward(x, y)
        ctx.half, ctx.pair = x / 2, [x, y]
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * (x.cos() + y.sin() + ctx.half + ctx.pair[0] * ctx.pair[1]), None


def contexts() -> int:
    gc.collect()
    return sum(isinstance(one, Context) for one in gc.get_objects())


def test_what_is_kept_is_not_overwritten() -> None:
    def model(x, w):
        for i in range(10):
            x = torch.relu(Keeper.apply(x @ w, i)) * 0.1 + x * 0.1
        return x

    same_as_eager(model, (4, 4), (4, 4), functions=10)


def test_what_the_users_code_holds_on_to_is_not_overwritten() -> None:
    held: list[torch.Tensor] = []

    class Leaks(Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            held.extend((x, y))
            return y

        @staticmethod
        def backward(ctx, g):
            held.append(g)
            return g * 2

    def model(x):
        for _ in range(4):
            x = torch.tanh(Leaks.apply(x * 1.1)) + 1
        return x

    compiled = torch.compile(model, backend="ort_training")
    (x,) = leaves((8,))
    compiled(x).sum().backward()
    kept = []
    for function in (model, compiled):
        held.clear()
        function(x).sum().backward()
        kept.append(list(held))
    torch.testing.assert_close(*kept)


def test_each_backward_sees_the_ctx_of_its_forward() -> None:
    compiled = torch.compile(lambda x: Keeper.apply(x.relu(), 3), backend="ort_training")
    inputs = [leaves((4,), seed=i)[0] for i in range(5)]
    outputs = [compiled(x) for x in inputs]
    for i in (3, 1, 4, 0, 2):
        outputs[i].sum().backward()
        (expected,) = torch.autograd.grad(Keeper.apply(inputs[i].relu(), 3).sum(), inputs[i])
        torch.testing.assert_close(inputs[i].grad, expected)
    assert contexts() == 0


def test_a_forward_without_backward_frees_what_it_kept() -> None:
    compiled = torch.compile(lambda x: Keeper.apply(x, 3), backend="ort_training")
    (x,) = leaves((4,))
    y = compiled(x)
    assert contexts() == 1
    del y
    assert contexts() == 0


@pytest.mark.parametrize("backward", [True, False])
def test_five_hundred_steps_are_flat(backward: bool) -> None:
    compiled = torch.compile(lambda x: Keeper.apply(Keeper.apply(x, 1), 2).sum(), backend="ort_training")
    (x,) = leaves((64, 1024))

    def step() -> None:
        y = compiled(x)
        if backward:
            y.backward()
            x.grad = None

    assert growth(step, 500) < 64 << 10


def test_a_second_backward_over_one_forward() -> None:
    class Drop(Function):
        @staticmethod
        def forward(ctx, x):
            mask = (torch.rand_like(x) > 0.5).float()
            ctx.save_for_backward(mask)
            return x * mask

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    compiled = torch.compile(lambda x: torch.dropout(Drop.apply(x * 2), 0.5, True), backend="ort_training")
    x = torch.ones(100, requires_grad=True)
    y = compiled(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    state = random_state()
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
    assert torch.equal(state, random_state())


def test_sites_die_with_their_graph() -> None:
    gc.collect()
    before = set(SITES)

    def run() -> None:
        torch.compile(lambda x: Keeper.apply(x, 1), backend="ort_training")(leaves((4,))[0]).sum().backward()

    run()
    assert set(SITES) - before
    torch._dynamo.reset()
    gc.collect()
    assert not set(SITES) - before


FIRST_MODEL = """
import gc, weakref
import torch
import ort_backend

class Object:
    pass

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, described):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 2, None

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.object = torch.nn.Linear(3, 3), Object()
    def forward(self, x):
        return Scale.apply(self.layer(x), {"of": self.object}).sum()

def train():
    model = Model()
    torch.compile(model, backend="ort_training", fullgraph=True)(torch.ones(2, 3)).backward()
    assert ort_backend.report().graphs[-1].functions == 1
    return weakref.ref(model), weakref.ref(model.object)

kept = train()
gc.collect()
print([one() is None for one in kept])
"""


def test_a_model_and_the_objects_that_its_functions_get_die(python: Callable[..., str]) -> None:
    """In a fresh process: the frame that first compiles is also the one that imports ONNX Runtime, which keeps frames."""
    assert python(FIRST_MODEL) == "[True, True]"


def test_a_process_ends_in_silence(fresh_process: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """With a model, its sessions and a Function still alive."""
    alive = "model = Model()\ntorch.compile(model, backend='ort_training')(torch.ones(2, 3)).backward()"
    errors = fresh_process(FIRST_MODEL + alive).stderr.splitlines()
    assert [line for line in errors if not re.search(r"Warning|^  |^[IW]\d{4} .*torch/", line)] == []


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_arrives_as_itself_and_the_next_step_works(where: str) -> None:
    class OwnError(Exception):
        pass

    failing: set[str] = set()

    class Fails(Function):
        @staticmethod
        def forward(ctx, x):
            if "forward" in failing:
                raise OwnError("in forward")
            return x * 2

        @staticmethod
        def backward(ctx, g):
            if "backward" in failing:
                raise OwnError("in backward")
            return g * 2

    compiled = torch.compile(lambda x: Fails.apply(x * 1).sum(), backend="ort_training")
    x = torch.ones(3, requires_grad=True)
    compiled(x).backward()
    for _ in range(2):
        failing.add(where)
        with pytest.raises(OwnError, match=f"in {where}") as caught:
            compiled(x).backward()
        assert f'raise OwnError("in {where}")' in "".join(traceback.format_exception(caught.value))
        failing.clear()
        x.grad = None
        compiled(x).backward()
        assert x.grad.tolist() == [2.0] * 3


def in_time(function, seconds: float = 60) -> None:
    """Runs it in a thread; fails where it hangs."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with on_this_thread():
                function()
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"
    if failed:
        raise failed[0]


class Slow(Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.001)  # lets other threads run
        return x * 2

    @staticmethod
    def backward(ctx, g):
        time.sleep(0.001)
        return g * 2


def test_threads_do_not_wait_for_each_other_for_ever() -> None:
    compiled = torch.compile(lambda x: Slow.apply(Slow.apply(x)), backend="ort_training")
    compiled(torch.ones(3, requires_grad=True)).sum().backward()

    def steps() -> None:
        for _ in range(10):
            x = torch.ones(3, requires_grad=True)
            compiled(x).sum().backward()
            assert x.grad.tolist() == [4.0] * 3

    threads = [threading.Thread(target=in_time, args=(steps,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("warm", [True, False])
def test_a_compiled_function_inside_does_not_wait_for_itself(warm: bool) -> None:
    inner = torch.compile(lambda x: Slow.apply(x).cos(), backend="ort_training")

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            return inner(x)

        @staticmethod
        def backward(ctx, g):
            return inner(g)

    if warm:
        inner(torch.ones(3))
    in_time(lambda: same_as_eager(lambda x: Outer.apply(x.relu()), (3,)))


@single_session
@pytest.mark.parametrize("aten", [False, True])
def test_a_graph_module_inside_is_counted(aten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dynamo does not stop: the compiled graph itself, called inside a `PythonOp`. With such nodes of its own it runs in eager PyTorch."""
    monkeypatch.setattr(capabilities, "has_aten_op", lambda: aten)
    graphs = []

    def keep(gm, example_inputs, **options):
        graphs.append(ort_backend.ort_training(gm, example_inputs))
        return graphs[-1]

    with torch.no_grad():
        torch.compile(lambda x: torch.linalg.svd(x)[1], backend=keep)(torch.eye(3))

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            return graphs[0](x.detach())[0].clone() if type(x) is torch.Tensor else x.new_empty(3)

        @staticmethod
        def backward(ctx, g):
            return None

    before = len(ort_backend.report().graphs)
    compiled = torch.compile(lambda x: Outer.apply(x), backend="ort_training")
    in_time(lambda: torch.testing.assert_close(compiled(torch.eye(3) * 2), torch.full((3,), 2.0)))
    counts = ort_backend.report().graphs[before - 1].counts
    assert (counts.eager, counts.forward) == ((0, 2) if aten else (1, 1))
