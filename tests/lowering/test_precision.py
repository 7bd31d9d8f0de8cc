"""Operators of float64 are computed in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from behaviours.check import on_ort
from default_device import seeded
from torch.nn import functional as F

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "cdist": lambda x: torch.cdist(x, x.flip(0)),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(1)),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (7,)),
}


@pytest.mark.parametrize("name", CASES)
def test_float64_keeps_its_digits(name: str) -> None:
    """ONNX Runtime writes operators for which it has no kernel of a dtype by ONNX's own formulas, ReduceL2 with a root in float32."""
    function = CASES[name]
    x = torch.randn(2, 5, 7, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    compiled = torch.compile(function, backend="ort_training", fullgraph=True)
    with on_ort(graphs=1):
        results = [(one(x), torch.autograd.grad(one(x).square().sin().sum(), x)[0]) for one in (compiled, function)]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
