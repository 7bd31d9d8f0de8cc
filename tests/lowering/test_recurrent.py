"""nn.LSTM, nn.GRU and nn.RNN as whole layers: outputs, states, every gradient and the random state against eager; what ran where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from behaviours.check import single_session
from default_device import ON_CPU, random_state
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import ort_backend
from ort_backend.lowering.kernels import dense_products, kernel_choice, onednn

SCANS = {"kernels": "onnxruntime"}  # LSTMs in float32 as ONNX Scans too, instead of oneDNN's kernels
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {}),
    ("LSTM", {"num_layers": 2, "bidirectional": True, "dropout": 0.3}),
    ("LSTM", {"bias": False, "batch_first": True}),
    ("GRU", {}),
    ("GRU", {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "batch_first": True}),
    ("GRU", {"bias": False}),
    ("RNN", {"num_layers": 2, "dropout": 0.3}),
    ("RNN", {"nonlinearity": "relu", "bias": False, "bidirectional": True}),
]


@pytest.fixture(autouse=True)
def _always_by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """LSTMs in float32, however small; by default such small ones are Scans."""
    monkeypatch.setattr(kernel_choice, "lstm_by_onednn", lambda *sizes, trains: True)


@pytest.fixture(autouse=True)
def _trace_rnns() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def _step(call: Any, model: nn.Module, x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, final states, all gradients and the random state of one step."""
    torch.manual_seed(3)
    model.zero_grad()
    leaves = [one.detach().clone().requires_grad_() for one in (x, *states)]
    initial = [tuple(leaves[1:])] if len(states) == 2 else leaves[1:]
    y, final = call(leaves[0], *initial)
    results = [y, *(final if isinstance(final, tuple) else (final,))]
    sum((one * (one + i)).cos().sum() for i, one in enumerate(results)).backward()
    gradients = [one.grad for one in (*leaves, *model.parameters())]
    assert all(one is not None for one in gradients)
    return [*(one.detach() for one in results), *(one.clone() for one in gradients), random_state()]


def _same(model: nn.Module, x: torch.Tensor, states: list[torch.Tensor], options: dict[str, Any] | None = None, tolerance: float = 1e-4) -> Any:
    compiled = torch.compile(model, backend="ort_training", options=options or {})
    torch.testing.assert_close(_step(compiled, model, x, states), _step(model, model, x, states), rtol=tolerance, atol=tolerance)
    return ort_backend.report().graphs[-1]


def _is_in_the_graph(graph: Any) -> bool:
    """Whether ONNX Runtime runs the layers of a graph; on a device PyTorch's kernels are taken for them."""
    return not graph.outside if ON_CPU else all(one.is_choice for one in graph.outside)


def _made(kind: str, given: dict[str, Any], initial: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor, list[torch.Tensor]]:
    if given.get("dropout") and not ON_CPU:
        pytest.skip("cuDNN, by which eager PyTorch runs all layers at once, draws by itself")
    torch.manual_seed(0)
    model = getattr(nn, kind)(4, 6, dtype=dtype, **given)
    x = torch.randn(5, 3, 4, dtype=dtype)
    batch = 5 if model.batch_first else 3
    shape = (model.num_layers * (1 + model.bidirectional), batch, 6)
    return model, x, [torch.randn(shape, dtype=dtype) for _ in range(initial * (1 + (kind == "LSTM")))]


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("kind, given", CASES)
def test_scans_equal_eager(kind: str, given: dict[str, Any], initial: bool) -> None:
    if "dropout" in given and not ON_CPU:
        pytest.skip("cuDNN draws what it drops from a generator of its own")
    graph = _same(*_made(kind, given, initial), SCANS)
    assert _is_in_the_graph(graph) and graph.onnx_nodes > 0


@pytest.mark.cpu_only(reason="oneDNN's kernels")
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("given", [given for kind, given in CASES if kind == "LSTM"])
def test_lstm_by_onednn_equals_eager(given: dict[str, Any], initial: bool) -> None:
    model, *rest = _made("LSTM", given, initial)
    graph = _same(model, *rest, tolerance=1e-5)
    layers = model.num_layers * (1 + model.bidirectional)
    assert {one.operator: one.count for one in graph.outside if "lstm" in one.operator} == {
        "ort_training::onednn_lstm": layers,
        "ort_training::onednn_lstm_backward": layers,
    }
    assert all(one.is_choice for one in graph.outside)


@pytest.mark.cpu_only(reason="cuDNN's layers are in one dtype")
@pytest.mark.parametrize("given", [{"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}])
@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_dtypes_under_autocast(kind: str, given: dict[str, Any]) -> None:
    made = _made(kind, given, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert _is_in_the_graph(_same(*made, tolerance=0.05))


@pytest.mark.cpu_only(reason="oneDNN's kernels")
@pytest.mark.skipif(not dense_products.processor_multiplies_bfloat16(), reason="oneDNN has no such kernels for this processor")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("given", [{"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}])
def test_lstm_in_bfloat16_is_eager_s(given: dict[str, Any], autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "lstm_by_onednn", lambda *sizes, trains: True)
    made = _made("LSTM", given, False, torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert made[0](made[1])[0].dtype is torch.bfloat16
        graph = _same(*made, tolerance=0.0)
    assert "ort_training::onednn_lstm_backward" in {one.operator for one in graph.outside}


@pytest.mark.cpu_only(reason="oneDNN's kernels")
@single_session
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_kernels_of_an_lstm_are_chosen_by_its_sizes(monkeypatch: pytest.MonkeyPatch, batch_first: bool) -> None:
    asked = []

    def choose(*sizes: int, trains: bool) -> bool:
        assert trains
        asked.append(sizes)
        return sizes == (7, 3, 6)

    monkeypatch.setattr(kernel_choice, "lstm_by_onednn", choose)
    model = nn.LSTM(4, 6, batch_first=batch_first)
    counts = []
    for length in (7, 5):
        torch._dynamo.reset()
        x = torch.randn(3, length, 4) if batch_first else torch.randn(length, 3, 4)
        counts.append(_same(model, x, []).python_ops)
    assert counts == [2, 0] and set(asked) == {(7, 3, 6), (5, 3, 6)}


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_other_dtypes(kind: str) -> None:
    assert _is_in_the_graph(_same(*_made(kind, {}, True, torch.float64), tolerance=1e-9))
    torch._dynamo.reset()
    in_half = _same(*_made(kind, {}, True, torch.bfloat16), SCANS, tolerance=0.1)
    assert _is_in_the_graph(in_half) or not ON_CPU  # the provider has few kernels for bfloat16


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("options", [{}, SCANS])
def test_as_many_nodes_whatever_the_length(kind: str, options: dict[str, Any]) -> None:
    model, _, _ = _made(kind, {"num_layers": 2}, False)
    counts = []
    for length in (3, 12):
        torch._dynamo.reset()
        counts.append(_same(model, torch.randn(length, 2, 4), [], options).onnx_nodes)
    assert counts[0] == counts[1] < 130


@pytest.mark.parametrize("options", [{}, SCANS])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_one_compile_for_all_lengths_and_batches(kind: str, options: dict[str, Any]) -> None:
    model, _, _ = _made(kind, {"num_layers": 2, "batch_first": True}, False)
    compiled = torch.compile(model, backend="ort_training", options=options, dynamic=True)
    before = len(ort_backend.report().graphs)
    for batch, length in ((3, 5), (4, 7), (2, 9)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(_step(compiled, model, x, []), _step(model, model, x, []), rtol=1e-4, atol=1e-4)
    assert len(ort_backend.report().graphs) == before + 1


def test_another_backend_still_has_pytorchs_decomposition() -> None:
    model, x, _ = _made("GRU", {}, False)
    targets: list[Any] = []

    def look(module: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(node.target for node in module.graph.nodes)
        return module.forward

    backend = aot_autograd(fw_compiler=look)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x)[0], model(x)[0])
    assert torch.ops.aten.sigmoid.default in targets and not any("ort_training" in str(target) for target in targets)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_no_gradients_needed(kind: str) -> None:
    model, x, states = _made(kind, {"num_layers": 2, "dropout": 0.5}, False)
    model.eval()
    compiled = torch.compile(model, backend="ort_training", options=SCANS)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert ort_backend.report().graphs[-1].kind == "inference"


@pytest.mark.parametrize("options", [{}, SCANS])
def test_inputs_without_gradients(options: dict[str, Any]) -> None:
    model, x, _ = _made("LSTM", {}, False)
    gradients = []
    for call in (torch.compile(model, backend="ort_training", options=options), model):
        model.zero_grad()
        call(x)[0].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, SCANS])
@pytest.mark.parametrize("kind, given", CASES)
def test_final_states_have_memory_of_their_own(kind: str, given: dict[str, Any], options: dict[str, Any]) -> None:
    """Truncated backpropagation sets those of sequences that end to zero, in place."""
    model, x, _ = _made(kind, given, False)
    compiled = torch.compile(model, backend="ort_training", options=options)
    y, final = compiled(x)
    before, loss = y.detach().clone(), y.square().sum()
    for state in final if isinstance(final, tuple) else (final,):
        assert torch.count_nonzero(state) > 0
        state.detach().zero_()
    torch.testing.assert_close(y.detach(), before, rtol=0, atol=0)
    loss.backward()


def test_weights_that_are_computed() -> None:
    """A recurrent weight that the graph itself computes enters the Scan as a state."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight_ih, self.weight_hh = nn.Parameter(torch.randn(12, 4)), nn.Parameter(torch.randn(12, 4))

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.gru(x, h, [self.weight_ih * 0.5, self.weight_hh * 0.5], False, 1, 0.0, True, False, False)

    assert _is_in_the_graph(_same(Scaled(), torch.randn(5, 3, 4), [torch.randn(1, 3, 4)]))


@pytest.mark.parametrize("options", [{}, SCANS])
def test_a_second_backward(options: dict[str, Any]) -> None:
    model, x, _ = _made("LSTM", {}, False)
    gradients = []
    for call in (torch.compile(model, backend="ort_training", options=options), model):
        model.zero_grad()
        out = call(x)[0].sum()
        out.backward(retain_graph=True)
        out.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_workspaces_are_given_back() -> None:
    model, x, _ = _made("LSTM", {"num_layers": 2}, False)
    compiled = torch.compile(model, backend="ort_training")
    for _ in range(3):
        compiled(x)[0].sum().backward()
        compiled(x)
    assert not onednn._workspaces


def test_packed_sequences() -> None:
    model, x, _ = _made("GRU", {}, False)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2], device="cpu"))
    compiled = torch.compile(lambda data, sizes, h: torch.gru(data, sizes, h, model._flat_weights, True, 1, 0.0, True, False), backend="ort_training")
    y, h = compiled(packed.data, packed.batch_sizes, torch.zeros(1, 3, 6))
    expected, final = model(packed)
    torch.testing.assert_close((y, h), (expected.data, final), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind, gates", [("lstm", 4), ("gru", 3), ("rnn", 1)])
@pytest.mark.parametrize("reverse", [False, True])
def test_operators_in_mixed_precision(kind: str, gates: int, reverse: bool) -> None:
    """As under autocast, in eager PyTorch: of the dtypes that the fake values have, and the numbers of float32 but for rounding."""
    torch.manual_seed(0)
    gx, h0, c0, w_hh, b_hh = (torch.randn(shape) * 0.5 for shape in ((5, 3, 8 * gates), (3, 8), (3, 8), (8 * gates, 8), (8 * gates,)))
    others = {"lstm": (h0, c0, w_hh, reverse), "gru": (h0, w_hh, b_hh, reverse), "rnn": (h0, w_hh, False, reverse)}[kind]
    steps = getattr(torch.ops.ort_training, f"{kind}_steps").default

    def run(inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [one.detach().requires_grad_() for one in (inputs, *others) if isinstance(one, torch.Tensor)]
        arguments = iter(leaves)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.dtype == torch.bfloat16):
            made = steps(*(next(arguments) if isinstance(one, torch.Tensor) else one for one in (inputs, *others)))
            made = made if isinstance(made, tuple) else (made,)
            gradients = torch.autograd.grad(made[0].float().sin().sum(), leaves)
        return [*made, *gradients]

    found, wanted = run(gx.bfloat16()), run(gx)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        expected = run(gx.bfloat16())
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    for one, exact in zip(found, wanted, strict=True):
        assert (one - exact).norm() <= (2e-2 if ON_CPU else 3e-2) * exact.norm()  # cuBLAS adds up otherwise
