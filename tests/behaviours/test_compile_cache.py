"""Compiled graphs in PyTorch's cache: read again where nothing has changed, compiled again where something has, never kept where nobody can tell."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from default_device import DEVICE, ON_CPU
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_version import CHECKS_ERRORS, NEWER_TRACES, TORCH

import ort_backend
from ort_backend import compile_cache

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cloudpickle") is None, reason="graphs are kept by cloudpickle")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, in use."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    counters.clear()
    with functorch_config.patch(enable_autograd_cache=True):
        yield directory


def compile_again(function: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """A compile of its own, as a new process would make it."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, backend="ort_training", dynamic=dynamic, options=options)


def found() -> int:
    """How many graphs came from the cache since the last `compile_again`."""
    return counters["aot_autograd"]["autograd_cache_hit"]


def kept() -> int:
    """How many graphs were written to it since then."""
    return counters["aot_autograd"]["autograd_cache_saved"]


class Block(nn.Module):
    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.unflatten(self.qkv(x), 2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class PartlyInPyTorch(nn.Module):
    """ONNX Runtime has no kernel for one operator; the constant and the view beside it are PyTorch's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.one(x)).softmax(1)
        y = torch.unflatten(torch.logcumsumexp(y * torch.tensor([0.5, 2.0]).repeat(8), 1), 1, (2, 8)).transpose(1, 2)
        return F.gelu(self.other(y.flatten(1))).softmax(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "block": (Block, lambda: torch.randn(4, 32)),
    "large norm, a PythonOp": (lambda: nn.LayerNorm(512), lambda: torch.randn(256, 512)),
    "an operator that PyTorch runs": (PartlyInPyTorch, lambda: torch.randn(4, 32)),
    "large product, by oneDNN": (lambda: nn.Linear(1024, 1024), lambda: torch.randn(256, 1024)),
    "dropout": (lambda: Block(dropout=0.5), lambda: torch.randn(4, 32)),
    "buffers": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), lambda: torch.randn(2, 3, 8, 8)),
    "attention": (Attention, lambda: torch.randn(2, 6, 32)),
    "checkpoints": (Checkpointed, lambda: torch.randn(4, 32)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 3)), lambda: torch.randint(10, (4, 5))),
}


def step(model: Any, x: Tensor) -> list[Tensor]:
    """Output, gradients, buffers and the generator's state of one training step."""
    torch.manual_seed(1)
    module = getattr(model, "_orig_mod", model)
    module.zero_grad()
    output = model(x)
    output.square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in module.parameters()), *(b.clone() for b in module.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("name", MODELS)
def test_the_second_compile_is_the_first(name: str) -> None:
    make, draw = MODELS[name]
    model, x = make(), draw()
    eager, first, second = model, copy.deepcopy(model), copy.deepcopy(model)
    expected = step(eager, x)
    torch.testing.assert_close(step(compile_again(first), x), expected)
    assert (found(), kept()) == (0, 1)
    before = ort_backend.report().graphs[-1]
    torch.testing.assert_close(step(compile_again(second), x), expected)
    assert (found(), kept()) == (1, 0)
    after = ort_backend.report().graphs[-1]
    assert after.name != before.name and after.from_cache and not before.from_cache
    assert (after.onnx_nodes, after.fx_nodes, after.outside, after.kept_bytes) == (
        before.onnx_nodes,
        before.fx_nodes,
        before.outside,
        before.kept_bytes,
    )
    assert (after.counts.forward, after.counts.backward) == (1, 1)
    assert "from cache" in str(ort_backend.report()) and "from PyTorch's cache" in after.summary()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_keeping_a_graph_asks_no_module(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy modules import what they are asked for: transformers' all its models."""
    asked = []

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    def step(x: Tensor) -> Tensor:
        half = x.mT @ x / x.shape[0]
        return torch.linalg.eigvalsh(half + torch.eye(4, device=DEVICE)).exp().cumsum(0)

    compiled = compile_again(step, dynamic=dynamic)
    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    x = torch.randn(6, 4, device=DEVICE, requires_grad=True)
    compiled(x).sum().backward()
    assert kept() == 1
    assert not [name for name in asked if not name.startswith("__")]


def test_another_process_reads_what_one_has_compiled(python: Callable[..., str]) -> None:
    program = """
import sys, torch, ort_backend
from torch import nn
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1))
compiled = torch.compile(model, backend="ort_training")
x = torch.randn(256, 512)
for _ in range(2):
    compiled(x).sum().backward()
(graph,) = ort_backend.report().graphs
gradients = [p.grad.double().sum().item() for p in model.parameters()]
unneeded = {"onnxscript"} | ({"torch._inductor.codegen.wrapper"} if torch.torch_version.TorchVersion(torch.__version__) < "2.15" else set())
print(graph.from_cache, not unneeded & sys.modules.keys(), graph.python_ops > 0, graph.counts.backward, gradients)
"""
    first, second = python(program), python(program)
    assert first.startswith("False False True 2 ")  # the normalization's backward, or more, by PyTorch
    assert second == first.replace("False", "True")  # without an import of what lowers, or generates code


def test_graphs_without_gradients() -> None:
    model, x = Block(), torch.randn(4, 32)
    with torch.no_grad():
        for hits in (0, 1):
            torch.testing.assert_close(compile_again(model)(x), model(x))
            assert (found(), kept()) == (hits, 1 - hits)


def test_a_graph_that_computes_nothing() -> None:
    x = torch.randn(3, 4)
    for hits in (0, 1):
        y = compile_again(lambda x: (x.T, 1))(x)[0]
        assert y.data_ptr() == x.data_ptr() and y.shape == (4, 3)
        assert found() == hits


def test_symbolic_sizes() -> None:
    model = Block()
    for hits in (0, 1):
        compiled = compile_again(model)
        for rows in (3, 5, 7):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(step(compiled, x), step(model, x))
        assert (found(), kept()) == (2 * hits, 2 - 2 * hits)  # one graph for 3 rows, one for any number


def test_a_size_that_the_graph_was_not_compiled_for() -> None:
    """A guard of the entry decides: 3 rows take the other branch."""

    def function(x: Tensor) -> Tensor:
        return x.sin() if x.shape[0] > 4 else x.cos()

    for rows, hits in ((6, 0), (3, 0), (7, 1), (3, 1)):
        compiled, x = compile_again(function, dynamic=True), torch.randn(rows, 2)
        torch.testing.assert_close(compiled(x), function(x))
        assert found() == hits


def test_a_number_that_is_an_input_is_kept() -> None:
    for hits in (0, 2):
        compiled = compile_again(lambda x, scale: x * scale)
        for scale in (0.5, 1.5, 2.5):
            torch.testing.assert_close(compiled(torch.ones(3), scale), torch.full((3,), scale))
        assert found() == hits


def test_a_number_that_is_compiled_in_is_not_kept() -> None:
    """AOTAutograd fixes a number that the graph returns; nothing that is kept would say which one it was."""

    def decay(state: dict[str, float], weight: Tensor) -> Tensor:
        state["bias"] = 1.0 + 0.9 * state["bias"]
        return weight * state["bias"]

    for hits in (0, 1):  # the first number is compiled in by Dynamo
        compiled, state, expected = compile_again(decay), {"bias": 0.0}, {"bias": 0.0}
        for _ in range(4):
            torch.testing.assert_close(compiled(state, torch.ones(3)), decay(expected, torch.ones(3)))
            assert state["bias"] == pytest.approx(expected["bias"])
        assert found() == hits or (found() > hits and TORCH >= NEWER_TRACES)


def test_kernels_are_chosen_for_the_size_at_hand() -> None:
    """A symbolic size that was small when its graph was compiled says nothing about a large one."""
    model = nn.LayerNorm(256)
    for rows, hits, in_pytorch in ((4, 0, False), (2048, 0, True), (5, 1, False), (3000, 1, True)):
        compiled, x = compile_again(model, dynamic=True), torch.randn(rows, 256)
        torch.testing.assert_close(step(compiled, x), step(model, x))
        assert found() == hits
        assert bool(ort_backend.report().graphs[-1].outside) == (in_pytorch and ON_CPU)


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_that_are_views(dynamic: bool) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x * y
        return z, z[:, 1:], x.t(), y.expand(z.shape), torch.rand(z.shape[0], 2).T

    for hits in (0, 1):
        x, y = torch.randn(4, 6), torch.randn(6)
        torch.manual_seed(2)
        expected = function(x, y)
        torch.manual_seed(2)
        results = compile_again(function, dynamic=dynamic)(x, y)
        torch.testing.assert_close(results, expected)
        assert [one.stride() for one in results] == [one.stride() for one in expected]
        assert results[0].untyped_storage().data_ptr() == results[1].untyped_storage().data_ptr() and results[2].data_ptr() == x.data_ptr()
        assert (found(), kept()) == (hits, 1 - hits)


@pytest.mark.parametrize("train", [True, False])
def test_results_that_are_views_of_a_product(train: bool) -> None:
    """PyTorch pickles the sizes of such a view from memory that is freed."""
    weight = torch.randn(6, 4, requires_grad=train)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        product = x @ weight
        return product, product.transpose(0, 1), product[1], product[:, -2:], product.sum()

    x = torch.randn(3, 5, 6, requires_grad=train)
    expected = function(x)
    for hits in (0, 1):
        results = compile_again(function)(x)
        torch.testing.assert_close(results, expected)
        assert len({one.untyped_storage().data_ptr() for one in results[:4]}) == 1
        if train:
            losses = (sum(one.square().sum() for one in some) for some in (results, expected))
            torch.testing.assert_close(*(torch.autograd.grad(loss, (x, weight), retain_graph=True) for loss in losses))  # type: ignore[arg-type]
        assert (found(), kept()) == (hits, 1 - hits)


def test_inputs_changed_in_place() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x[:2] + y

    for hits in (0, 1):
        x, y = torch.randn(4, 3), torch.randn(3, requires_grad=True)
        mine = x.clone()
        result, expected = compile_again(function)(mine, y), function(x, y)
        torch.testing.assert_close((result, mine), (expected, x))
        assert found() == hits


def test_arguments_that_share_memory_are_other_arguments() -> None:
    """Sizes and strides are the same; whether the second sees what is written to the first is not."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    for share, start in ((False, 2), (True, 2), (True, 4), (False, 2), (True, 4), (True, 2)):
        one = torch.zeros(8)
        other = one if share else torch.zeros(8)
        result = compile_again(function)(one[0:4], other[start : start + 4])
        assert result.tolist() == ([2.0, 2.0, 0.0, 0.0] if share and start == 2 else [0.0] * 4)


def test_what_autograd_relies_on_holds() -> None:
    model, x = Block(), torch.randn(4, 32, requires_grad=True)
    step(compile_again(model), x.detach())
    compile_again(model)(x).sum().backward()
    for hits in (0, 1):
        compiled = compile_again(model)
        one, other = compiled(x), compiled(2 * x)
        gradients = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (other, one, one)]
        torch.testing.assert_close(gradients[1], torch.autograd.grad(model(x).sum(), x)[0])
        torch.testing.assert_close(gradients[1], gradients[2])
        assert found() >= hits
    with torch.no_grad():
        model.up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        one.sum().backward()


def test_both_sessions_of_one_entry_live_and_end_alone() -> None:
    """Their Python nodes call functions under names of their own."""
    model, x = nn.LayerNorm(512), torch.randn(256, 512)
    first = compile_again(model)
    expected = step(first, x)
    second = compile_again(copy.deepcopy(model))
    torch.testing.assert_close(step(second, x), expected)
    assert found() == 1
    del first, model
    torch._dynamo.reset()
    gc.collect()
    third = compile_again(nn.LayerNorm(512))
    torch.testing.assert_close(step(third, x), expected)
    assert found() == 1


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_nothing, torch.no_grad),
        (_nothing, lambda: torch.autocast(DEVICE, torch.bfloat16)),
        (lambda: torch.autocast(DEVICE, torch.bfloat16), lambda: torch.autocast(DEVICE, torch.float16)),
        (_nothing, lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)),
        pytest.param(_nothing, lambda: torch.backends.mkldnn.flags(enabled=False), marks=pytest.mark.cpu_only(reason="oneDNN")),
    ],
)
def test_another_state_of_pytorch_is_another_graph(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    model, x = Attention(), torch.randn(2, 6, 32)
    for context, hits in ((first, 0), (second, 0), (first, 1), (second, 1)):
        with context():
            result, expected = compile_again(model)(x), model(x)
        assert result.dtype == expected.dtype and result.requires_grad == expected.requires_grad
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
        assert found() == hits


@pytest.mark.parametrize("options", [{"kernels": "onnxruntime"}, {"opset": 20}, {"strict": True}, {"autograd_functions": "inline"}])
def test_another_option_is_another_graph(options: dict[str, Any]) -> None:
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    for given, hits in (({}, 0), (options, 0), ({}, 1), (options, 1), ({**options, "verify": 1, "session_options": {"log_severity_level": 3}}, 1)):
        torch.testing.assert_close(compile_again(model, **given)(x), model(x))
        assert found() == hits


def test_other_lines_of_the_user_are_another_graph(tmp_path: Path) -> None:
    """Reports and errors name them."""
    source = "import torch\ndef function(x):\n    return torch.linalg.eigvalsh(x).sum()\n"
    x = torch.eye(3, requires_grad=True)
    for i, (text, hits) in enumerate([(source, 0), ("\n" + source, 0), ("\n" + source, 1)]):
        names: dict[str, Any] = {}
        (tmp_path / "mine.py").write_text(text)
        exec(compile(text, str(tmp_path / "mine.py"), "exec"), names)
        compile_again(names["function"])(x)
        assert found() == hits
        assert f'mine.py", line {min(3 + i, 4)}' in ort_backend.report().graphs[-1].outside[0].where


def test_another_version_of_this_package_is_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    compile_again(model)(x)
    monkeypatch.setattr(compile_cache, "_sources", lambda: "another")
    compile_again(model)(x)
    assert (found(), kept()) == (0, 1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@torch.library.custom_op("compile_cache_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda x: Doubled.apply(x).sin(), {}),
        (lambda x: doubled(x).sin(), {}),
        (torch.sin, {"fx_passes": (lambda graph: None,)}),
        (torch.sin, {"onnx_passes": (lambda model: None,)}),
    ],
    ids=["a Function", "a custom operator", "an FX pass", "an ONNX pass"],
)
def test_what_depends_on_the_users_python_is_not_kept(function: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    x = torch.randn(4, requires_grad=True)
    for _ in range(2):
        compiled = compile_again(lambda x: function(x), **options)
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(function(x).sum(), x))
        assert (found(), kept()) == (0, 0)


def test_a_checkpoint_that_calls_a_function_of_the_users_is_not_kept() -> None:
    factor = 2.0

    @torch._dynamo.allow_in_graph
    def scaled(x: Tensor) -> Tensor:
        return x * factor

    x = torch.ones(3, requires_grad=True)
    for factor in (2.0, 3.0):
        result = compile_again(lambda x: checkpoint(scaled, x, use_reentrant=False).sin())(x)
        torch.testing.assert_close(result, (factor * x).sin())
        assert (found(), kept()) == (0, 0)


@pytest.mark.skipif(TORCH < CHECKS_ERRORS, reason="this torch gives them none")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_operators_with_effects_are_not_kept(requires_grad: bool) -> None:
    """Their tokens would be missing."""
    x = torch.eye(3).mul(2).requires_grad_(requires_grad)
    for _ in range(2):
        torch.testing.assert_close(compile_again(torch.linalg.inv)(x), torch.linalg.inv(x))
        assert (found(), kept()) == (0, 0)


def test_dumps_are_written_each_time(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    compile_again(model)(x)
    for i in range(2):
        compile_again(model, dump_dir=str(tmp_path / str(i)))(x)
        assert list((tmp_path / str(i)).glob("*.onnx"))


@pytest.mark.parametrize(
    "switch",
    [
        lambda: torch.compiler.config.patch(force_disable_caches=True),
        lambda: functorch_config.patch(enable_autograd_cache=False),
        lambda: torch._dynamo.config.patch(caching_precompile=True),  # Dynamo's own, which calls no backend
    ],
)
def test_pytorchs_switches_turn_it_off(switch: Callable[[], Any]) -> None:
    with switch():
        for _ in range(2):
            compile_again(nn.ReLU())(torch.ones(3))
            assert (found(), kept()) == (0, 0)


def test_without_cloudpickle_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compile_again(torch.sin)(torch.ones(3))
    assert (found(), kept()) == (0, 0)


def test_an_entry_that_cannot_be_read(cache: Path) -> None:
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    expected = step(compile_again(model), x)
    (entry,) = (path for path in cache.glob("aotautograd/*/*") if path.is_file())
    entry.write_bytes(entry.read_bytes()[:1000])
    torch.testing.assert_close(step(compile_again(model), x), expected)
    assert found() == 0
