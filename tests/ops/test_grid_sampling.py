"""grid_sample over planes and volumes, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ops.trained import check_training, needs_grad

ONNXRUNTIME = {"kernels": "onnxruntime"}


def _grid(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Coordinates, some of them far outside of the image."""
    return (torch.rand(*size, dtype=dtype) * 5 - 2.5).requires_grad_()


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("spatial", [2, 3])
def test_modes(spatial: int, mode: str, padding: str, align_corners: bool) -> None:
    image, grid = needs_grad(2, 3, *[5, 6, 4][:spatial]), _grid(2, *[4, 7, 3][:spatial], spatial)
    check_training(lambda x, g: F.grid_sample(x, g, mode, padding, align_corners), image, grid, options=ONNXRUNTIME)


@pytest.mark.parametrize("padding", ["zeros", "reflection"])
def test_dynamic_sizes(padding: str) -> None:
    sample = lambda x, g: F.grid_sample(x, g, "bilinear", padding, False)  # noqa: E731
    others = [(needs_grad(3, 7, 9, 11), _grid(3, 12, 13, 2))]
    check_training(sample, needs_grad(4, 3, 5, 6), _grid(4, 7, 10, 2), dynamic=True, others=others, options=ONNXRUNTIME)


def test_one_gradient_only() -> None:
    sample = lambda x, g: F.grid_sample(x, g, align_corners=False)  # noqa: E731
    check_training(sample, needs_grad(2, 3, 5, 6), _grid(2, 4, 7, 2).detach(), options=ONNXRUNTIME)
    check_training(sample, torch.randn(2, 3, 5, 6), _grid(2, 4, 7, 2), options=ONNXRUNTIME)


def test_a_single_pixel() -> None:
    for padding in ("zeros", "border", "reflection"):
        for align_corners in (False, True):
            sample = lambda x, g: F.grid_sample(x, g, "bilinear", padding, align_corners)  # noqa: B023, E731
            check_training(sample, needs_grad(1, 2, 1, 3), _grid(1, 2, 2, 2), options=ONNXRUNTIME)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.bfloat16, 5e-2)])
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    sample = lambda x, g: F.grid_sample(x, g, align_corners=False)  # noqa: E731
    image, grid = needs_grad(2, 3, 5, 6, dtype=dtype), _grid(2, 4, 7, 2, dtype=dtype)
    check_training(sample, image, grid, rtol=tolerance, atol=tolerance, options=ONNXRUNTIME)


@pytest.mark.parametrize(
    ("spatial", "channels", "outside"),
    [
        (2, 3, ["aten::grid_sampler_2d", "aten::grid_sampler_2d_backward"]),
        (2, 64, ["aten::grid_sampler_2d"]),
        (3, 3, ["aten::grid_sampler_3d", "aten::grid_sampler_3d_backward"]),
        (3, 64, []),
    ],
)
def test_pytorch_samples_few_channels(spatial: int, channels: int, outside: list[str]) -> None:
    """Without settings: rows of few channels, gathered and scattered for each sample, take up to ten times as long as PyTorch's kernel."""
    image, grid = needs_grad(2, channels, *[5, 6, 4][:spatial]), _grid(2, *[4, 7, 3][:spatial], spatial)
    check_training(lambda x, g: F.grid_sample(x, g, align_corners=False) * 2, image, grid, outside=outside)


def test_cubic_runs_in_pytorch() -> None:
    outside = ["aten::grid_sampler_2d", "aten::grid_sampler_2d_backward"]
    sample = lambda x, g: F.grid_sample(x, g, "bicubic", align_corners=False)  # noqa: E731
    check_training(sample, needs_grad(2, 3, 5, 6), _grid(2, 4, 7, 2), outside=outside, options=ONNXRUNTIME)
