"""Tensors that a Function takes and gives in another form than ONNX has them."""

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
