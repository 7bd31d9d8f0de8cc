"""Tensors that a Function takes and gives in another form than ONNX has them, and views that it writes to."""

from __future__ import annotations

import pytest
import torch
from autograd_function.harness import same_as_eager
from torch import Tensor
from torch.autograd import Function

SHAPES, MORE = [(3, 4), (3, 4)], [[(5, 2), (5, 2)], [(6, 3), (6, 3)]]


class Power(Function):
    """The squared modulus as a complex number, the real part, and the number turned round."""

    @staticmethod
    def forward(ctx, z, turn):
        assert z.is_complex()
        turned = z * turn
        ctx.save_for_backward(z, turned)
        ctx.turn = turn
        return z * z.conj(), z.real, turned

    @staticmethod
    def backward(ctx, of_power, of_real, of_turned):
        z, turned = ctx.saved_tensors
        assert z.is_complex() and turned.is_complex() and of_power.is_complex() and not of_real.is_complex()
        return 2 * z * of_power.real + of_real + of_turned * ctx.turn, None


class OnlyReal(Function):
    """Without a gradient for one result, and a real gradient of a complex number."""

    @staticmethod
    def forward(ctx, z):
        ctx.set_materialize_grads(False)
        return z.real.clone(), z.imag.clone()

    @staticmethod
    def backward(ctx, of_real, of_imaginary):
        assert of_imaginary is None
        return of_real


@pytest.mark.parametrize("dynamic", [False, True])
def test_complex_tensors(dynamic: bool) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        power, real, turned = Power.apply(torch.complex(a, b) * 2, 3)
        return power.real.sqrt(), real, turned.imag.sin()

    same_as_eager(function, *SHAPES, sweep=MORE, functions=1, dynamic=dynamic, fullgraph=True)


def test_complex_tensors_that_are_views() -> None:
    """Transposed, with a pending conjugation, and of double precision."""

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        power, real, turned = Power.apply(torch.complex(a.double(), b.double()).mT.conj(), 3)
        return power.real.float(), real.float() + turned.imag.float()

    same_as_eager(function, *SHAPES, functions=1, fullgraph=True)


def test_a_real_gradient_of_a_complex_tensor() -> None:
    same_as_eager(lambda a, b: OnlyReal.apply(torch.complex(a, b))[0] * 2, *SHAPES, functions=1, fullgraph=True)


class Doubled(Function):
    """Written in place: doubled, and a sum added."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return x.mul_(2).add_(y.sum())

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * 2, g.sum().expand_as(y)


def _transposed(a: Tensor, b: Tensor) -> Tensor:
    made = a * 1
    Doubled.apply(made.t(), b)
    return made.sin()


def _part(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    made = a.sin()
    given = Doubled.apply(made[:, 1:], b)
    return made * 3, given.cos()


def _twice(a: Tensor, b: Tensor) -> Tensor:
    made = a * 1
    Doubled.apply(made[0], b)
    Doubled.apply(made.view(-1)[::2], b * 2)
    return made.sin()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [_transposed, _part, _twice])
def test_a_view_that_is_written_to(function, dynamic: bool) -> None:
    """What it is a view of changes with it, and the gradient goes there."""
    same_as_eager(function, *SHAPES, sweep=MORE, dynamic=dynamic, fullgraph=True)


class Added(Function):
    """Written in place: what it is, plus another tensor, and that again."""

    @staticmethod
    def forward(ctx, x, others):
        for y in others if isinstance(others, tuple) else (others,):
            x.add_(y)
            x.add_(y)
        ctx.mark_dirty(x)
        ctx.contained = isinstance(others, tuple)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None if ctx.contained else g * 2


class AddedBehind(Function):
    """The same, with the tensor that is written to in the second place, and without saying so."""

    @staticmethod
    def forward(ctx, x, y):
        y.add_(x)
        y.add_(x)
        return x * y

    @staticmethod
    def backward(ctx, g):
        return g, g * 2


class AddedInside(Function):
    """Written to as a part of the container, and returned as both."""

    @staticmethod
    def forward(ctx, x, others):
        others[0].add_(others[1])
        ctx.mark_dirty(others[0])
        return x, others[0]

    @staticmethod
    def backward(ctx, g, again):
        return g * 2 + again * 3, None


def _to_itself(a: Tensor, b: Tensor) -> Tensor:
    made = a * 1
    return Added.apply(made, made).sin() + Added.apply(b * 1, made)


def _in_a_container(a: Tensor, b: Tensor) -> Tensor:
    made = a * 1
    return Added.apply(made, (b, made, made)).sin() * made


def _as_a_part_of_a_container(a: Tensor, b: Tensor) -> Tensor:
    made = a * 1
    first, second = AddedInside.apply(made, (made, b))
    return first.sin() * made + second


def _from_the_second_place(a: Tensor, b: Tensor) -> Tensor:
    made = (a * b).detach()
    return AddedBehind.apply(made, made) * a + AddedBehind.apply(b, made)


def _a_copy(a: Tensor, b: Tensor) -> Tensor:
    """That is another tensor: it stays as it was."""
    made = a * 1
    return Added.apply(made, made.clone()).sin() * b


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [_to_itself, _in_a_container, _as_a_part_of_a_container, _from_the_second_place, _a_copy])
def test_a_tensor_that_comes_twice_is_written_to(function, dynamic: bool) -> None:
    same_as_eager(function, *SHAPES, sweep=MORE, dynamic=dynamic, fullgraph=True)


class Fivefold(Function):
    """A view of its argument, as a whole, with another gradient than a view has."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * 5


class FivefoldItself(Fivefold):
    """The argument itself."""

    @staticmethod
    def forward(ctx, x):
        return x


def _beside_its_argument(function) -> tuple[Tensor, ...]:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        made = a * b
        return function.apply(made), made, function.apply(b)[:], function.apply(a).t()

    return program


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [Fivefold, FivefoldItself])
def test_an_argument_that_is_returned(function, dynamic: bool) -> None:
    """Views of it that leave the graph are not made outside of it, past the Function's backward."""
    same_as_eager(_beside_its_argument(function), *SHAPES, sweep=MORE, dynamic=dynamic, fullgraph=True)


def test_an_input_that_is_a_view_is_written_to() -> None:
    def step(function) -> list[Tensor]:
        leaf, other = (torch.linspace(-1, 1, n).requires_grad_() for n in (12, 2))
        memory = leaf.view(3, 4) * 1
        given = function(memory[:, 1:], other)
        (given.sum() + memory.square().sum()).backward()
        return [given.detach(), memory.detach(), leaf.grad, other.grad]

    torch._dynamo.reset()

    def function(x: Tensor, y: Tensor) -> Tensor:
        return Doubled.apply(x, y).sin() + y.sum()

    torch.testing.assert_close(step(torch.compile(function, backend="ort_training", fullgraph=True)), step(function))


def test_a_view_is_written_to_without_gradients() -> None:
    x, y = torch.randn(3, 4), torch.randn(2)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return _transposed(x, y) + _transposed(y[:, None], x)[0]

    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function, backend="ort_training", fullgraph=True)(x, y), function(x, y))


class ReturnedTwice(Function):
    """One of its results at two places."""

    @staticmethod
    def forward(ctx, x):
        double, more = x * 2, x + 1
        ctx.save_for_backward(double)
        return double, more, double

    @staticmethod
    def backward(ctx, of_first, of_more, of_last):
        return 2 * of_first + 3 * of_more + 5 * of_last + ctx.saved_tensors[0]


class DirtyTwice(Function):
    """An argument that it writes to at two places."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x, x

    @staticmethod
    def backward(ctx, of_first, of_last):
        return 2 * of_first + 3 * of_last


@pytest.mark.parametrize("function", [ReturnedTwice, DirtyTwice])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_result_at_two_places_is_one_tensor(function, dynamic: bool) -> None:
    """Autograd knows it by the last of them: the gradients of all its uses come there."""

    def program(a: Tensor, b: Tensor) -> tuple[Tensor | bool, ...]:
        first, *_, last = function.apply(a * b)
        return first * 2, last * 3, function.apply(a * 1)[0].sin(), first is last

    same_as_eager(program, *SHAPES, sweep=MORE, functions=2, dynamic=dynamic, fullgraph=True)


class Rows(Function):
    """A number alone."""

    @staticmethod
    def forward(ctx, x):
        return 3 * x.shape[0]

    @staticmethod
    def backward(ctx, g):
        return None


class Nothing(Function):
    """Nothing but what it does elsewhere."""

    @staticmethod
    def forward(ctx, x, also):
        return None, also

    @staticmethod
    def backward(ctx, *gradients):
        return None, None


@pytest.mark.parametrize("dynamic", [False, True])
def test_functions_that_return_no_tensor(dynamic: bool) -> None:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor | int | None, ...]:
        with torch.no_grad():
            rows, others = Rows.apply(a), Nothing.apply(b, 5)
        return a * rows + b, rows, *others, *Nothing.apply(a, "that"), Rows.apply(b)

    same_as_eager(program, *SHAPES, sweep=MORE, functions=4, dynamic=dynamic, fullgraph=True)


class Spread(Function):
    """Results and gradients that are one number, seen at every place."""

    @staticmethod
    def forward(ctx, x, also):
        return x.sum().expand(x.shape)

    @staticmethod
    def backward(ctx, g):
        return g.sum().expand(g.shape), torch.zeros(()).expand(g.shape)


@pytest.mark.parametrize("rows", [0, 2])
def test_strides_of_what_has_no_elements(rows: int) -> None:
    """ONNX Runtime looks at them, where PyTorch calls every such tensor contiguous."""
    for function in (Spread.apply, lambda x, also: Spread.apply(x.t(), also.t()).t()):
        same_as_eager(function, (rows, 4), (rows, 4), functions=1, fullgraph=True)
