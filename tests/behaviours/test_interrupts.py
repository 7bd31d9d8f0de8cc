"""What a signal raises while ONNX Runtime computes arrives as itself, and the next step is right."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from behaviours.check import single_session
from torch import Tensor


class _Interrupt(BaseException):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise _Interrupt

    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals arrive in the main thread")
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class _Positive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


@single_session
@pytest.mark.parametrize("outside", [_Positive.apply, torch.special.bessel_j0], ids=["function", "operator"])
def test_a_signal_during_a_step(outside: Any, alarm: None) -> None:
    """Most arrive in a product, and are raised as the next call of PyTorch's is entered."""

    def layers(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = outside(x @ w)
        return x

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(x, w).sum(), (x, w))

    torch._dynamo.reset()
    x, w = torch.rand(256, 512, requires_grad=True), (torch.rand(512, 512) / 256).requires_grad_()
    compiled = torch.compile(layers, backend="ort_training", options={"kernels": "onnxruntime"})
    if outside is not _Positive.apply:  # PyTorch gives it no gradient
        compiled, x, w = torch.no_grad()(compiled), x.detach(), w.detach()
    step = gradients if outside is _Positive.apply else lambda: (compiled(x, w),)
    expected = step()
    for i in range(8):
        signal.setitimer(signal.ITIMER_REAL, 0.004 + 0.003 * i)
        with pytest.raises(_Interrupt):
            while True:
                step()
        torch.testing.assert_close(step(), expected, rtol=0, atol=0)
