"""`torch.set_flush_denormal`: a program's choice holds where sessions run, and creating them does not change it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_STEP = """
import sys
import torch
import ort_backend

tiny = torch.tensor([1e-40])  # which would be zero if it were made behind the choice
chosen = torch.set_flush_denormal(sys.argv[1] == "True")
seen = []

def flushes():
    return bool((tiny * 1 == 0).all())

class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    @torch.compiler.disable
    def backward(ctx, gradient):
        seen.append(flushes())
        return gradient * 1

def function(x):
    return torch.softmax(x, -1) * x.sum()

x = torch.randn(4, 16, requires_grad=True)
y = torch.compile(function, backend="ort_training", fullgraph=True)(Noting.apply(x))
y.square().sum().backward()
(graph,) = ort_backend.report().graphs
assert graph.sessions
print(chosen, flushes(), *seen)
"""


@pytest.mark.parametrize("flush", [True, False])
def test_sessions_leave_the_choice_of_the_program(python: Callable[..., str], flush: bool) -> None:
    chosen, behind, in_backward = (text == "True" for text in python(_STEP, str(flush)).splitlines()[-1].split())
    if not chosen:
        pytest.skip("this processor cannot flush denormal numbers")
    assert behind == in_backward == flush
