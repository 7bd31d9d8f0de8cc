"""The faster kernel of two: by size, by shape class, by option, and in the report."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from behaviours.check import single_session
from default_device import seeded
from ops.harness import trace
from torch import nn

import ort_backend
from ort_backend.lowering.kernels import dense_products, kernel_choice, operator_class, session_choice
from ort_backend.runtime import capabilities

pytestmark = pytest.mark.cpu_only(reason="kernels that were measured there")

TABLE = {"aten.gelu.default none": ((100, 1000, 2.0),), "aten.convolution.default depthwise 3x3": ((1, 10**9, 3.0),)}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "FASTER_IN_PYTORCH", TABLE)


def _outside(function: Any, *args: torch.Tensor, **options: Any) -> list[tuple[str, str, bool]]:
    """What PyTorch runs in a training graph of `function`, which is checked against eager."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="ort_training", options=options)
    results = []
    for call in (function, compiled):
        leaves = [arg.detach().clone().requires_grad_(arg.is_floating_point()) for arg in args]
        out = call(*leaves)
        out.sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    return [(one.operator, one.reason, one.is_choice) for one in ort_backend.report().graphs[-1].outside]


@single_session
@pytest.mark.parametrize("elements, chosen", [(99, False), (100, True), (1000, True), (1001, False)])
def test_by_size(table: None, elements: int, chosen: bool) -> None:
    outside = _outside(nn.functional.gelu, torch.randn(elements))
    assert outside == ([("aten::gelu", "PyTorch's kernel is 2.0 times as fast at this size", True)] if chosen else [])


@single_session
@pytest.mark.parametrize(("elements", "dtype", "chosen"), [(4096, torch.float64, True), (4095, torch.float64, False), (4096, torch.float32, False)])
def test_in_float64(elements: int, dtype: torch.dtype, chosen: bool) -> None:
    outside = _outside(nn.functional.silu, torch.randn(elements, dtype=dtype))
    assert [(operator, is_choice) for operator, _, is_choice in outside] == ([("aten::silu", True), ("aten::silu_backward", True)] if chosen else [])


@single_session
@pytest.mark.parametrize(
    "rows, width, intel, in_pytorch",
    [
        (512, 384, False, False),
        (1024, 384, False, True),
        (512, 384, True, True),
        (32, 384, True, False),
        (512, 768, False, False),
        (1024, 768, False, True),
        (512, 768, True, True),
    ],
)
def test_layers_are_normalized_by_pytorch_where_they_are_large(
    rows: int, width: int, intel: bool, in_pytorch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_products, "mkl_is_at_home", lambda: intel)
    norm, weight = nn.LayerNorm(width), torch.randn(width)
    operators = [operator for operator, _, _ in _outside(lambda x: norm(x) * weight, torch.randn(rows, width))]
    assert operators == (["aten::native_layer_norm", "aten::native_layer_norm_backward"] if in_pytorch else [])


@single_session
@pytest.mark.parametrize("elements, intel, in_pytorch", [(262144, True, True), (65536, True, False), (262144, False, False)])
def test_gradients_of_gelu_by_tanh_on_a_processor_of_intel_s(elements: int, intel: bool, in_pytorch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_products, "mkl_is_at_home", lambda: intel)
    outside = _outside(lambda x: nn.functional.gelu(x, approximate="tanh"), torch.randn(elements))
    assert outside == ([("aten::gelu_backward", "PyTorch's kernel is 2.4 times as fast at this size", True)] if in_pytorch else [])


@single_session
def test_by_shape_class(table: None) -> None:
    depthwise, dense, narrow = nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 2, groups=4)
    x = torch.randn(2, 4, 8, 8)
    assert [operator for operator, _, _ in _outside(depthwise, x)] == ["aten::convolution"]
    assert _outside(dense, x) == _outside(narrow, x) == []


@pytest.mark.parametrize(
    "layer, shape, expected",
    [
        (nn.Conv2d(16, 32, 3), (2, 16, 8, 8), "dense 3x3 by 16"),
        (nn.Conv2d(16, 32, (1, 3), stride=(1, 2)), (2, 16, 8, 8), "dense 1x3 strided by 16"),
        (nn.Conv2d(16, 20, 3, stride=2), (2, 16, 8, 8), "dense 3x3 strided"),
        (nn.Conv2d(3, 64, 7, stride=2), (2, 3, 8, 8), "dense 7x7 strided thin"),
        (nn.Conv2d(16, 16, 7, groups=16), (2, 16, 8, 8), "depthwise 7x7"),
        (nn.Conv2d(32, 32, 3, groups=2), (2, 32, 8, 8), "grouped 3x3"),
        (nn.ConvTranspose2d(16, 16, 3), (2, 16, 8, 8), "other"),
        (nn.Conv2d(16, 16, 5, groups=16), (2, 16, 8, 8), "depthwise 3x3"),
        (nn.Conv2d(16, 16, 9, groups=16), (2, 16, 16, 16), "depthwise 7x7"),
        (nn.Conv2d(3, 64, 9, padding=4), (2, 3, 8, 8), "dense 7x7 thin"),
        (nn.Conv2d(16, 32, 8, stride=4), (2, 16, 8, 8), "dense 8x8 strided by 16"),
        (nn.Conv1d(16, 16, 3), (2, 16, 8), "dense 3 by 16"),
        (nn.Conv1d(16, 16, 2, stride=2), (2, 16, 8), "dense 3 strided by 16"),
        (nn.Conv1d(17, 17, 10), (2, 17, 16), "dense 9"),
        (nn.Conv1d(16, 16, 1), (2, 16, 8), "dense 1 by 16"),
        (nn.Conv1d(16, 16, 31, groups=16), (2, 16, 40), "depthwise 31"),
        (nn.Conv1d(16, 16, 1, groups=16), (2, 16, 8), "depthwise 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_classes_of_convolutions(layer: nn.Module, shape: tuple[int, ...], expected: str) -> None:
    names, parameters = zip(*layer.named_parameters())

    def step(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        return torch.autograd.grad(torch.func.functional_call(layer, dict(zip(names, parameters)), x).sum(), [x, *parameters])

    graph = trace(step, [torch.randn(shape, requires_grad=True), *parameters]).graph
    classes = [operator_class.operator_class(node) for node in graph.nodes if "convolution" in str(node.target)]
    assert classes == [f"aten.convolution.default {expected}", f"aten.convolution_backward.default {expected}"]


@single_session
@pytest.mark.parametrize(
    "layer, shape, chosen",
    [
        (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 32, 32), True),  # 38 million multiplications
        (nn.Conv2d(32, 3, 3, padding=1), (2, 32, 64, 64), True),  # 7 million
        (nn.Conv2d(3, 32, 3, padding=1), (2, 3, 64, 64), False),  # as many
        (nn.Conv2d(32, 32, 1), (2, 32, 64, 64), False),  # 8 million
        (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 12, 12), False),  # 5 million
        (nn.Conv2d(64, 128, 1, stride=2), (4, 64, 64, 64), True),
        (nn.ConvTranspose2d(64, 64, 2, stride=2), (2, 64, 32, 32), True),
        (nn.Conv2d(128, 128, 3, padding=1, groups=2), (4, 128, 32, 32), False),
    ],
    ids=str,
)
def test_dense_convolutions_in_bfloat16(layer: nn.Module, shape: tuple[int, ...], chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "FASTER_IN_PYTORCH", {})
    monkeypatch.setattr(dense_products, "processor_multiplies_bfloat16", lambda: True)
    torch._dynamo.reset()
    x = torch.randn(shape, requires_grad=True)
    results = []
    for call in (layer, torch.compile(layer, backend="ort_training", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x).float()
        results.append([y.detach(), *torch.autograd.grad(y.square().mean(), [x, *layer.parameters()])])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).norm() <= 2e-2 * wanted.norm()
    found = [one.operator for one in ort_backend.report().graphs[-1].outside]
    assert found == (["aten::convolution", "aten::convolution_backward"] if chosen else [])


@single_session
def test_symbolic_sizes_count_as_their_example(table: None) -> None:
    compiled = torch.compile(nn.functional.gelu, backend="ort_training", dynamic=True)
    x = torch.randn(20, 10)
    torch.testing.assert_close(compiled(x), nn.functional.gelu(x))
    assert ort_backend.report().graphs[-1].python_ops == 1
    torch.testing.assert_close(compiled(x[:2]), nn.functional.gelu(x[:2]))


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: x.softmax(-1), "aten._softmax.default rows"),
        (lambda x: x.softmax(2), "aten._softmax.default rows"),
        (lambda x: x.log_softmax(1), "aten._log_softmax.default few"),
        (lambda x: x.repeat(1, 8, 1).log_softmax(1), "aten._log_softmax.default"),
        (lambda x: x.repeat(1, 8, 1).flip(0), "aten.flip.default"),
        (lambda x: x.flip(0), "aten.flip.default rows"),  # a few numbers at a time
        (lambda x: x.flip([0, 2]), "aten.flip.default rows"),
        (lambda x: x.sum().flip(0), "aten.flip.default rows"),
        (lambda x: torch.div(x, 3.5, rounding_mode="floor"), "aten.div.Tensor_mode floor"),
        (lambda x: x**3, "aten.pow.Tensor_Scalar 3.0"),
        (lambda x: x**1.7, "aten.pow.Tensor_Scalar any"),
        (lambda x: x.index_add(0, torch.tensor([1]), x[:1]), "aten.index_add.default first"),
        (lambda x: x.index_add(1, torch.tensor([1]), x[:, :1]), "aten.index_add.default"),
        (lambda x: torch.ops.aten.slice_backward(x, [2, 6, 4], 1, 0, 6, 2), "aten.slice_backward.default strided"),
        (lambda x: torch.ops.aten.slice_backward(x, [2, 6, 4], 1, 0, 3, 1), "aten.slice_backward.default"),
    ],
)
def test_classes_of_operators(function: Any, expected: str) -> None:
    classes = {operator_class.operator_class(node) for node in trace(function, [torch.randn(2, 3, 4)]).graph.nodes if node.op == "call_function"}
    assert expected in classes


PLACES = torch.randint(0, 64, (1024, 32), generator=seeded(0))


@pytest.mark.parametrize(
    ("function", "elements", "chosen"),
    [
        (torch.atan2, 16384, True),
        (torch.atan2, 16383, False),
        (torch.hypot, 65536, True),
        (torch.hypot, 65535, False),
        (lambda x, y: x**1.7, 65536, True),
        (lambda x, y: x**2, 65536, False),
        (lambda x, y: torch.lerp(x, y, y), 65536, True),
        (lambda x, y: nn.functional.softplus(x), 1048576, True),
        (lambda x, y: nn.functional.softplus(x), 65536, False),
        (lambda x, y: nn.functional.huber_loss(x, y, reduction="none"), 524288, True),
        (lambda x, y: torch.where(x > 0, x, y), 262144, [False, True]),
        (lambda x, y: torch.where(x > 0, x, y), 262143, [False, False]),
    ],
)
def test_between_sessions_by_how_much_is_gained(function: Any, elements: int, chosen: bool | list[bool]) -> None:
    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), kernels="measured")
    nodes = [node for node in trace(function, [torch.ones(elements)] * 2).graph.nodes if node.op == "call_function"]
    assert [session_choice.far_faster_in_pytorch(node, target) for node in nodes] == (chosen if isinstance(chosen, list) else [chosen])
    asked = dataclasses.replace(target, kernels="onnxruntime")
    assert not session_choice.far_faster_in_pytorch(nodes[0], asked)


@pytest.mark.parametrize(
    ("function", "elements", "dtype", "chosen"),
    [
        (nn.functional.silu, 65536, torch.float64, True),
        (nn.functional.silu, 65535, torch.float64, False),
        (nn.functional.silu, 65536, torch.float32, False),
        (torch.tanh, 65536, torch.float64, False),
        (torch.hypot, 65536, torch.float64, True),
    ],
)
def test_in_float64_between_sessions(function: Any, elements: int, dtype: torch.dtype, chosen: bool) -> None:
    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), kernels="measured")
    tensors = [torch.ones(elements, dtype=dtype)] * (2 if function is torch.hypot else 1)
    (node,) = [node for node in trace(function, tensors).graph.nodes if node.op == "call_function"]
    assert session_choice.far_faster_in_pytorch(node, target) == chosen


@pytest.mark.parametrize(
    "length, width, causal, slow_mkl, chosen",
    [
        (256, 32, False, False, True), (256, 32, True, False, False), (128, 32, False, False, False), (512, 64, False, False, False),
        (600, 64, False, False, True), (600, 64, True, False, False), (600, 64, False, True, False),
    ],
)  # fmt: skip
def test_attention_between_sessions(length: int, width: int, causal: bool, slow_mkl: bool, chosen: bool) -> None:
    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), kernels="measured", mkl=False, slow_mkl=slow_mkl)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.ones(1, 2, length, width, dtype=dtype)] * 3
        graph = trace(lambda q, k, v: attend(q, k, v, 0.0, causal)[0], tensors).graph
        (node,) = graph.find_nodes(op="call_function", target=attend)
        assert session_choice.far_faster_in_pytorch(node, target) == (chosen and dtype is torch.float32)


@single_session
@pytest.mark.parametrize(("bags", "chosen"), [(1024, ["aten::_embedding_bag"]), (16, [])])
def test_maxima_of_bags_by_pytorchs_kernel_where_a_gradient_goes_to_their_places(bags: int, chosen: list[str]) -> None:
    table = torch.randint(0, 9, (100, 64)).float()  # with many equal ones
    places = PLACES[:bags, :4]

    def largest(table: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding_bag(places, table, mode="max", padding_idx=3) * 2

    assert [operator for operator, _, _ in _outside(largest, table)] == chosen
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(largest, backend="ort_training")(table), largest(table))
    assert not ort_backend.report().graphs[-1].outside


_PUT = "ort_training::put_into_zeros"


@single_session
@pytest.mark.parametrize(("rows", "chosen"), [(1024, {"aten::gather", _PUT}), (512, {_PUT}), (128, set())])
def test_elements_at_indices_by_the_number_of_these(rows: int, chosen: set[str]) -> None:
    outside = _outside(lambda x: x.gather(1, PLACES[:rows]) * 2, torch.randn(8192, 64))  # whose gradient is added into all of `x`
    assert {operator for operator, _, _ in outside} == chosen


@single_session
@pytest.mark.parametrize(
    ("function", "shape", "chosen"),
    [
        (lambda x: nn.functional.glu(x, 1) * 2, (512, 64, 32), ["aten::glu", "aten::glu_backward"]),
        (lambda x: nn.functional.leaky_relu(x) * 2, (512, 512), ["aten::leaky_relu", "aten::leaky_relu_backward"]),
        (lambda x: nn.functional.prelu(x, x[0, :1]) * 2, (512, 512), ["aten::_prelu_kernel"]),
        (lambda x: x.roll(3, 1) * 2, (512, 64, 32), ["aten::roll"]),
        (lambda x: x[:, 1::2] * 2, (512, 64, 32), ["aten::slice_backward"]),
        (lambda x: x.index_select(1, PLACES[0]) * 2, (512, 64, 32), ["aten::index_add"]),
        (lambda x: x.scatter(1, PLACES[:512], x[:, :32]) * 2, (512, 64), ["aten::scatter.src"]),
        (lambda x: (x * x + 1) ** 1.7, (512, 64), ["aten::pow.Tensor_Scalar"]),
        (lambda x: x.median() * 2, (128, 64), ["aten::median"]),
        (lambda x: x.nanmedian(-1)[0] * 2, (128, 64), ["aten::nanmedian.dim"]),
        (lambda x: (x * 2).masked_scatter(PLACES[:512] > 31, x), (512, 32), ["aten::masked_scatter"]),
        (lambda x: x * torch.bucketize(x.detach(), torch.arange(-1.0, 1.0, 0.25)), (512, 64), ["aten::bucketize.Tensor"]),
        (lambda x: x.lerp(x * 2, x.detach() + 1), (512, 64), ["aten::lerp.Tensor"]),
    ],
    ids=[
        *(
            "glu",
            "leaky_relu",
            "prelu",
            "roll",
            "slice",
            "index_select",
            "scatter",
            "power",
            "median",
            "medians of rows",
            "masked_scatter",
            "bucketize",
        ),
        "lerp",
    ],
)
def test_large_tensors_by_pytorchs_kernels(function: Any, shape: tuple[int, ...], chosen: list[str]) -> None:
    assert [operator for operator, _, _ in _outside(function, torch.randn(shape))] == chosen


def test_float64_is_not_in_the_table(table: None) -> None:
    assert not any(is_choice for _, _, is_choice in _outside(nn.functional.gelu, torch.randn(200, dtype=torch.float64)))


@pytest.mark.parametrize("options", [{"kernels": "onnxruntime"}, {"strict": True}])
def test_onnx_runtime_only(table: None, options: dict[str, Any]) -> None:
    assert _outside(nn.functional.gelu, torch.randn(200), **options) == []


@single_session
def test_a_choice_is_no_warning(table: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ort_backend"):
        assert len(_outside(nn.functional.gelu, torch.randn(200))) == 1
    assert not [record for record in caplog.records if record.name.startswith("ort_backend")]


def test_an_unknown_value_is_an_error() -> None:
    with pytest.raises(Exception, match="option 'kernels' is 'fast', but must be 'measured' or 'onnxruntime'"):
        torch.compile(nn.functional.gelu, backend="ort_training", options={"kernels": "fast"})(torch.randn(2))


@single_session
@pytest.mark.parametrize(
    "length, keys, width, causal, slow_mkl, operators",
    [
        (512, 512, 8, False, False, 0), (600, 600, 8, False, False, 0), (600, 600, 8, True, False, 0), (4097, 40, 8, False, False, 2),
        (128, 128, 16, False, False, 2), (112, 128, 16, False, False, 0), (256, 256, 48, False, False, 2), (224, 224, 32, False, False, 0),
        (384, 384, 32, False, False, 2), (384, 384, 32, True, False, 0), (384, 384, 64, False, False, 0), (384, 77, 32, False, False, 0),
        (600, 77, 32, False, False, 2), (600, 600, 64, False, False, 2), (384, 384, 32, False, True, 0), (600, 77, 32, False, True, 0),
        (600, 600, 64, True, True, 0), (4097, 40, 8, False, True, 2),
    ],
)  # fmt: skip
def test_long_attention_keeps_no_probabilities(
    length: int, keys: int, width: int, causal: bool, slow_mkl: bool, operators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_products, "mkl_is_slow", lambda: slow_mkl)
    monkeypatch.setattr(dense_products, "mkl_is_at_home", lambda: False)
    assert _attention_in_pytorch(length, keys, width, causal) == ["forward", "backward"][:operators]


@single_session
@pytest.mark.parametrize(
    "length, keys, width, causal, in_pytorch",
    [
        (64, 64, 32, False, True), (48, 48, 32, False, False), (384, 77, 32, True, True), (384, 48, 32, False, False), (197, 197, 64, False, False),
        (256, 256, 64, False, True), (128, 128, 64, True, True), (96, 96, 64, True, False), (600, 600, 64, False, True), (600, 40, 8, False, True),
    ],
)  # fmt: skip
def test_attention_on_a_processor_of_intel_s(
    length: int, keys: int, width: int, causal: bool, in_pytorch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_products, "mkl_is_at_home", lambda: True)
    monkeypatch.setattr(dense_products, "mkl_is_slow", lambda: False)
    assert _attention_in_pytorch(length, keys, width, causal) == (["forward", "backward"] if in_pytorch else [])


def _attention_in_pytorch(length: int, keys: int, width: int, causal: bool) -> list[str]:
    """Of `"forward"` and `"backward"` those that PyTorch's kernel runs, by choice."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    outside = _outside(attend, *(torch.randn(1, 2, rows, width) for rows in (length, keys, keys)))
    assert all(is_choice for _, _, is_choice in outside)
    names = {operator.rpartition("::")[2] for operator, _, _ in outside}
    known = {"forward": "_scaled_dot_product_flash_attention_for_cpu", "backward": "_scaled_dot_product_flash_attention_for_cpu_backward"}
    assert names <= set(known.values())
    return [side for side, name in known.items() if name in names]


@single_session
@pytest.mark.parametrize(
    "dtype, width, has_instructions, operators",
    [(torch.bfloat16, 8, True, 2), (torch.bfloat16, 8, False, 0), (torch.bfloat16, 16, False, 2), (torch.float16, 64, False, 0)],
)
def test_long_attention_in_half_precision(
    dtype: torch.dtype, width: int, has_instructions: bool, operators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's, but in float16, and where heads are narrow and the processor has no instructions for it; the report names the size."""
    monkeypatch.setattr(dense_products, "mkl_is_slow", lambda: False)
    monkeypatch.setattr(dense_products, "mkl_is_at_home", lambda: False)
    monkeypatch.setattr(dense_products, "processor_multiplies_bfloat16", lambda: has_instructions)
    attend = nn.functional.scaled_dot_product_attention
    inputs = [torch.randn(1, 2, length, width, dtype=dtype, requires_grad=True) for length in (600, 40, 40)]
    torch._dynamo.reset()
    results = []
    for function in (torch.compile(attend, backend="ort_training"), attend):
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(results[0], results[1], rtol=5e-2, atol=5e-2)
    outside = [one for one in ort_backend.report().graphs[-1].outside if one.reason == "600 x 40 probabilities are too many to keep"]
    assert len(outside) == operators


@single_session
@pytest.mark.parametrize(
    "length, batch, hidden, by_onednn",
    [
        (16, 1, 64, False), (16, 8, 512, False), (16, 32, 256, True), (64, 1, 256, False), (64, 1, 64, True), (64, 8, 256, True), (128, 1, 512, True),
        (32, 64, 64, False), (33, 9, 64, True), (24, 16, 256, False), (32, 16, 256, True), (24, 65, 16, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("trains", [True, False])
def test_an_lstm_of_few_rows_and_steps_is_a_scan(length: int, batch: int, hidden: int, by_onednn: bool, trains: bool) -> None:
    """Of more rows and steps where it trains."""
    by_onednn |= not trains and batch > 8
    model, x = nn.LSTM(4, hidden), torch.randn(length, batch, 4)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True), torch.set_grad_enabled(trains):
        y, _ = torch.compile(model, backend="ort_training")(x)
    torch.testing.assert_close(y, model(x)[0], rtol=1e-4, atol=1e-5)
    assert {one.operator for one in ort_backend.report().graphs[-1].outside if "lstm" in one.operator} == (
        {"ort_training::onednn_lstm", *(["ort_training::onednn_lstm_backward"] if trains else [])} if by_onednn else set()
    )


@single_session
@pytest.mark.parametrize("side, chosen", [(31, False), (32, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dynamic", [False, True])
def test_small_matrices_are_factored_by_a_scan(side: int, chosen: bool, dtype: torch.dtype, dynamic: bool) -> None:
    def factor(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky_ex(a).L * 2

    matrix = torch.eye(side, dtype=dtype) * 3 + 1
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(factor, backend="ort_training", dynamic=dynamic)(matrix), factor(matrix))
    assert [(one.operator, one.is_choice) for one in ort_backend.report().graphs[-1].outside] == (
        [("aten::linalg_cholesky_ex", True)] if chosen else []
    )


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """A rotary embedding, as Llama's reference code has it."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2) * 2


@single_session
@pytest.mark.parametrize("length, options, chosen", [(64, {}, True), (63, {}, False), (64, {"kernels": "onnxruntime"}, False)])
def test_products_of_complex_pairs(length: int, options: dict[str, Any], chosen: bool) -> None:
    torch._dynamo.reset()
    x, angles = torch.randn(length, 4, 32, requires_grad=True), torch.randn(length, 16)
    results = []
    for call in (_rotate, torch.compile(_rotate, backend="ort_training", fullgraph=True, options=options)):
        y = call(x, angles)
        results.append([y.detach(), *torch.autograd.grad(y.sin().sum(), x)])
    torch.testing.assert_close(results[1], results[0])
    found = {one.operator: one.count for one in ort_backend.report().graphs[-1].outside}
    assert found == ({"aten::mul.Tensor": 2} if chosen else {})


@single_session
def test_products_that_stay_complex_are_onnx_runtimes() -> None:
    torch._dynamo.reset()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product = torch.view_as_complex(x) * torch.view_as_complex(y)
        return torch.view_as_real(product).sum() + product.abs().sum()

    x, y = torch.randn(64, 128, 2), torch.randn(64, 128, 2)
    torch.testing.assert_close(torch.compile(function, backend="ort_training")(x, y), function(x, y))
    assert "aten::mul.Tensor" not in {one.operator for one in ort_backend.report().graphs[-1].outside}


@single_session
@pytest.mark.parametrize("options", [{"kernels": "onnxruntime"}, {"strict": True}, {}])
def test_running_extremes_are_pytorchs_where_it_may_choose(options: dict[str, Any]) -> None:
    operators = [operator for operator, _, is_choice in _outside(lambda x: x.cummax(0).values * 2, torch.randn(40), **options) if is_choice]
    assert operators == ([] if options else ["aten::cummax"])


@pytest.mark.parametrize(("provider", "kernels", "chosen"), [("CPU", "measured", False), ("CUDA", "measured", True), ("CUDA", "onnxruntime", False)])
def test_on_a_gpu_steps_are_too_many_kernels(provider: str, kernels: str, chosen: bool) -> None:
    node = next(node for node in trace(torch.linalg.cholesky_ex, [torch.eye(4)]).graph.nodes if node.op == "call_function")
    target = capabilities.target("CPUExecutionProvider", 18)
    target = dataclasses.replace(target, provider=f"{provider}ExecutionProvider", training=True, python_op=True, kernels=kernels)
    assert (kernel_choice.faster_in_pytorch(node, target) is not None) == chosen
