"""unfold and fold, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.trained import check_training, needs_grad

from ort_backend import graph_report

_PATCHES: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "padding": {"kernel_size": 3, "padding": 1},
    "side by side": {"kernel_size": 2, "stride": 2},
    "apart": {"kernel_size": (2, 1), "stride": (3, 2)},
    "dilation": {"kernel_size": (2, 3), "dilation": (2, 1), "padding": (0, 2), "stride": (1, 2)},
}
SIZE = (9, 8)
# Of 64 places and more, which are cut in pieces of one axis, and then of the other.
_LARGE: dict[str, dict[str, Any]] = {
    "overlapping": {"kernel_size": (8, 9), "stride": (4, 3)},
    "no whole number of strides": {"kernel_size": (7, 10), "padding": (2, 1), "stride": (4, 5)},
    "side by side": {"kernel_size": 8, "stride": 8},
    "apart": {"kernel_size": (8, 8), "stride": (9, 11)},
    "every place": {"kernel_size": (8, 9), "padding": (3, 0)},
    "dilation": {"kernel_size": (4, 17), "dilation": (3, 1), "padding": (0, 4), "stride": (1, 2)},
    "frames": {"kernel_size": (1, 64), "stride": (1, 8)},
    "lines": {"kernel_size": (66, 1), "padding": (24, 0), "stride": (3, 2)},
    "both in one": {"kernel_size": 8, "dilation": 2, "stride": 2},
}


@pytest.mark.parametrize("name", _PATCHES)
def test_unfold_and_fold(name: str) -> None:
    options = _PATCHES[name]
    check_training(lambda x: F.unfold(x, **options), needs_grad(2, 3, *SIZE))
    check_training(lambda x: F.unfold(x, **options), needs_grad(3, *SIZE))
    columns = F.unfold(torch.randn(2, 3, *SIZE), **options)
    check_training(lambda x: F.fold(x, SIZE, **options), columns.requires_grad_())
    check_training(lambda x: F.fold(x, SIZE, **options), columns.detach()[0].requires_grad_())


@pytest.mark.parametrize("name", _LARGE)
def test_large_patches(name: str) -> None:
    options, size, strict = _LARGE[name], (34, 75), {"strict": True}
    check_training(lambda x: F.unfold(x, **options), needs_grad(2, 3, *size), options=strict)
    columns = F.unfold(torch.randn(3, *size), **options)
    check_training(lambda x: F.fold(x, size, **options), columns.requires_grad_(), options=strict)
    check_training(lambda x: F.unfold(x, **options), torch.randn(2, 3, *size), dynamic=True, others=[(torch.randn(4, 5, 41, 83),)])


def test_frames_of_a_signal_take_few_nodes_and_no_weight_as_large_as_their_square() -> None:
    frames = {"kernel_size": (1, 1024), "stride": (1, 256)}
    check_training(lambda x: F.fold(x, (1, 2304), **frames), needs_grad(2, 1024, 6), options={"strict": True})
    assert sum(graph.onnx_nodes for graph in graph_report.report().graphs) < 50


def test_dynamic_sizes() -> None:
    check_training(lambda x: F.unfold(x, 3, padding=1, stride=2), torch.randn(4, 3, 9, 8), dynamic=True, others=[(torch.randn(5, 6, 11, 7),)])
    outside = ["aten::col2im"]
    check_training(lambda x: F.unfold(x, 3, padding=1), needs_grad(4, 3, 9, 8), dynamic=True, outside=outside)


@pytest.mark.parametrize(("dtype", "outside"), [(torch.bfloat16, []), (torch.float64, ["aten::col2im"])])
def test_dtypes(dtype: torch.dtype, outside: list[str]) -> None:
    check_training(lambda x: F.unfold(x, 3, padding=1), needs_grad(2, 3, *SIZE, dtype=dtype), outside=outside, rtol=3e-2, atol=3e-2)
