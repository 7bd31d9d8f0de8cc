"""Operators of a user's that read strides, and those that change views: they get tensors as they lie in memory in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import call, on_ort, same_as_eager, same_tree, single_session
from torch import Tensor, nn
from torch._higher_order_ops import while_loop


@torch.library.custom_op("strides::numbers", mutates_args=())
def numbers(x: Tensor) -> Tensor:
    return torch.tensor(x.stride(), dtype=torch.float32)


@numbers.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.dim())


@torch.library.custom_op("strides::in_order", mutates_args=(), tags=(torch.Tag.needs_contiguous_strides,))
def in_order(x: Tensor) -> Tensor:
    return torch.tensor(x.stride(), dtype=torch.float32)


@in_order.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.dim())


@torch.library.custom_op("strides::scale", mutates_args=("x",))
def scale(x: Tensor, by: Tensor) -> None:
    x.mul_(by)


@torch.library.custom_op("strides::add", mutates_args=("x",))
def add_strides(x: Tensor, of: Tensor) -> None:
    x.add_(torch.tensor(of.stride()))


MUTABLE = ("auto_functionalized_v2",)


def test_an_operator_sees_the_strides_of_eager() -> None:
    def function(x: Tensor, picture: Tensor) -> tuple[Tensor, ...]:
        return numbers(x.t() * 2), numbers((x @ x.t()).t()), numbers(x.t().contiguous()), numbers(picture.relu())

    picture = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    same_as_eager(function, call(torch.randn(3, 4), picture), train=False, python_ops=["strides::numbers"])


@single_session  # between sessions it gets eager's strides, as any
def test_an_operator_that_asks_for_contiguous_tensors() -> None:
    x = torch.randn(3, 4)
    with on_ort(graphs=1, python_ops=["strides::in_order"]):
        made = torch.compile(lambda x: in_order(x.t() * 2), backend="ort_training")(x)
    assert made.tolist() == [3, 1]


def _of_permuted(x: Tensor, by: Tensor) -> Tensor:
    made = x.t() * 2
    scale(made[1], by)
    scale(made[:, 1:], by[1:])
    return made + 1


def _of_a_picture(x: Tensor, by: Tensor) -> Tensor:
    made = x[None, None].expand(2, 3, *x.shape).contiguous(memory_format=torch.channels_last).relu()
    scale(made[:, 1], by[:, None])
    return made + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [_of_permuted, _of_a_picture])
def test_views_of_what_is_not_contiguous_are_changed(function: Callable[..., Tensor], dynamic: bool) -> None:
    calls = [call(torch.randn(n, 4), torch.rand(n)) for n in (3, 5)]
    same_as_eager(function, *calls, train=False, dynamic=dynamic, python_ops=MUTABLE)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "of",
    [lambda memory: memory.t(), lambda memory: memory[3:], lambda memory: memory[::2, 1::2], lambda memory: memory[2:, 2:].t()],
    ids=["permuted", "behind others", "with gaps", "all of it"],
)
def test_views_of_an_input_that_is_a_view_are_changed(of: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    """What lies around the input in its memory stays as it is."""

    def function(x: Tensor, by: Tensor) -> Tensor:
        scale(x[0], by)
        scale(x.t()[1], by.sum())
        return x * 2

    run = torch.compile(function, backend="ort_training", dynamic=dynamic, fullgraph=True)
    with on_ort(graphs=1 if dynamic else 2, python_ops=MUTABLE):
        for n in (6, 8):
            memories = [torch.arange(n * (n + 2.0)).reshape(n, n + 2) for _ in range(2)]
            by = torch.linspace(1, 2, of(memories[0]).shape[1])
            same_tree(run(of(memories[0]), by), function(of(memories[1]), by))
            same_tree(memories[0], memories[1])


def test_what_stands_beside_a_view_that_is_changed() -> None:
    def function(x: Tensor, other: Tensor) -> Tensor:
        add_strides(x[1], other.t() * 2)
        return x + 1

    same_as_eager(function, call(torch.zeros(6, 4)[::2, ::2], torch.randn(3, 4)), train=False, python_ops=MUTABLE)


def test_buffers_that_are_views_in_training() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("kept", torch.ones(4, 3).t())

        def forward(self, x: Tensor) -> Tensor:
            scale(self.kept[1], x.detach().mean(0).abs())
            return self.layer(x) * self.kept[1] + self.kept.sum()

    same_as_eager(Model(), call(torch.randn(3, 4)), graphs=1, python_ops=MUTABLE)


def test_a_loop_that_addresses_memory() -> None:
    def function(x: Tensor) -> Tensor:
        def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, y + torch.as_strided(y, (4, 3), (1, 4)) + torch.as_strided(y, (4, 3), (3, 1))

        return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x.t() * 2))[1]

    same_as_eager(function, call(torch.randn(3, 4)), train=False, python_ops=["while_loop"])
