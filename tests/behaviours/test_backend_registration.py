"""The backend is found by its name, and its options are checked and obeyed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from behaviours.check import call, compiled, if_on_cuda, on_ort, onnx_files, refused, same_as_eager, same_module, same_tree
from default_device import seeded
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ort_backend
from ort_backend import graph_report, target_choice
from ort_backend.options import CompileOptions
from ort_backend.runtime import arena

X = torch.randn(4, 3, generator=seeded(0)).requires_grad_()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_torch_lists_the_backend() -> None:
    assert "ort_training" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("ort_training") is ort_backend.ort_training


def test_no_import_is_needed(python: Any) -> None:
    code = """
import sys, torch
assert "ort_training" in torch._dynamo.list_backends()
assert not any(name.split(".")[0] in ("onnxruntime", "ort_backend", "onnxscript") for name in sys.modules)
x = torch.randn(3, requires_grad=True)
torch.compile(torch.sin, backend="ort_training")(x).sum().backward()
torch.testing.assert_close(x.grad, x.detach().cos())
import ort_backend
counts = ort_backend.report().graphs[0].counts
print(counts.forward, counts.backward)
"""
    assert python(code) == "1 1"


def test_the_arguments_of_transformers_take_the_name(tmp_path: Path) -> None:
    """The Trainer itself does not, as accelerate has a list of backends: `model.compile(backend="ort_training")` in front of it works."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(str(tmp_path), torch_compile=True, torch_compile_backend="ort_training", report_to=[], use_cpu=True)
    assert arguments.torch_compile_backend == "ort_training"


def test_the_function_itself_is_a_backend() -> None:
    with on_ort(graphs=1):
        step = torch.compile(lambda x: x.sin(), backend=ort_backend.ort_training)
        same_tree(step(X), X.sin())
        step(X).sum().backward()
    X.grad = None


@pytest.mark.parametrize("model", [nn.Linear(3, 2), torch.sin], ids=["module", "function"])
def test_the_function_itself_takes_no_model(model: Any) -> None:
    with pytest.raises(TypeError, match="not .*: say torch.compile"):
        ort_backend.ort_training(model, [X])


def test_a_method_and_a_decorated_function() -> None:
    @torch.compile(backend="ort_training", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    with on_ort(graphs=1, forwards=1, backwards=1):
        result = function(X)
        same_tree(result, X.sin() * 2)
        result.sum().backward()
    X.grad = None


def test_an_unknown_option_names_the_nearest() -> None:
    with refused(ort_backend.OptionError, "unknown option 'opsets'.*did you mean 'opset'"):
        compiled(torch.sin, options={"opsets": 18})(X)


@pytest.mark.parametrize(
    "options",
    [{"opset": 17}, {"opset": 22}, {"opset": "18"}, {"opset": True}, {"strict": 1}, {"verify": -1}, {"verify": 1.5}]
    + [{"dump_dir": 3}, {"provider": 3}, {"provider_options": []}, {"session_options": "fast"}]
    + [{"provider_options": {1: 2}}, {"session_options": {1: 2}}, {"dump_dir": ""}, {"guard_log": ""}],
    ids=str,
)
def test_a_bad_value_is_an_error_that_names_the_option(options: dict[str, Any]) -> None:
    (name,) = options
    with refused(ort_backend.OptionError, f"option '{name}' is .*, but must be "):
        compiled(torch.sin, options=options)(X)


@pytest.mark.parametrize("options", [["strict"], "strict"], ids=str)
@pytest.mark.parametrize("function", [torch.sin, lambda x: Doubled.apply(x)], ids=["operator", "Function"])
def test_options_that_are_no_dict_are_an_error(function: Callable[..., Any], options: Any) -> None:
    with refused(ort_backend.OptionError, "must be a dict, such as .*, or CompileOptions, not "):
        compiled(function, options=options)(X)


@pytest.mark.parametrize("provider", ["cpu", "cpuexecutionprovider", ""])
def test_a_provider_that_nobody_knows_is_an_error_that_names_the_option(provider: str, capfd: pytest.CaptureFixture[str]) -> None:
    message = f"option 'provider' is '{provider}', which ONNX Runtime does not know; this build has .*CPUExecutionProvider"
    with refused(ort_backend.OptionError, message):
        compiled(torch.sin, options={"provider": provider})(X)
    assert "EP Error" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("opset", [18, 19, 20, 21])
def test_the_opset_is_the_graphs(opset: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.1), nn.Linear(4, 2), nn.Softmax(-1))
    newest = if_on_cuda("aten::t", "aten::view") if opset == 21 else ()
    ran = same_as_eager(model, call(X), graphs=1, options={"opset": opset, "dump_dir": str(tmp_path)}, python_ops=newest)
    written = [onnx.load(path) for path in onnx_files(tmp_path, ran.graphs[0].name)]
    assert [{one.domain: one.version for one in graph.opset_import}[""] for graph in written] == [opset] * ran.graphs[0].sessions


def _session_options(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Collects the options and providers of every session that runs a graph."""
    arena.shrink()  # makes its own session, once in a process: not while this looks
    seen: list[tuple[Any, Any]] = []
    make = onnxruntime.InferenceSession.__init__

    def spy(self: Any, model: Any, options: Any = None, providers: Any = None, *args: Any, **more: Any) -> None:
        seen.append((options, providers))
        make(self, model, options, providers, *args, **more)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", spy)
    return seen


def test_session_options_reach_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _session_options(monkeypatch)
    wanted = {"intra_op_num_threads": 2, "session.intra_op.allow_spinning": "1", "enable_cpu_mem_arena": False}
    same_as_eager(nn.Linear(3, 2), call(X), graphs=1, options={"session_options": wanted})
    options = seen[-1][0]
    assert options.intra_op_num_threads == 2 and options.enable_cpu_mem_arena is False
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"


def test_each_session_writes_a_profile_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = _session_options(monkeypatch)
    options = {"session_options": {"enable_profiling": True, "profile_file_prefix": f"{tmp_path}/profile"}}
    for layer in (nn.Linear(3, 2), nn.Linear(3, 4)):
        same_as_eager(layer, call(X), graphs=1, options=options)
    prefixes = [made.profile_file_prefix for made, _ in seen if made.enable_profiling]
    assert len(set(prefixes)) == len(prefixes) >= 2
    assert all(prefix.startswith(f"{tmp_path}/profile_graph_") for prefix in prefixes)


@pytest.mark.parametrize(
    ("wanted", "message"), [({"no_such": 1}, "names 'no_such'"), ({"intra_op_num_threads": "many"}, "'intra_op_num_threads'.* cannot be 'many'")]
)
def test_a_session_option_that_does_not_exist_is_an_error(wanted: dict[str, Any], message: str) -> None:
    with refused(ort_backend.OptionError, message):
        compiled(nn.Linear(3, 2), options={"session_options": wanted})(X)


def test_the_cpu_reads_no_tensors_of_a_device() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
    with pytest.raises(ort_backend.OptionError, match="cannot read tensors on a CUDA device"):
        target_choice.target_of(CompileOptions(provider="CPUExecutionProvider"), fx.GraphModule({}, graph), [x])


@pytest.mark.cpu_only(reason="a provider that reads no tensors of a device")
def test_the_provider_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    seen = _session_options(monkeypatch)
    target_choice._warned.clear()
    with caplog.at_level(logging.WARNING):
        same_as_eager(
            nn.Linear(3, 2),
            call(X),
            graphs=1,
            options={"provider": "CPUExecutionProvider", "provider_options": {"arena_extend_strategy": "kSameAsRequested"}},
        )
    assert caplog.text.count("provider_options: the CPUExecutionProvider takes none: arena_extend_strategy changes nothing") == 1, caplog.text
    assert seen[-1][1] == [("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})]


def test_threads_follow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _session_options(monkeypatch)
    same_as_eager(nn.Linear(3, 2), call(X), graphs=1)
    assert seen[-1][0].intra_op_num_threads == torch.get_num_threads()


def test_models_with_options_of_their_own_do_not_share_sessions() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    with on_ort(graphs=2, forwards=3, python_ops=if_on_cuda("aten::t", "aten::view")):
        plain, other = compiled(first), compiled(second, options={"opset": 21})
        for step in (plain, other, plain):
            step(X).sum().backward()
    X.grad = None


def test_one_compiled_function_serves_modules_of_one_class() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    models = [nn.Linear(3, 2) for _ in range(3)]
    references = [nn.Linear(3, 2) for _ in range(3)]
    with on_ort(graphs=1, forwards=3):
        train = compiled(step)
        for model, reference in zip(models, references, strict=True):
            reference.load_state_dict(model.state_dict())
            train(model, X.detach()).backward()
            step(reference, X.detach()).backward()
            same_module(model, reference)


def test_the_report_says_what_ran() -> None:
    same_as_eager(nn.Linear(3, 2), call(X), graphs=1)
    (graph,) = ort_backend.report().graphs[-1:]
    text = str(ort_backend.report())
    assert graph.kind == "training" and graph.counts.forward == 2 and graph.python_ops == 0
    assert graph.name in text and "Linear.forward" in graph.function and "training" in graph.summary()


@pytest.mark.parametrize("first", ["", "import onnxruntime\n"])
def test_torchs_own_functions_stay_in_place(python: Any, first: str) -> None:
    code = """
import torch, torch.utils.checkpoint
checkpoint = torch.utils.checkpoint.checkpoint
{first}import ort_backend.compiler
assert torch.utils.checkpoint.checkpoint is checkpoint
print(torch.manual_seed.__module__, torch.cuda.manual_seed.__module__)
"""
    assert python(code.replace("{first}", first)) == "torch.random torch.cuda.random"


def test_an_empty_report_says_what_is_not_compiled_in_place() -> None:
    """Dynamo leaves an `nn.Sequential` that was compiled in place to eager PyTorch, whatever the backend, and nothing calls the backend."""
    graph_report.clear()
    model = nn.Sequential(nn.Linear(3, 2))
    assert "No graph has been compiled" in (said := str(ort_backend.report())) and "nn.Sequential(...).compile" in said
    compiled(model)(X)
    assert "nn.Sequential" not in str(ort_backend.report())
