"""Casts of large tensors by PyTorch's kernels, on the CPU: which, how often, with what results, and where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviours.check import single_session
from default_device import ON_CPU
from torch import nn

import ort_backend
from ort_backend.lowering.kernels import kernel_choice

LARGE, SMALL = 1 << 17, 1 << 10
PAIRS = {(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float16, torch.float32)}

pytestmark = single_session


def _casts(call: Any, *args: torch.Tensor, **options: Any) -> int:
    """How many casts PyTorch makes in the graph of a function, whose results are eager's exactly."""
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="ort_training", fullgraph=True, **options)
    torch.testing.assert_close(compiled(*args), call(*args), rtol=0, atol=0, equal_nan=True)
    return _count()


def _count() -> int:
    return sum(one.count for one in ort_backend.report().graphs[-1].outside if one.operator == "aten::_to_copy")


@pytest.mark.parametrize("source, wanted", sorted(PAIRS, key=str))
@pytest.mark.parametrize("elements, chosen", [(LARGE, 1), (SMALL, 0)])
def test_by_size(source: torch.dtype, wanted: torch.dtype, elements: int, chosen: int) -> None:
    x = torch.linspace(-3e5, 7e4, elements).to(source)
    x[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-8]).to(source)
    assert _casts(lambda x: x.to(wanted), x) == chosen * ON_CPU


def test_what_onnx_runtime_casts_as_fast_stays() -> None:
    assert _casts(lambda x: -x.double(), torch.randn(LARGE)) == 0
    assert _casts(lambda x: -x.float(), torch.randn(LARGE).bfloat16()) == 0


def test_one_cast_of_a_value_to_a_dtype() -> None:
    assert _casts(lambda x: x.bfloat16().float().abs() + x.bfloat16().float().relu(), torch.randn(LARGE)) == 1 * ON_CPU


def test_each_result_of_the_graph_is_a_cast_of_its_own() -> None:
    assert _casts(lambda x: (x.bfloat16(), x.bfloat16(), x.half()), torch.randn(LARGE)) == 3 * ON_CPU


@pytest.mark.parametrize("elements, chosen", [(512, 1), (64, 0)])
def test_symbolic_sizes_count_as_their_example(elements: int, chosen: int) -> None:
    assert _casts(lambda x: x.bfloat16(), torch.randn(elements, 512), dynamic=True) == chosen * ON_CPU


def test_sizes_that_follow_from_values() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.randn(1024, 512)
        assert _casts(lambda x, mask: x[mask].bfloat16(), x, x[:, 0] > 0) == 0


@pytest.mark.parametrize("options", [{"kernels": "onnxruntime"}, {"strict": True}])
def test_onnx_runtime_only(options: dict[str, Any]) -> None:
    assert _casts(lambda x: -x.bfloat16(), torch.randn(LARGE), options=options) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_under_autocast(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in the graph stay unique although casts leave it while others come, forward and backward."""
    table = {key: ((1, 1 << 40, 2.0),) for key in kernel_choice.FASTER_IN_PYTORCH if "_to_copy" in key}
    monkeypatch.setattr(kernel_choice, "FASTER_IN_PYTORCH", table)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(8)))
    x = torch.randn(32, 16)

    def step(call: Any) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast(x.device.type, dtype):
            y = call(x)
        y.float().square().mean().backward()
        return [y.detach().float(), *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]

    torch._dynamo.reset()
    expected, found = step(model), step(torch.compile(model, backend="ort_training", fullgraph=True))
    for one, wanted in zip(found, expected, strict=True):
        assert (one - wanted).norm() <= 5e-2 * wanted.norm() + 1e-6
    assert _count() > 16 or not ON_CPU
