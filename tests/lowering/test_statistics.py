"""Normalizations in mixed precision: parameters in float32, everything else in half precision, as under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviours.check import single_session
from default_device import ON_CPU
from ops.harness import trace
from torch import nn

import ort_backend
from ort_backend.lowering.passes.statistics import correct_statistics

LARGE, SMALL = (2, 16, 64, 64), (2, 16, 4, 4)
LAYERS = [nn.GroupNorm(4, 16), nn.BatchNorm2d(16), nn.Sequential(nn.Flatten(2), nn.LayerNorm(1)), nn.InstanceNorm2d(16, affine=True)]


def _layer(number: int, shape: tuple[int, ...]) -> nn.Module:
    """With random parameters."""
    torch.manual_seed(number)
    layer = nn.Sequential(nn.Flatten(2), nn.LayerNorm(shape[2] * shape[3])) if number == 2 else LAYERS[number]
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


@pytest.mark.parametrize("kernels", ["measured", "onnxruntime"])
@pytest.mark.parametrize("number", range(len(LAYERS)))
@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_equal_eagers(dtype: torch.dtype, shape: tuple[int, ...], number: int, kernels: str) -> None:
    if number in (0, 2) and not ON_CPU:
        pytest.skip("PyTorch's kernels of CUDA want parameters in the input's dtype")
    layer = _layer(number, shape)
    weights = torch.randn(shape)

    def step(call: Any) -> list[torch.Tensor]:
        layer.zero_grad()
        x = torch.linspace(-2, 3, weights.numel()).sin().reshape(shape).to(dtype).requires_grad_()
        y = call(x * 2)
        (y.reshape(shape).float() * weights).sum().backward()
        return [one.float() for one in (y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters()))]  # type: ignore[union-attr]

    torch._dynamo.reset()
    expected = step(layer)
    found = step(torch.compile(layer, backend="ort_training", fullgraph=True, options={"kernels": kernels}))
    for one, wanted in zip(found, expected, strict=True):
        assert (one - wanted).norm() <= (2e-2 if dtype == torch.bfloat16 else 3e-3) * wanted.norm()


@pytest.mark.cpu_only(reason="normalizations of one dtype with parameters of another")
@single_session
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="bfloat16 by oneDNN")
def test_autocast_of_a_block() -> None:
    """Where PyTorch's kernels run, they meet the statistics that they have left: eager's numbers."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.GroupNorm(4, 32))
    x = torch.randn(2, 32, 64, 64).bfloat16()

    def step(call: Any) -> list[torch.Tensor | None]:
        block.zero_grad()
        y = call(x)
        (y.float() * torch.linspace(-1, 1, y.numel()).sin().view_as(y)).sum().backward()
        return [y.detach(), *(parameter.grad for parameter in block.parameters())]

    torch._dynamo.reset()
    expected = step(block)
    torch.testing.assert_close(step(torch.compile(block, backend="ort_training", fullgraph=True)), expected, rtol=1e-3, atol=1e-3)
    operators = {one.operator for one in ort_backend.report().graphs[-1].outside}
    assert {"aten::native_group_norm", "aten::native_group_norm_backward"} <= operators


@pytest.mark.cpu_only(reason="normalizations of one dtype with parameters of another")
def test_fake_values_have_the_dtypes_of_the_kernels() -> None:
    layer = nn.GroupNorm(4, 16)

    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        y = nn.functional.group_norm(x, 4, weight, bias)
        return torch.autograd.grad(y.float().sum(), [x, weight, bias])

    x = torch.randn(SMALL).bfloat16().requires_grad_()
    graph = trace(step, [x, *layer.parameters()]).graph
    correct_statistics(graph)
    found = {}
    for node in graph.nodes:
        if "group_norm" in str(node.target):
            found[str(node.target)] = [value.dtype for value in node.meta["val"]]
            real = [torch.zeros(value.shape, dtype=value.dtype) for value in (one.meta["val"] for one in node.all_input_nodes)]
            arguments = torch.fx.map_arg(node.args, dict(zip(node.all_input_nodes, real)).__getitem__)
            assert [value.dtype for value in node.target(*arguments)] == found[str(node.target)]
    assert len(found) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_running_statistics_in_half_precision(dtype: torch.dtype) -> None:
    """A whole network in half precision: its buffers are updated in their dtype."""
    buffers = []
    for backend in ("eager", "ort_training"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2), nn.BatchNorm2d(8)).to(dtype)
        compiled, x = torch.compile(model, backend=backend, fullgraph=True), torch.randn(8, 16, 64, 64).add(1).to(dtype)
        for _ in range(2):
            compiled(x).float().square().sum().backward()
        buffers.append([one.float() for one in model.buffers()])
    torch.testing.assert_close(buffers[1], buffers[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_without_a_weight(bias: bool, statistics: bool, training: bool) -> None:
    if not training and not statistics:
        pytest.skip("no statistics")
    x, b = torch.randn(LARGE).bfloat16().requires_grad_(), torch.randn(16) if bias else None
    results = []
    for call in (nn.functional.batch_norm, torch.compile(nn.functional.batch_norm, backend="ort_training", fullgraph=True)):
        torch._dynamo.reset()
        running = (torch.zeros(16), torch.ones(16)) if statistics else (None, None)
        y = call(x * 2, *running, None, b, training)
        results.append([y.float(), *torch.autograd.grad(y.float().sin().sum(), x), *(one for one in running if one is not None)])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_group_norm_of_channels_last(dtype: torch.dtype) -> None:
    """PyTorch's kernel of the backward is silently wrong where gradient and input lie in memory in different orders."""
    torch._dynamo.reset()
    layer = nn.GroupNorm(2, 8).to(dtype)
    x = torch.randn(4, 8, 64, 64).to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    weights = torch.randn(4, 8, 64, 64).to(dtype)
    results = []
    for call in (layer, torch.compile(layer, backend="ort_training", fullgraph=True)):
        results.append(torch.autograd.grad((call(x) * weights).float().sum(), [x, *layer.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)
