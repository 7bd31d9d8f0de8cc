"""Interpolation in every mode: one operator, forward and backward, on ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ops.trained import check_training, needs_grad

from ort_backend.lowering.interpolation import weights

_PLANES = ("nearest", "nearest-exact", "bilinear", "bicubic")
_SIZES: dict[str, dict[str, Any]] = {
    "twice": {"scale_factor": 2},
    "a fraction": {"scale_factor": (1.7, 0.6)},
    "a fraction, recomputed": {"scale_factor": 0.6, "recompute_scale_factor": True},
    "a size": {"size": (7, 3)},
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", _SIZES)
@pytest.mark.parametrize("mode", _PLANES)
def test_planes(mode: str, name: str, dynamic: bool) -> None:
    others = [(needs_grad(3, 3, 7, 4),)] if dynamic else []
    check_training(lambda x: F.interpolate(x, mode=mode, **_SIZES[name]), needs_grad(2, 3, 5, 6), dynamic=dynamic, others=others)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", _PLANES)
def test_to_the_size_of_another_tensor(mode: str, dynamic: bool) -> None:
    check_training(lambda x, y: F.interpolate(x, size=y.shape[-2:], mode=mode), needs_grad(2, 3, 5, 6), torch.ones(1, 1, 10, 13), dynamic=dynamic)


@pytest.mark.parametrize("size", [(10, 12), (1, 9), (5, 6)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_aligned_corners(mode: str, size: tuple[int, int]) -> None:
    check_training(lambda x: F.interpolate(x, size=size, mode=mode, align_corners=True), needs_grad(2, 3, 5, 6))


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased(mode: str, align_corners: bool) -> None:
    check_training(lambda x: F.interpolate(x, size=(3, 9), mode=mode, antialias=True, align_corners=align_corners), needs_grad(2, 3, 7, 6))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("mode", "size"), [("linear", (2, 3, 5)), ("nearest", (2, 3, 5)), ("trilinear", (2, 3, 3, 4, 5)), ("nearest", (2, 3, 3, 4, 5))]
)
def test_other_ranks(mode: str, size: tuple[int, ...], dynamic: bool) -> None:
    check_training(lambda x: F.interpolate(x, scale_factor=2, mode=mode), needs_grad(*size), dynamic=dynamic)
    check_training(lambda x: F.interpolate(x, size=[7] * (len(size) - 2), mode=mode), needs_grad(*size), dynamic=dynamic)


@pytest.mark.parametrize("mode", _PLANES)
def test_long_axes(mode: str) -> None:
    check_training(lambda x: F.interpolate(x, scale_factor=2, mode=mode), needs_grad(1, 2, 300, 3))
    check_training(lambda x: F.interpolate(x, scale_factor=0.5, mode=mode), needs_grad(1, 2, 3, 300))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", _PLANES)
def test_dtypes(mode: str, dynamic: bool, dtype: torch.dtype, tolerance: float) -> None:
    x = needs_grad(2, 3, 5, 6, dtype=dtype)
    check_training(lambda x: F.interpolate(x, scale_factor=2, mode=mode), x, dynamic=dynamic, rtol=tolerance, atol=tolerance)


def test_bytes() -> None:
    image = torch.randint(0, 255, (2, 3, 4, 5), dtype=torch.uint8)
    check_training(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), image)
    check_training(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image, outside=["aten::upsample_bilinear2d"])


def test_an_infinite_element_stays_alone_in_nearest() -> None:
    x = torch.zeros(1, 1, 3, 3)
    x[0, 0, 1, 1] = float("inf")
    check_training(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), x)


def test_decompositions_are_back_afterwards() -> None:
    before = {key: value for op in (torch.ops.aten.upsample_bilinear2d,) for key, value in op.vec.py_kernels.items()}
    check_training(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), needs_grad(1, 1, 3, 3))
    assert torch.ops.aten.upsample_bilinear2d.vec.py_kernels == before


@pytest.mark.parametrize("kernel", ["nearest", "nearest-exact", "linear", "cubic", "linear_aa", "cubic_aa"])
def test_weights_add_up_to_one(kernel: str) -> None:
    for size_in, size_out in ((5, 9), (9, 5), (1, 4), (4, 1)):
        np.testing.assert_allclose(weights(kernel, size_in, size_out, False, None, np.float64).sum(axis=1), 1, rtol=1e-12)
