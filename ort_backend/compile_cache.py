"""Compiled graphs in PyTorch's cache on disk, that of AOTAutograd: a graph compiled before is neither traced nor lowered again.

PyTorch keeps an entry under a hash of Dynamo's graph, its inputs and every setting of its own; what this backend goes by is added to that as its
`cache_key_tag`. What turns it off for inductor (`torch.compiler.config.force_disable_caches`, `TORCHINDUCTOR_AUTOGRAD_CACHE=0`) does so here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_node_safe, should_use_local_autograd_cache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor import codecache
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import config as compiler_config
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ort_backend import compiled_autograd, debug
from ort_backend.callables import Boxed
from ort_backend.deferred import deferred
from ort_backend.direct_call import DirectPlan
from ort_backend.lowering import registry
from ort_backend.lowering.fx_nodes import graph_modules
from ort_backend.lowering.lowered import Content
from ort_backend.lowering.provenance import module_of
from ort_backend.lowering.python_op import PythonCall, unique_name
from ort_backend.options import CompileOptions
from ort_backend.runtime import layer_norm, square_root
from ort_backend.runtime.inference_graph import InferencePlan
from ort_backend.runtime.region_graph import RegionPlan, RegionTrainingPlan
from ort_backend.runtime.session import Program
from ort_backend.runtime.training_graph import TrainingPlan
from ort_backend.target import OrtTarget

# Given a function that reads a graph, and the name of one of its parts: the callable.
Load = Callable[[Callable[[], "CompiledGraph"], str], Boxed]

# Options that a compiled graph does not depend on: sessions are made anew.
_NOT_IN_THE_GRAPH = {"verify", "guard_log", "provider_options", "session_options"}

_LARGEST = 64 << 20  # bytes of a model that is kept: each process that reads it holds it several times

# Whose operators are what the hash says they are; others are made of the user's Python, which may change under the same name.
_NAMESPACES = {"aten", "prims", "prim", "mkldnn", "_c10d_functional", "c10d_functional", "higher_order"}


@dataclasses.dataclass(frozen=True)
class CompiledModel:
    """All that a session is made of.

    Attributes:
        program: The model.
        calls: The callables behind its `ATen` and `PythonOp` nodes.
    """

    program: Program
    calls: tuple[PythonCall, ...]

    def renamed(self, name: str) -> CompiledModel:
        """The same under another name, with other names for the callables."""
        calls = tuple(dataclasses.replace(call, name=unique_name(call.title)) for call in self.calls)
        names = {old.name: new.name for old, new in zip(self.calls, calls, strict=True)}
        return CompiledModel(self.program.renamed(name, names), calls)


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """A lowered graph as it is kept: all that its sessions and the callables around them are made of.

    Attributes:
        name: The compile's; those of the models start with it.
        models: One for each session; none where nothing is computed, one where ONNX Runtime runs all of the graph.
        plan: What goes in and out.
        content: For the report.
        direct: How it is called without AOTAutograd's wrappers, if it can be.
    """

    name: str
    models: tuple[CompiledModel, ...]
    plan: TrainingPlan | InferencePlan | RegionTrainingPlan | RegionPlan
    content: Content
    direct: DirectPlan | None = None

    def renamed(self, name: str) -> CompiledGraph:
        """The same for another compile: the names of graphs and of callables are unique in a process."""
        models = tuple(model.renamed(name + model.program.name.removeprefix(self.name)) for model in self.models)
        return dataclasses.replace(self, name=name, models=models)


def is_for(settings: CompileOptions, target: OrtTarget, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether the compiled graph may be kept: a hash can tell what it depends on, and nobody wants to see how it is compiled."""
    if getattr(torch._dynamo.config, "caching_precompile", False):  # Dynamo would run what it has kept without a word to the backend
        return False
    if not should_use_local_autograd_cache() or importlib.util.find_spec("cloudpickle") is None:  # a machine may have been set up without it
        return False
    if compiled_autograd.is_on() or debug.directory_of(settings) is not None:
        return False
    if settings.fx_passes or settings.onnx_passes or settings.custom_op_libraries or registry.has_lowerings_of_users():
        return False
    if not all(map(_is_told_by_its_name, (node for graph in _graphs(gm)[1:] for node in graph.nodes))):
        return False
    plain = all(type(one) in (torch.Tensor, torch.nn.Parameter, FakeTensor) for one in example_inputs if isinstance(one, torch.Tensor))
    targets = (node.target for graph in _graphs(gm) for node in graph.nodes if node.op == "call_function")
    return plain and all(namespace in _NAMESPACES for namespace in map(_namespace, targets) if namespace is not None)


def _graphs(gm: fx.GraphModule) -> list[fx.Graph]:
    return [module.graph for module in graph_modules(gm)]


def _is_told_by_its_name(node: fx.Node) -> bool:
    """PyTorch's own check, which it makes of the graph but not of those inside it (2.13), as of checkpoints: one may call a user's function."""
    try:
        check_node_safe(node)
    except BypassAOTAutogradCache:
        return False
    return True


def _namespace(target: Any) -> str | None:
    """Of an operator; None for a function, about which PyTorch itself decides."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name).partition("::")[0]
    return "custom" if isinstance(target, torch.library.CustomOpDef) else None


@contextlib.contextmanager
def keeping(settings: CompileOptions, target: OrtTarget, gm: fx.GraphModule, example_inputs: Sequence[Any], load: Load) -> Iterator[None]:
    """Around AOTAutograd's compile of `gm`: looks for an entry under these settings first.

    For each part of one that is found `load` is called: with a function that reads the graph, and the part's name, to return the callable.
    """
    parts = [compiler_config.cache_key_tag, _sources(), *_settings(settings, target), repr(_state()), repr(_inputs(example_inputs)), _lines(gm)]
    tag = "\n".join(parts)
    before, _current.load = getattr(_current, "load", None), load
    guards_before, _current.guards = getattr(_current, "guards", 0), len(_guards())
    try:
        with (
            compiler_config.patch(cache_key_tag=hashlib.sha256(tag.encode()).hexdigest()),  # type: ignore[attr-defined]
            _without_inductor(),
            # One file for all of it, written when the forward is compiled: the backward is, too.
            functorch_config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True),
        ):
            yield
    finally:
        _current.load, _current.guards = before, guards_before


def _guards() -> Sequence[Any]:
    """Those on sizes and numbers that Dynamo's compile at hand has so far."""
    context = torch._guards.TracingContext.try_get()
    environment = getattr(context and context.fake_mode, "shape_env", None)
    return environment.guards if environment is not None else ()


def _fixes_a_number() -> bool:
    """Whether AOTAutograd compiled in the value of a number (an input of Dynamo's graph, of type float) that it could not write as a tensor.

    It keeps guards on sizes with what it compiled, but not on numbers: what it reads again would run with every value (torch 2.13, also inductor).
    """
    return any(symbol_is_type(symbol, SymT.FLOAT) for guard in _guards()[_current.guards :] for symbol in guard.expr.free_symbols)


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """PyTorch's hash of a graph takes in inductor: all of PyTorch's sources are read, and its code generators imported, for 0.7 s (read in 2.13).

    Here PyTorch's version stands for that.
    """
    with (
        mock.patch.object(codecache, "torch_key", lambda: str(torch.version.git_version).encode()),
        mock.patch.object(codecache, "init_backend_registration", lambda: None),
        # For graphs with Triton kernels: 0.1 s, 6 MB.
        deferred("torch._inductor.codegen.wrapper", "user_defined_triton_kernel_transitive_closure_source_code"),
    ):
        yield


_current = threading.local()


def _settings(settings: CompileOptions, target: OrtTarget) -> list[str]:
    options = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings) if field.name not in _NOT_IN_THE_GRAPH}
    has = {field.name: getattr(target, field.name) for field in dataclasses.fields(target) if field.name != "has_kernel"}
    return [repr(sorted(options.items())), repr(sorted({**has, "contrib_ops": sorted(target.contrib_ops)}.items()))]


def _state() -> tuple[Any, ...]:
    """What tracing reads beside the graph. PyTorch's own hash has some of it, of the autocast for one less in 2.11 than in 2.15."""
    devices = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))) for device in devices]
    attention = [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "mem_efficient", "math", "cudnn")]
    attention.append(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())
    einsum = torch.backends.opt_einsum
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(), str(torch.get_default_dtype()))
    return (*autocast, torch.is_autocast_cache_enabled(), *attention, einsum.enabled, einsum.strategy, torch.backends.cudnn.enabled, *modes)


def _inputs(example_inputs: Sequence[Any]) -> list[Any]:
    """What tracing and lowering read of inputs beside their sizes: which share which part of what memory, what autograd knows of them.

    And of symbolic sizes the power of two below the first value, as kernels are chosen for it.
    """

    def magnitude(size: Any) -> int | None:
        return None if size.node.hint is None else int(size.node.hint).bit_length()

    memory: dict[int, int] = {}
    found: list[Any] = []
    for one in example_inputs:
        if isinstance(one, torch.Tensor) and one.layout == torch.strided:
            shared = memory.setdefault(one.untyped_storage()._cdata, len(memory))
            place = (shared, str(one.storage_offset()), str(one.device))
            found.append((*place, one.requires_grad, one.is_leaf, one._is_view(), one.is_inference(), one.is_conj(), one.is_neg()))
            found.append([magnitude(size) for size in one.shape if isinstance(size, torch.SymInt)])
        else:
            found.append(magnitude(one) if isinstance(one, torch.SymInt) else str(getattr(one, "layout", type(one).__name__)))
    return found


@functools.cache
def _sources() -> str:
    """A hash of this package and of those that it writes graphs with and for: their versions, and what was found out about this processor."""
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "onnx", "onnx-ir", "onnxscript")]
    import onnxruntime  # above, it would be imported in front of `ort_backend.runtime`, with all that this leaves out

    versions += [sys.version, onnxruntime.__version__, onnxruntime.get_build_info(), str((layer_norm.cancels(), square_root.is_inexact()))]
    made = hashlib.sha256("\n".join(versions).encode())
    # In a checkout the folders are symlinks, which `glob` does not follow.
    for file in sorted(Path(folder, name) for folder, _, names in os.walk(Path(__file__).parent, followlinks=True) for name in names):
        if file.suffix == ".py":
            made.update(file.read_bytes())
    return made.hexdigest()


def _lines(gm: fx.GraphModule) -> str:
    """The user's lines, or modules, which reports and errors name: where a file was edited its graphs are compiled again."""
    return "\n".join(node.meta.get("stack_trace") or module_of(node) for graph in _graphs(gm) for node in graph.nodes)


def serializable(compile_forward: Callable[..., Boxed]) -> SerializableAOTDispatchCompiler:
    """A forward compiler such that AOTAutograd uses its cache."""
    return SerializableAOTDispatchCompiler(CompiledPart, compile_forward)  # type: ignore[arg-type]


class Kept:
    """A compiled graph that is pickled once for all its parts."""

    def __init__(self, graph: CompiledGraph) -> None:
        self._graph: CompiledGraph | None = graph
        self._data: bytes | None = None

    def add(self, direct: DirectPlan | None) -> None:
        """What is known once AOTAutograd has divided the graph."""
        if self._graph is not None:
            self._graph = dataclasses.replace(self._graph, direct=direct)

    def pickle(self) -> None:
        """Pickles the graph, unless that is done.

        Raises:
            BypassAOTAutogradCache: it cannot be.
        """
        if self._graph is not None:
            self._data, self._graph = _pickled(self._graph), None

    def __getstate__(self) -> dict[str, Any]:
        return {"_graph": None, "_data": self._data}

    def graph(self) -> CompiledGraph:
        """A new copy of the graph that was read."""
        assert self._data is not None
        return pickle.loads(self._data)


class CompiledPart(OutputCode):
    """One of AOTAutograd's callables over a compiled graph: `"forward"`, `"backward"` or `"inference"`, in the form that its cache keeps."""

    def __init__(self, kept: Kept, part: str, run: Boxed | None) -> None:
        super().__init__()
        self._boxed_call = True  # on the instance, from which AOTAutograd's wrappers copy it
        self._time_taken_ns = 0
        self._kept, self._part, self._run = kept, part, run

    @torch.compiler.disable  # as `callables.boxed` is
    def __call__(self, inputs: Any) -> Any:
        """Runs it: takes a list, which it empties."""
        return self._run(inputs)  # type: ignore[misc]

    def prepare_for_serialization(self) -> None:
        """Called on a copy.

        Raises:
            BypassAOTAutogradCache: the graph cannot be kept.
        """
        metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
        if getattr(metadata, "tokens", None):  # which AOTAutograd hands to what it compiled, but not to what it read (2.13)
            raise BypassAOTAutogradCache("ort_training: operators with effects hand on tokens")
        if _fixes_a_number():
            raise BypassAOTAutogradCache("ort_training: the value of a number is compiled in")
        _leave_out_views(metadata)
        self._kept.pickle()
        self._run = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Called on what was read from the cache."""
        self._run = _current.load(self._kept.graph, self._part)


@dataclasses.dataclass(frozen=True)
class _ViewsOfThisProcess:
    """The views by which AOTAutograd makes a result of its base. What is read from the cache has none, and makes the result by `as_strided`."""

    sequence: Sequence[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _leave_out_views(metadata: Any) -> None:
    """Keeps `_unsafe_view`s out of what is pickled, which a product of three dimensions ends in.

    Pickled they read their sizes from memory that is freed: the process crashes, or sizes that were never there are kept (torch 2.13).
    """
    unsafe_view = getattr(torch._C._functionalization, "_unsafe_view_ViewMeta", ())
    for i, one in enumerate(getattr(metadata, "output_info", ())):
        views = getattr(one, "view_meta_sequence", None)
        if views is not None and any(isinstance(view, unsafe_view) for view in views.sequence):
            metadata.output_info[i] = dataclasses.replace(one, view_meta_sequence=_ViewsOfThisProcess(views.sequence))


def _pickled(graph: CompiledGraph) -> bytes:
    """The graph in bytes.

    Raises:
        BypassAOTAutogradCache: it cannot be kept; PyTorch says in its log why.
    """
    from ort_backend import graph_pickle

    size = sum(len(model.program.model) for model in graph.models)
    try:
        data = graph_pickle.dumps(graph) if size <= _LARGEST else b""
    except Exception as error:
        raise BypassAOTAutogradCache(f"ort_training: {error}") from error
    if max(size, len(data)) > _LARGEST:
        raise BypassAOTAutogradCache(f"ort_training: the graph has constants of {max(size, len(data)) >> 20} MB")
    return data
