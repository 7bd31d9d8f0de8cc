"""Matrix products that oneDNN or MKL computes, in float32 and in bfloat16: which, with what results, and where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ort_backend
from ort_backend.lowering.kernels import dense_products, product_choice
from ort_backend.lowering.passes import products
from ort_backend.runtime import capabilities

pytestmark = [
    pytest.mark.skipif(not capabilities.has_training(), reason="PythonOp, which such products run in, needs onnxruntime-training"),
    pytest.mark.cpu_only(reason="oneDNN's and MKL's products"),
]

OFF: list[dict[str, Any]] = [{"kernels": "onnxruntime"}, {"strict": True}]


@pytest.fixture(params=["onednn", "mkl"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that products may run by, whatever the processor."""
    if request.param == "mkl" and not torch.backends.mkl.is_available():
        pytest.skip("this PyTorch has no MKL")
    monkeypatch.setattr(dense_products, "mkl_is_at_home", lambda: request.param == "mkl")
    return str(request.param)


@pytest.fixture
def always(library: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(products, "product_by_onednn", lambda *sizes, transposed: True)
    monkeypatch.setattr(products, "product_by_mkl", lambda *sizes, transposed: True)
    return library


def _by(library: str) -> int:
    return sum(one.count for one in ort_backend.report().graphs[-1].outside if one.operator == f"ort_training::{library}_mm")


def _gradients(model: nn.Module, x: torch.Tensor, call: Any) -> list[torch.Tensor | None]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = call(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(one.grad for one in model.parameters())]


@pytest.mark.parametrize(
    "rows, depth, columns, transposed, chosen",
    [
        (256, 1024, 1024, False, True),
        (256, 1000, 1024, False, False),  # rows at another distance
        (64, 1024, 1024, False, False),  # too small
        (384, 1024, 1536, True, False),  # costs memory
    ],
)
def test_choice(rows: int, depth: int, columns: int, transposed: bool, chosen: bool) -> None:
    assert product_choice.product_by_onednn(rows, depth, columns, transposed=transposed) == chosen


@pytest.mark.parametrize(
    "rows, depth, columns, transposed, chosen",
    [
        (1024, 512, 1024, True, True),
        (256, 256, 256, True, False),  # too small
        (4096, 8, 4096, True, True),
        (1024, 512, 1024, False, True),
        (256, 512, 1024, False, False),  # too small
        (8192, 256, 1024, False, False),  # too few multiplications for each element
        (4096, 8, 4096, False, False),
    ],
)
def test_choice_of_mkl(rows: int, depth: int, columns: int, transposed: bool, chosen: bool) -> None:
    assert product_choice.product_by_mkl(rows, depth, columns, transposed=transposed) == chosen


def test_mkl_is_at_home_with_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    at_home = dense_products.mkl_is_at_home.__wrapped__
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for text, expected in (("vendor_id\t: GenuineIntel", True), ("vendor_id\t: AuthenticAMD", False), ("", False)):
        monkeypatch.setattr(dense_products, "_processor", lambda text=text: text)
        assert at_home() == expected
    monkeypatch.setattr(dense_products, "_processor", lambda: "vendor_id\t: GenuineIntel")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not at_home()


@pytest.mark.parametrize("bias", [True, False])
def test_a_wide_layer(library: str, bias: bool) -> None:
    torch._dynamo.reset()
    model, x = nn.Linear(1024, 800, bias=bias), torch.randn(256, 1024)
    expected = _gradients(model, x, model)
    found = _gradients(model, x, torch.compile(model, backend="ort_training", options={"verify": 1}, fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    # By oneDNN the forward alone: rows of the gradient are 3,200 bytes apart. By MKL all three.
    assert (_by("onednn"), _by("mkl")) == ((0, 3) if library == "mkl" else (1, 0))


def test_mkl_takes_what_onednn_would(library: str) -> None:
    torch._dynamo.reset()
    model, x = nn.Linear(1024, 256), torch.randn(1024, 1024)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="ort_training")(x), model(x), rtol=1e-4, atol=1e-3)
    assert not product_choice.product_by_mkl(1024, 1024, 256, transposed=False)
    assert _by(library) == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_results_equal_eager(always: str, bias: bool, dynamic: bool) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(5, 7, bias=bias), nn.Tanh(), nn.Linear(7, 3, bias=bias))
    compiled = torch.compile(model, backend="ort_training", fullgraph=True, dynamic=dynamic)
    for rows in (4, 9, 1) if dynamic else (4,):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(_gradients(model, x, compiled), _gradients(model, x, model), rtol=1e-4, atol=1e-5)
    assert _by(always) == 6  # a forward, and gradients of input and weights, of each layer


def test_no_rows_at_all(always: str) -> None:
    torch._dynamo.reset()
    model = nn.Linear(5, 7)

    def kept(x: torch.Tensor) -> torch.Tensor:
        return model(x[x[:, 0] > 0])

    compiled = torch.compile(kept, backend="ort_training", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for x in (torch.randn(6, 5), -torch.rand(6, 5)):
            torch.testing.assert_close(_gradients(model, x, compiled), _gradients(model, x, kept), rtol=1e-4, atol=1e-5)
    assert _by(always) == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a.transpose(-1, -2).permute(-1, -2) @ b.t().t(),
        lambda a, b: a @ b.t().permute(1, 0),
        lambda a, b: torch.addmm(torch.ones(1), a, b),
        lambda a, b: torch.addmm(a[0, 0], a, b),
        lambda a, b: torch.addmm(b[0], a, b, beta=2),
        lambda a, b: torch.addmm(a @ b, a, b),
    ],
)
def test_forms_of_products(always: str, function: Any) -> None:
    torch._dynamo.reset()
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    compiled = torch.compile(function, backend="ort_training", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), function(a, b), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(b.t().contiguous().t()[:3, :4], b), function(b[:3, :4], b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OFF, ids=str)
def test_onnx_runtime_only(always: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.mm, backend="ort_training", options=options)
    compiled(torch.randn(3, 4), torch.randn(4, 5))
    assert _by(always) == 0


def test_where_onednn_is_turned_off(always: str) -> None:
    torch._dynamo.reset()
    with torch.backends.mkldnn.flags(enabled=False):
        torch.compile(torch.mm, backend="ort_training")(torch.randn(3, 4), torch.randn(4, 5))
    assert _by(always) == (0 if always == "onednn" else 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_other_dtypes_stay(always: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    a, b = torch.arange(12).reshape(3, 4).to(dtype), torch.arange(20).reshape(4, 5).to(dtype)
    torch.testing.assert_close(torch.compile(torch.mm, backend="ort_training")(a, b), a @ b)
    assert _by(always) == 0


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with instructions for products in bfloat16, whatever the processor."""
    monkeypatch.setattr(dense_products, "processor_multiplies_bfloat16", lambda: True)


@pytest.mark.parametrize("bias", [True, False])
def test_autocast_to_bfloat16(bfloat16: None, bias: bool) -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(256, 320, bias=bias), nn.ReLU(), nn.Linear(320, 192, bias=bias)), torch.randn(128, 256)
    results = []
    for call in (model, torch.compile(model, backend="ort_training", fullgraph=True)):
        results.append(_gradients(model, x, lambda x, call=call: torch.autocast("cpu", torch.bfloat16)(call)(x).float()))
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)
    assert _by("bfloat16") == 6  # a forward, and gradients of input and weights, of each layer


@pytest.mark.parametrize("rows, depth, columns, chosen", [(128, 256, 320, True), (128, 64, 128, False), (1, 1024, 1024, False)])
def test_choice_of_bfloat16(rows: int, depth: int, columns: int, chosen: bool) -> None:
    assert product_choice.product_in_bfloat16(rows, depth, columns) == chosen


def test_a_product_in_bfloat16_is_eagers(bfloat16: None) -> None:
    torch._dynamo.reset()
    a, b = torch.randn(192, 256).bfloat16(), torch.randn(256, 128).bfloat16()
    assert torch.equal(torch.compile(torch.mm, backend="ort_training")(a, b), a @ b)
    assert _by("bfloat16") == 1


@pytest.mark.parametrize("operator", [torch.addmm, torch.baddbmm])
@pytest.mark.parametrize("size", [8, 192])
def test_a_sum_with_a_product_in_bfloat16_is_eagers(bfloat16: None, operator: Any, size: int) -> None:
    """A step of `torch.optim.Muon` has ten for each matrix."""
    torch._dynamo.reset()
    shape = (size, size) if operator is torch.addmm else (2, size, size)
    given = torch.randn(3, *shape).bfloat16()
    compiled = torch.compile(lambda x, a, b: operator(x, a, b, beta=-4.775, alpha=2.0315), backend="ort_training")
    result, expected = compiled(*given), operator(*given, beta=-4.775, alpha=2.0315)
    torch.testing.assert_close(result, expected)
    reasons = [one.reason for one in ort_backend.report().graphs[-1].outside]
    assert reasons == (["oneDNN's product in bfloat16 is faster than one in float32"] if size > 8 else [])


@pytest.mark.parametrize("options", OFF, ids=str)
def test_bfloat16_on_onnx_runtime_only(bfloat16: None, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    a, b = torch.randn(192, 256).bfloat16(), torch.randn(256, 128).bfloat16()
    torch.testing.assert_close(torch.compile(torch.mm, backend="ort_training", options=options)(a, b), a @ b)
    assert _by("bfloat16") == 0


@pytest.mark.parametrize("onednn", [True, False])
def test_bfloat16_without_instructions(monkeypatch: pytest.MonkeyPatch, onednn: bool) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(dense_products, "processor_multiplies_bfloat16", lambda: not onednn)
    a, b = torch.randn(192, 256).bfloat16(), torch.randn(256, 128).bfloat16()
    with torch.backends.mkldnn.flags(enabled=onednn):
        torch.testing.assert_close(torch.compile(torch.mm, backend="ort_training")(a, b), a @ b)
    assert _by("bfloat16") == 0
