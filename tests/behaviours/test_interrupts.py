"""What a signal raises while ONNX Runtime computes arrives as itself, and the next step is right."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from behaviours.check import single_session
from torch import Tensor
from torch.nn import functional as F

import ort_backend
from ort_backend.runtime import aten_op, python_op


class _Interrupt(BaseException):
    pass


# What ONNX Runtime calls. A signal that arrived in a product since the last call is handled as one of them is entered.
_CALLBACKS = [function.__code__ for function in (aten_op._execute, python_op._run_forward, python_op._run_backward)]


@pytest.fixture
def alarm() -> Iterator[None]:
    def interrupt(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code in _CALLBACKS:
            raise _Interrupt
        # Elsewhere the exception could be lost: Dynamo's guards take one that is raised in them for a guard that does not hold.
        signal.setitimer(signal.ITIMER_REAL, 0.003)

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
            for _ in range(2000):
                step()
        torch.testing.assert_close(step(), expected, rtol=0, atol=0)


_OURS = str(Path(ort_backend.__file__).parent)


def _interrupted_at(step: Callable[[], object], count: int) -> str | None:
    """Raises in `step` as this package is entered, or calls something written in Python, for the `count`-th time; where, None if it did not."""
    where = None

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count, where
        back = frame.f_back
        if event != "call" or not any(one is not None and one.f_code.co_filename.startswith(_OURS) for one in (frame, back)):
            return
        count -= 1
        if count == 0:
            where = f"{frame.f_code.co_filename}:{frame.f_code.co_name} called at {back.f_code.co_filename}:{back.f_lineno}" if back else ""
            raise _Interrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda _: None)  # what it is raised in may be called at an object's end
        sys.setprofile(profile)
        try:
            step()
        except _Interrupt:
            pass
        finally:
            sys.setprofile(None)
    return where


def _with_function(x: Tensor, w: Tensor) -> Tensor:
    return _Positive.apply(_Positive.apply(x @ w) @ w)


def _with_operators(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(torch.special.bessel_j0((x @ w).detach()) * (x @ w))


def _plain(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(torch.relu(x @ w), (8,)).sum(0)


@pytest.mark.parametrize("function", [_with_function, _with_operators, _plain], ids=lambda function: function.__name__[1:])
@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
def test_an_interrupt_wherever_python_is_entered(function: Callable[..., Tensor], trains: bool) -> None:
    """It ends that step alone: no mode of PyTorch's stays behind. Raised by a profiler at each place in turn, where a signal comes once in thousands
    of steps.
    """
    torch._dynamo.reset()
    x, w = torch.rand(4, 8, requires_grad=trains), (torch.rand(8, 8) / 8).requires_grad_(trains)
    compiled = torch.compile(function, backend="ort_training", options={"kernels": "onnxruntime"})

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(x, w).sum(), (x, w)) if trains else (compiled(x, w),)

    expected = step()
    step()
    count = 0
    while (where := _interrupted_at(step, count := count + 1)) is not None:
        assert torch.is_grad_enabled(), where
        assert all(map(torch.equal, step(), expected)), where
    assert count > 10
