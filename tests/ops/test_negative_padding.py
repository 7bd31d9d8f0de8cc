"""Padding that extends one end of an axis and cuts the other: ONNX Runtime's Pad writes past its output there."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F


@pytest.mark.parametrize("pad", [(0, 0, 0, 0, 0, 0, 1, -1), (-1, 2, 3, -2), (-2, 1), (-1, -1, 1, 1)], ids=str)
def test_cut_and_extend_in_one_call(pad: tuple[int, ...]) -> None:
    compiled = torch.compile(lambda x: F.pad(x.sin(), pad, value=2.0), backend="ort_training", options={"strict": True})
    x = torch.randn(4, 2, 8, 8, requires_grad=True)
    expected = F.pad(x.sin(), pad, value=2.0)
    seed = torch.randn_like(expected)
    (want,) = torch.autograd.grad(expected, x, seed)
    for _ in range(3):
        result = compiled(x)
        (got,) = torch.autograd.grad(result, x, seed)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(got, want)
