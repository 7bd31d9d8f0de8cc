"""Functions on CUDA: a module called inside, and work on a side stream. These have never run: they need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import Function


def _same_as_eager(function: Any, x: torch.Tensor) -> None:
    results = []
    for call in (function, torch.compile(function, backend="ort_training", fullgraph=True)):
        for _ in range(2):
            y = call(x)
            results.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
    for got in results[1:]:
        torch.testing.assert_close(got, results[0])


pytestmark = pytest.mark.cuda


def test_a_module_called_in_forward_and_backward() -> None:
    inner = torch.nn.Linear(4, 4).cuda()

    class Inner(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return inner(x)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g @ inner.weight

    _same_as_eager(lambda x: Inner.apply(x * 2), torch.randn(3, 4, device="cuda", requires_grad=True))


@pytest.mark.parametrize("backward_too", [False, True])
@pytest.mark.parametrize("inputs_made_there", [False, True])
def test_work_on_a_side_stream(backward_too: bool, inputs_made_there: bool) -> None:
    side = torch.cuda.Stream()

    def there(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.clone() if inputs_made_there else x
            for _ in range(50):  # long enough for a missing wait to show
                y = y * 1.01
        torch.cuda.current_stream().wait_stream(side)
        return y

    class Side(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return there(x)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return there(g) if backward_too else g * 1.01**50

    _same_as_eager(lambda x: Side.apply(x * 2) + 1, torch.randn(1 << 20, device="cuda", requires_grad=True))
