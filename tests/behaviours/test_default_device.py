"""`torch.set_default_device`: what a run makes for itself is where ONNX Runtime wants it. Here the default is a device that holds no numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import compiled, on_ort
from behaviours.operators import Cubed, cube
from torch.nn import functional as F

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numbers": lambda x: x.view(-1) * x.shape[0],
    "a_number_from_a_tensor": lambda x: x * x.detach().max().item(),
    "draws_in_order": lambda x: F.dropout(x * torch.bernoulli(x.sigmoid()), 0.5) * 0,
    "custom_operators": lambda x: cube(cube(x.sin())),
    "functions": lambda x: Cubed.apply(x * torch.bernoulli(x.sigmoid())) * 0,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_a_run_makes_is_not_there(kind: str, dynamic: bool) -> None:
    function, x = FUNCTIONS[kind], torch.randn(6, 8, requires_grad=True)
    with on_ort(python_ops=None), torch._dynamo.config.patch(capture_scalar_outputs=True), torch.device("meta"):
        result = compiled(function, dynamic=dynamic)(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
    expected = function(x)
    torch.testing.assert_close((result, gradient), (expected, torch.autograd.grad(expected.sum(), x)[0]), rtol=1e-4, atol=1e-5)
