"""Float64 is float64 throughout: no number passes through an attribute of float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import compiled, on_ort, same_tree
from default_device import ON_CPU
from torch.nn import functional as F

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product, scaled": lambda x: (x @ x.transpose(1, 2)) * 0.1,
    "scaled, product": lambda x: (x / 3.0) @ x.transpose(1, 2),
    "addmm": lambda x: torch.addmm(x[0], x[0], x[1, :8], beta=0.1, alpha=0.3),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    **({"hardswish": F.hardswish} if ON_CPU else {}),  # the sixth in PyTorch's kernel for CUDA is one of float32
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": lambda x: F.elu(x, 0.3),
    "celu": lambda x: F.celu(x, 0.7),
    "gelu": F.gelu,
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
}


@pytest.mark.parametrize("kernels", ["measured", "onnxruntime"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_constants_are_not_rounded_to_float32(function: Callable[[torch.Tensor], torch.Tensor], kernels: str) -> None:
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    results = []
    with on_ort(graphs=1, forwards=1, backwards=1, python_ops=None):
        for side in (compiled(function, options={"kernels": kernels}), function):
            made = side(x)
            results.append((made, *torch.autograd.grad(made.sin().sum(), x)))
    same_tree(*results, rtol=1e-11, atol=1e-13)
