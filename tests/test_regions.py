"""Without training kernels: sessions with eager PyTorch between them. In an environment that has such kernels they are hidden here."""

from __future__ import annotations

import copy
import gc
import logging
import math
import operator
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from behaviours.check import WHOLE_GRAPHS, call, compiled, on_ort, refused, same_as_eager, same_gradients, same_tree, twin
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import checkpoint

import ort_backend
from ort_backend import boundary, compiler, min_cut, regions
from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.kernels import dense_products
from ort_backend.lowering.splitting import region_memory
from ort_backend.lowering.splitting.regions import SLOWER
from ort_backend.runtime import capabilities
from ort_backend.target import OrtTarget

aten = torch.ops.aten
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
OPERATORS = ["regions::twist", "regions::untwist"]


@pytest.fixture(autouse=True)
def _without_training_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "has_training", lambda: False)
    monkeypatch.setattr(capabilities, "has_python_op", lambda: False)


@torch.library.custom_op("regions::twist", mutates_args=())
def twist(x: torch.Tensor) -> torch.Tensor:
    """Without a lowering; remembers its results and counts its calls."""
    made = x.sin().mul_(2)
    RESULTS.append(weakref.ref(made))
    return made


@torch.library.custom_op("regions::untwist", mutates_args=())
def untwist(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return 2 * x.cos() * gradient


class Twist(nn.Module):
    """What has no lowering."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twist(x)


RESULTS: list[Any] = []
twist.register_fake(torch.empty_like)
untwist.register_fake(lambda x, gradient: torch.empty_like(x))
twist.register_autograd(
    lambda ctx, gradient: untwist(ctx.saved_tensors[0], gradient), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class Net(nn.Module):
    """Two parts for ONNX Runtime with one for PyTorch between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(16, 32), nn.Dropout(0.3), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(twist(self.first(x))).relu())


# -- what runs where


def test_a_graph_that_onnx_runtime_runs_whole_has_a_session_for_each_direction() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    (graph,) = same_as_eager(model, call(X), graphs=1).graphs
    assert (graph.kind, graph.sessions, graph.outside) == ("training", 2, ())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("twisted", ["nothing", "input", "result"])
def test_what_one_session_runs_is_lowered_once(monkeypatch: pytest.MonkeyPatch, twisted: str, dynamic: bool) -> None:
    lowered: list[fx.Node] = []
    lower = GraphLowering._lower
    monkeypatch.setattr(GraphLowering, "_lower", lambda self, node: (lowered.append(node), lower(self, node))[1])
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    if twisted != "nothing":
        model.insert(0 if twisted == "input" else len(model), Twist())
    (graph,) = same_as_eager(model, call(X), graphs=1, dynamic=dynamic, python_ops=[] if twisted == "nothing" else OPERATORS).graphs
    assert graph.sessions == 2 and lowered and len(set(lowered)) == len(lowered)


def test_a_session_reads_no_size_off_what_pytorch_computes_behind_it() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(5, 7), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2), source=ConstantSource("x"))
    graph = fx.Graph()
    given = graph.placeholder("x")
    late = graph.call_function(torch.ops.regions.twist.default, (given,))
    stride = graph.call_function(aten.sym_stride.int, (given, 0))
    value = graph.call_function(aten.mul.Tensor, (given, stride))
    product = graph.call_function(aten.mm.default, (value, graph.call_function(aten.t.default, (value,))))
    graph.output((late, product))
    with mode:
        for node, fake in zip(graph.nodes, (x, torch.empty_like(x), x.stride(0), x * x.stride(0), x.t(), x @ x.t())):
            node.meta["val"] = fake
    module = fx.GraphModule({}, graph)
    (region,) = regions.lower(module, OrtTarget(contrib_ops=frozenset()), strict=False, name="graph").regions
    assert [value.name for value in region.model.graph.inputs] == ["x"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_has_no_lowering_runs_between_sessions(dynamic: bool) -> None:
    (graph,) = same_as_eager(Net(), call(X), graphs=1, python_ops=OPERATORS, dynamic=dynamic).graphs
    assert graph.sessions == 4
    assert [(one.operator, one.count) for one in graph.outside] == [(name, 1) for name in OPERATORS]
    assert "4 sessions" in str(ort_backend.report()) and "in 4 sessions, 2 in PyTorch (regions::twist x1" in graph.summary()


def test_a_forward_without_gradients_takes_the_same_way() -> None:
    with torch.no_grad():
        (graph,) = same_as_eager(Net().eval(), call(X.detach()), graphs=1, python_ops=OPERATORS[:1], train=False).graphs
    assert (graph.kind, graph.sessions) == ("inference", 2)


def test_a_handful_of_cheap_nodes_gets_no_session(caplog: pytest.LogCaptureFixture) -> None:
    compiler._warned.clear()
    with caplog.at_level(logging.WARNING, logger="ort_backend"):
        (graph,) = same_as_eager(lambda x: twist(x + 1) * 3, call(X), graphs=1, python_ops=OPERATORS).graphs
    assert graph.sessions == 0
    chosen = {one.operator for one in graph.outside if one.is_choice}
    assert chosen == {"aten::add.Tensor", "aten::mul.Tensor"}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("between ONNX Runtime sessions" in text for text in said), "one warning for each operator that cannot run"


def test_strict_names_what_cannot_run_and_not_what_could() -> None:
    with refused(ort_backend.LoweringError, "regions::twist does not run on ONNX Runtime: no lowering"):
        compiled(lambda x: twist(x + 1) * 3, options={"strict": True})(X)


def test_branches_share_sessions() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        branches = [torch.tanh(twist((x * i).tanh() @ x.t() / 16) @ x).sigmoid() for i in range(4)]
        return sum(branches)  # type: ignore[return-value]

    with torch.no_grad():
        (graph,) = same_as_eager(function, call(X.detach()), graphs=1, python_ops=OPERATORS[:1], train=False).graphs
    assert graph.sessions == 2 and graph.outside[0].count == 4


# -- what PyTorch is faster at


@pytest.mark.parametrize("strict", [True, False])
def test_a_large_convolutions_backward_runs_in_pytorch_where_onnx_runtime_has_no_kernel(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    monkeypatch.setattr(capabilities, "has_contrib_op", lambda op_type, *_: op_type in ("Gelu", "FusedMatMul"))
    x = torch.randn(4, 32, 24, 24)
    options = {"strict": strict}
    (graph,) = same_as_eager(nn.Conv2d(32, 64, 3), call(x), graphs=1, atol=1e-2, options=options).graphs
    assert [(one.operator, one.reason) for one in graph.outside if one.reason == SLOWER] == (
        [] if strict else [("aten::convolution_backward", SLOWER)]
    )


@pytest.mark.parametrize(("side", "kernels", "chosen"), [(16, "measured", False), (40, "measured", True), (40, "onnxruntime", False)])
def test_large_matrices_are_factored_by_pytorchs_kernels(side: int, kernels: str, chosen: bool) -> None:
    def factor(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky_ex(x @ x.mT + torch.eye(side)).L @ x

    (graph,) = same_as_eager(factor, call(torch.randn(side, side)), graphs=1, train=False, options={"kernels": kernels}).graphs
    assert {one.operator for one in graph.outside if one.reason == SLOWER} == ({"aten::linalg_cholesky_ex"} if chosen else set())


# -- what passes between forward and backward


def _halves(monkeypatch: pytest.MonkeyPatch) -> list[min_cut.Halves]:
    found: list[min_cut.Halves] = []
    split = min_cut.split

    def spy(*args: Any) -> min_cut.Halves:
        found.append(split(*args))
        return found[-1]

    monkeypatch.setattr(min_cut, "split", spy)
    return found


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_are_not_saved_but_what_they_are_views_of(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(2, -1, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind()
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    found = _halves(monkeypatch)
    same_as_eager(Attention(), call(X), graphs=1, dynamic=dynamic)
    saved = [node.meta["val"] for node in found[0].backward.graph.nodes if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor)]
    assert len(saved) >= 3 and all(fake.is_contiguous() for fake in saved)


@pytest.mark.cpu_only(reason="kernels of the CPU")
@pytest.mark.parametrize("intel, strict", [(True, False), (False, False), (True, True)])
def test_what_is_slow_on_a_processor_of_intel_s(intel: bool, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_products, "mkl_is_at_home", lambda: intel)
    monkeypatch.setattr(dense_products, "mkl_is_slow", lambda: False)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.wide, self.narrow = nn.Linear(64, 192), nn.Linear(64, 1024), nn.Linear(1024, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (one.unflatten(-1, (2, 32)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return self.narrow(nn.functional.gelu(self.wide(mixed)))

    x = torch.randn(3, 72, 64)  # 216 x 64 x 1024 multiplications, and 216 x 64 x 192
    ran = same_as_eager(Attention(), call(x), graphs=1, python_ops=None, options={"strict": strict})
    found = {one.operator: one.count for graph in ran.graphs for one in graph.outside if one.reason == SLOWER}
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    expected = {attention: 1, f"{attention}_backward": 1, "aten::mm": 1, "aten::gelu_backward": 1}
    assert found == (expected if intel and not strict else {})


def test_no_tensor_is_copied_on_its_way_into_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    with on_ort(graphs=1):
        step = compiled(model)
        step(x).sum().backward()
        copies: list[Any] = []
        contiguous = torch.Tensor.contiguous
        monkeypatch.setattr(torch.Tensor, "contiguous", lambda tensor: copies.append(tensor.shape) or contiguous(tensor))
        step(x).square().sum().backward()
    assert copies == []


def test_a_parameter_that_the_backward_reads_is_watched() -> None:
    model = Net()
    with on_ort(graphs=1, python_ops=OPERATORS, idle=True):
        loss = compiled(model)(X).sum()
        with torch.no_grad():
            model.second.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_two_backwards_over_one_forward() -> None:
    model = Net().eval()
    reference = copy.deepcopy(model)
    with on_ort(graphs=1, forwards=1, backwards=2, python_ops=OPERATORS):
        for side in (compiled(model), reference):
            loss = side(X).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    same_gradients(model.parameters(), reference.parameters())
    X.grad = None


def test_a_checkpoint_computes_again_what_it_does_not_keep() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False).sin()

    model = Kept()
    with on_ort(graphs=1, python_ops=None) as ran:
        step = compiled(model)
        torch.manual_seed(3)
        RESULTS.clear()
        loss = step(X).sum()
        assert len(RESULTS) == 1
        loss.backward()
        assert len(RESULTS) == 2, "once for the forward, once for the backward"
    own = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(3)
    model(X).sum().backward()
    same_tree(own, [p.grad for p in model.parameters()])
    assert 0 < ran.graphs[0].kept_bytes <= X.nbytes, "the hidden layer is not kept, but what its dropout has drawn"
    X.grad = None


def test_gradients_that_autograd_has_none_of_stay_none() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ctx.set_materialize_grads(False)
            return x * 2, y * 3

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            seen.append([one is None for one in gradients])
            return tuple(None if one is None else one * factor for one, factor in zip(gradients, (2, 3)))

    seen: list[list[bool]] = []

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Double.apply(x.exp(), y.exp())

    for used in (0, 1):
        one, other = twin((X, X)), twin((X, X))
        with on_ort(graphs=1) as ran:
            for side, inputs in ((compiled(function), one), (function, other)):
                side(*inputs)[used].sum().backward()
        same_gradients(one, other)
        assert ran.graphs[0].functions == 1 and seen[-2] == seen[-1] == [used == 1, used == 0]


def test_pictures_of_changing_size_with_the_channels_innermost() -> None:
    layers = nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    calls = [call(torch.randn(n, 3, s, s).to(memory_format=torch.channels_last)) for n, s in ((2, 8), (3, 6), (4, 10))]
    same_as_eager(model, *calls, python_ops=None)


# -- order and memory


def test_draws_keep_their_order_among_sessions() -> None:
    def function(x: torch.Tensor) -> Any:
        first = torch.rand_like(x)
        second = torch.bernoulli((x.detach() @ x.detach().t()).sigmoid())
        third = nn.functional.dropout(second @ x, 0.5)
        return first * x, third, torch.randn(3)

    same_as_eager(function, call(X), graphs=1, python_ops=["aten::bernoulli", "aten::native_dropout", "aten::randn"])


def test_two_draws_that_are_written_alike_stay_two() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.empty_like(x).exponential_() - x * torch.empty_like(x).exponential_()) @ x.T

    same_as_eager(function, call(X), python_ops=None)


def test_attention_that_nothing_reads_has_no_session() -> None:
    def attended(x: torch.Tensor) -> torch.Tensor:
        heads = (x @ x.mT).view(1, 1, 8, 8)
        nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return twist(x)

    (graph,) = same_as_eager(attended, call(X.detach()), graphs=1, python_ops=OPERATORS[:1], train=False).graphs
    assert graph.sessions == 0


def test_values_go_with_their_last_reader() -> None:
    alive: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = twist(x)
        return x

    with on_ort(graphs=1, python_ops=OPERATORS[:1]), torch.no_grad():
        step = compiled(function)
        step(X.detach())
        RESULTS.clear()
        step(X.detach())
        for i in range(len(RESULTS)):
            alive.append(sum(one() is not None for one in RESULTS[: i + 1]))
        gc.collect()
    assert len(RESULTS) == 6 and sum(one() is not None for one in RESULTS) == 0


class _Watch(torch.autograd.Function):
    """Counts in its backward the tensors of a shape that are alive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.shape = shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ALIVE.append(sum(type(one) is torch.Tensor and one.shape == ctx.shape for one in gc.get_objects()))
        return gradient.clone(), None


ALIVE: list[int] = []


def test_saved_values_go_when_the_backward_has_read_them() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (_Watch.apply(x, (8, 33)) @ w).exp().sin().exp().sum()

    step, w = compiled(function), torch.randn(16, 33).requires_grad_()
    step(X, w).backward()
    ALIVE.clear()
    for _ in range(2):
        step(X, w).backward()
    assert ALIVE == [0, 0]
    X.grad = None


def test_a_backward_that_would_hold_much_memory_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_memory, "HELD", 512)
    model = nn.Sequential(*[module for _ in range(6) for module in (nn.Linear(16, 16), nn.Tanh())])
    (graph,) = same_as_eager(model, call(X), graphs=1).graphs
    assert graph.sessions > 3


def test_parts_pass_on_as_little_as_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_memory, "HELD", 4 * 10)
    graph = fx.Graph()
    saved = [graph.placeholder(f"saved_{i}") for i in range(6)]
    nodes: list[fx.Node] = []
    for one in saved:
        wide = graph.call_function(aten.sort.default, (one,))
        values, _ = (graph.call_function(operator.getitem, (wide, i)) for i in range(2))
        nodes += [wide, values, graph.call_function(aten.sum.default, (values,))]
    for node in graph.nodes:
        node.meta["val"] = torch.empty(() if node.target is aten.sum.default else 10, device="meta")
    for wide in nodes[::3]:
        wide.meta["val"] = (torch.empty(10), torch.empty(10))
    reads = {node: set(node.all_input_nodes) for node in nodes}
    parts = region_memory.cut(nodes, reads, saved, set())
    assert [len(part) for part in parts] == [3] * 6 and [node for part in parts for node in part] == nodes
    assert region_memory.cut(nodes, reads, saved[:1], set()) == [nodes]


@torch.library.custom_op("regions::widened", mutates_args=())
def widened(x: torch.Tensor) -> torch.Tensor:
    """Returns another dtype than its fake."""
    return x.double()


widened.register_fake(torch.empty_like)


def test_a_fake_tensor_of_the_wrong_dtype_is_an_error() -> None:
    with pytest.raises(ort_backend.OrtBackendError, match=r"tensor of torch.float64 came where the graph has one of torch.float32"):
        compiled(lambda x: (widened(x.exp()) @ x.t()).softmax(-1) @ x)(torch.randn(256, 256))


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what is allocated in torch's memory for the outputs of sessions."""
    from ort_backend.runtime import binding

    shapes: list[tuple[int, ...]] = []

    empty_strided = binding._empty_strided_cpu

    def noted(shape: tuple[int, ...], *rest: Any) -> torch.Tensor:
        shapes.append(shape)
        return empty_strided(shape, *rest)

    monkeypatch.setattr(binding, "_empty_strided_cpu", noted)
    yield shapes


def test_outputs_of_known_shape_are_in_torchs_memory(allocated: list[tuple[int, ...]]) -> None:
    with on_ort(graphs=1), torch.no_grad():
        step = compiled(lambda x: (x.exp(), x @ x.t()), dynamic=True)
        for rows in (5, 7):
            x = torch.randn(rows, 3)
            same_tree(step(x), (x.exp(), x @ x.t()))
    assert allocated == [(5, 3), (5, 5), (7, 3), (7, 7)]


def test_outputs_whose_shape_depends_on_values_are_not(allocated: list[tuple[int, ...]]) -> None:
    x = torch.tensor([1.0, -1.0, 2.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), on_ort(graphs=1, python_ops=None), torch.no_grad():
        same_tree(compiled(lambda x: x[x > 0] * 2)(x), x[x > 0] * 2)
    assert allocated == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_counts_addresses_counts_those_of_the_trace(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        hidden = (x.exp() @ x.t()).t()  # 8 x 8, columns first
        return twist(hidden).as_strided((4, 4), (1, 8), 3) @ hidden.as_strided((4, 3), (2, 3))

    same_as_eager(function, call(X / 8), graphs=1, python_ops=None, dynamic=dynamic)


def test_an_onnx_runtime_without_dlpack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities.C, "OrtValueVector", object)
    with refused(ort_backend.EnvironmentProblem, "cannot exchange tensors.*pip install --upgrade onnxruntime"):
        compiled(torch.sin)(X)


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ([("cpu", 3)], [("cpu", 3)], True),
        ([("cpu", 3), ("meta", 3)], [("cpu", 3)], False),  # ONNX Runtime copies it before each run
        ([("cpu", 3)], [("meta", 3)], False),
        ([("cpu", 3), 7], [("cpu", 3)], False),
    ],
)
def test_what_can_be_captured_lies_on_one_kind_of_device(inputs: list[Any], outputs: list[Any], expected: bool) -> None:
    def value(of: Any) -> Any:
        return of if isinstance(of, int) else torch.empty(of[1], device=of[0])

    assert boundary.is_fixed([value(one) for one in inputs], [value(one) for one in outputs]) is expected


def test_sizes_that_depend_on_the_arguments_are_not_fixed() -> None:
    size = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.empty(4), symbolic_context=size, source=ConstantSource("x"))
    assert not boundary.is_fixed([fake], [fake]) and boundary.is_fixed([torch.empty(4)], [torch.empty(4)])


def test_results_that_are_views_pass_on_that_there_is_no_gradient() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x.sin(), y.cos()
        return a.view(-1), a.unsqueeze(0), b.view(-1), b.unsqueeze(0)

    given = X, X.detach().clone().requires_grad_()
    one, other = twin(given), twin(given)
    with on_ort(graphs=1, python_ops=None):
        for side, inputs in ((compiled(function), one), (function, other)):
            side(*inputs)[0].sum().backward()
    same_gradients(one, other)
    assert one[1].grad is None


def test_rows_that_data_choose() -> None:
    """As experts have them: what is saved is transposed, and of a length that nobody knows."""

    def experts(x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        probabilities, chosen = (x @ gate).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for expert in range(2):
            rows, places = torch.where(chosen == expert)
            result = result.index_add(0, rows, (x[rows] @ w.T) * probabilities[rows, places, None])
        return result

    one, other = (twin((X, torch.eye(16).requires_grad_(), torch.linspace(-1, 1, 64).reshape(16, 4).requires_grad_())) for _ in range(2))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), on_ort(graphs=1, python_ops=None):
        for side, inputs in ((compiled(experts), one), (experts, other)):
            side(*inputs).square().sum().backward()
    same_gradients(one, other)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_complex_results_without_elements(shape: tuple[int, ...]) -> None:
    with on_ort(graphs=1, python_ops=None, idle=True):
        result = compiled(lambda x: torch.complex(x.sin().cos().tanh() * 2, x.cos().sin().tanh()) * 2 + 1j)(torch.randn(shape, requires_grad=True))
    assert result.shape == shape and result.dtype == torch.complex64


@pytest.mark.parametrize("pack", [torch.clone, lambda tensor: tensor], ids=["copied", "as it is"])
def test_an_lstm_by_onednn_under_hooks_on_saved_tensors(pack: Any) -> None:
    """Its workspace goes with a handle, whose copy leads nowhere: then the layer runs again."""
    layer = nn.LSTM(4, 6, num_layers=2)
    x = torch.randn(40, 12, 4)
    gradients = []
    with torch._dynamo.config.patch(allow_rnn=True), on_ort(graphs=1, python_ops=None) as ran:
        for side in (compiled(layer), layer):
            layer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
                result, _ = side(x)
            result.square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in layer.parameters()])
    torch.testing.assert_close(*gradients)
    assert {"ort_training::onednn_lstm", "ort_training::onednn_lstm_backward"} <= {one.operator for one in ran.graphs[0].outside}


SLOW: dict[str, tuple[Any, str]] = {
    "atan2": (lambda x: torch.atan2(x, x + 2), "aten::atan2"),
    "remainder": (lambda x: x % 0.7, "aten::remainder.Scalar"),
    "cumsum": (lambda x: x.cumsum(1), "aten::cumsum"),
    "floor_division": (lambda x: torch.div(x, 0.7, rounding_mode="floor") + x, "aten::div.Tensor_mode"),
    "relu_before_a_root": (lambda x: (nn.functional.relu(x) + 0.0).sqrt(), "aten::threshold_backward"),
}


@pytest.mark.skipif(WHOLE_GRAPHS, reason="about what runs between sessions")
def test_a_division_rounded_towards_zero_stays_in_the_session() -> None:
    x = torch.randn(256, 256).requires_grad_()
    # No sum of a gradient cancels, and no product is so large that tanh's slope goes by its last digits, which differ from processor to processor.
    model = lambda x: ((torch.div(x.sin() * 9, 0.7, rounding_mode="trunc") + x) @ (x.abs() + 2).t() * 1e-3).tanh().sum() * 1e3  # noqa: E731
    ran = same_as_eager(model, call(x), python_ops=None)
    assert not any(one.operator.startswith("aten::div") for graph in ran.graphs for one in graph.outside)


@pytest.mark.skipif(WHOLE_GRAPHS, reason="about what runs between sessions")
@pytest.mark.parametrize("kind", SLOW)
@pytest.mark.parametrize("rows", [4, 256])
def test_what_onnx_runtime_computes_one_by_one_runs_between_sessions_where_it_is_large(kind: str, rows: int) -> None:
    function, operator = SLOW[kind]
    x = torch.randn(rows, 256).requires_grad_()
    # Small products, for the same reason.
    model = lambda x: (function(x.sin().cos() * 2) @ x.t() * 1e-4).tanh().sum() * 1e4  # noqa: E731
    ran = same_as_eager(model, call(x), python_ops=None)
    assert (operator in {one.operator for graph in ran.graphs for one in graph.outside}) is (rows == 256)


def test_fractions_that_pytorch_computes_of_sizes() -> None:
    layer = nn.Linear(4, 4)
    model = lambda x: layer(x) * math.atan(x.shape[0] / 7)  # noqa: E731
    step = compiled(model, dynamic=True)
    for rows in (5, 8):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(step(x), model(x))
