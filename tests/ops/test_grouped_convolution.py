"""Grouped convolutions: where ONNX Runtime's ConvGrad clears memory behind the input's gradient, and as many groups as a batch has samples."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import ort_backend
from ort_backend.runtime import capabilities


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_no_gradient_kernel_that_writes_past_its_output(dims: int, tmp_path: Path) -> None:
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](6, 12, 3, padding=1, groups=3)
    x = torch.randn(2, 6, *[5] * dims, requires_grad=True)
    expected = convolution(x)
    seed = torch.randn_like(expected)
    leaves = [x, *convolution.parameters()]
    want = torch.autograd.grad(expected, leaves, seed)
    compiled = torch.compile(convolution, backend="ort_training", options={"dump_dir": str(tmp_path), "strict": True})
    got = torch.autograd.grad(compiled(x), leaves, seed)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if not capabilities.has_training():  # no ConvGrad at all
        return
    (path,) = (path for path in tmp_path.glob("*.onnx") if "optimized" not in path.name)
    graph = onnx.load(path).graph
    shapes = {value.name: len(value.type.tensor_type.shape.dim) for value in (*graph.input, *graph.value_info, *graph.output)}
    kernels = [node for node in graph.node if node.op_type == "ConvGrad"]
    assert all(shapes[node.output[0]] == 4 for node in kernels if node.output[0])
    assert len(kernels) == (0 if dims == 3 else 1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_group_for_each_sample_of_batches_that_change(dims: int, transposed: bool) -> None:
    """A convolution with weights of its own for each sample, as in StyleGAN2; ONNX has a constant number of groups alone."""
    convolve = getattr(nn.functional, f"conv{'_transpose' if transposed else ''}{dims}d")
    spatial = [5] * dims

    def modulated(x: torch.Tensor, weight: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        batch, channels = x.shape[:2]
        own = weight * style.view(batch, *([1] * weight.dim()))
        result = convolve(x.reshape(1, batch * channels, *spatial), own.flatten(0, 1), padding=1, groups=batch)
        return result.view(batch, channels, *spatial).sin()

    compiled = torch.compile(modulated, backend="ort_training", fullgraph=True, dynamic=True)
    before = len(ort_backend.report().graphs)
    for batch in (2, 3, 5):
        leaves = [torch.randn(size, requires_grad=True) for size in ((batch, 4, *spatial), (4, 4, *[3] * dims), (batch,))]
        expected, result = modulated(*leaves), compiled(*leaves)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        seed = torch.randn_like(expected)
        for one, other in zip(torch.autograd.grad(result, leaves, seed), torch.autograd.grad(expected, leaves, seed), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    (graph,) = ort_backend.report().graphs[before:]
    assert graph.onnx_nodes > graph.python_ops > 0
