"""Padding that extends one end of an axis and cuts the other, where ONNX Runtime's Pad writes past its output, or may do either."""

from __future__ import annotations

import onnx_ir as ir
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


@pytest.mark.parametrize("mode", ["constant", "replicate", "reflect"])
def test_of_changing_sign(mode: str) -> None:
    """The padding is a number that changes from call to call, and cuts an axis or extends it."""

    def step(x: torch.Tensor, more: int) -> torch.Tensor:
        return F.pad(x.sin(), (more, 2 - more), mode=mode)

    compiled = torch.compile(step, backend="ort_training", dynamic=True)
    for width, more in ((6, 2), (5, 3), (7, -3), (4, -1), (4, -4)):
        if mode == "reflect" and width <= 2 - more:
            continue
        x = torch.randn(3, width, requires_grad=True)
        results = compiled(x, more), step(x, more)
        seed = torch.randn_like(results[1])
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result, x, seed) for result in results))


def test_padding_that_is_known_not_to_be_negative_is_one_node() -> None:
    written: list[str] = []

    def look(model: ir.Model) -> None:
        written.extend(node.op_type for node in model.graph)

    compiled = torch.compile(lambda x: F.pad(x, (0, -x.shape[1] % 4)), backend="ort_training", dynamic=True, options={"onnx_passes": [look]})
    with torch.no_grad():
        for width in (5, 7, 8):
            x = torch.randn(3, width)
            torch.testing.assert_close(compiled(x), F.pad(x, (0, -width % 4)))
    assert "Pad" in written and "Slice" not in written
