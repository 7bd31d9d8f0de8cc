"""ONNX Runtime's ConvGrad clears memory behind the input's gradient for grouped convolutions over other than two dimensions."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

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
