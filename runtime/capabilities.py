"""What the installed ONNX Runtime can do, found by asking it: one-node sessions, each asked once per process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.errors import EnvironmentProblem, OptionError
from ort_backend.runtime import cuda, denormals
from ort_backend.target import ATEN, ATEN_DOMAIN, TRITON, OrtTarget

MS = "com.microsoft"
CPU_PROVIDER = "CPUExecutionProvider"

# Written with a declared output type and shape only; a probe without them brings the process down (onnxruntime-training 1.19.2).
_UNSAFE_TO_PROBE = {("", "MaxPoolGrad"), ("", "AveragePoolGrad")}
_CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}
_CALLS_PYTHON = {"PythonOp", "PythonOpGrad", "YieldOp", TRITON}


def has_training() -> bool:
    """Whether this ONNX Runtime runs a forward and a backward in one session (`TrainingAgent`, `YieldOp`)."""
    return hasattr(C, "TrainingAgent") and has_contrib_op("YieldOp")


def has_python_op() -> bool:
    """Whether `PythonOp` nodes can run here."""
    return hasattr(C, "register_forward_runner")


@functools.cache
def has_aten_op() -> bool:
    """Whether `ATen` nodes can run here, on the CPU."""
    return hasattr(C, "register_aten_op_executor") and has_contrib_op(ATEN, ATEN_DOMAIN)


@functools.cache
def has_triton_op() -> bool:
    """Whether `TritonOp` nodes can run here, on a CUDA device."""
    return hasattr(C, "register_triton_op_executor") and C.is_triton_enabled() and has_contrib_op(TRITON)


def target(provider: str, opset: int, libraries: tuple[str, ...] = (), device: int = 0) -> OrtTarget:
    """The installed ONNX Runtime as a lowering target, for a provider and one of its devices.

    Args:
        provider: Execution provider.
        opset: ONNX operator set to emit.
        libraries: Paths of shared libraries with further operators.
        device: Index of the device.

    Raises:
        OptionError: no ONNX Runtime has a provider of that name.
        EnvironmentProblem: it cannot exchange tensors with PyTorch, or does not run sessions on that provider.
    """
    if not hasattr(C.OrtValueVector, "dlpack_at"):
        raise EnvironmentProblem(
            f"onnxruntime {ort.__version__} cannot exchange tensors with PyTorch by DLPack, which its wheels can since 1.21. "
            "Fix: pip install --upgrade onnxruntime"
        )
    check_provider(provider, device)
    return OrtTarget(
        opset=opset,
        provider=provider,
        device_index=device,
        training=has_training(),
        python_op=has_python_op(),
        aten_op=provider == CPU_PROVIDER and has_aten_op(),
        triton_op=provider == cuda.PROVIDER and has_triton_op(),
        has_kernel=functools.partial(has_kernel, provider=provider, opset=opset, libraries=libraries, device=device),
        contrib_ops=_ContribOps(libraries),
    )


@functools.cache
def check_provider(provider: str, device: int = 0) -> None:
    """Checks that sessions which are to run on a provider do. ONNX Runtime makes a session on the CPU where it cannot load another provider.

    A success is remembered; a failure is looked at again by the next call.

    Raises:
        OptionError: no ONNX Runtime has a provider of that name.
        EnvironmentProblem: they do not; it says why.
    """
    if provider == CPU_PROVIDER:
        return
    available = ort.get_available_providers()
    if provider not in (*available, *ort.get_all_providers()):
        raise OptionError(f"option 'provider' is {provider!r}, which ONNX Runtime does not know; this build has {', '.join(available)}")
    x, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1])) for name in "xy")
    graph = ir.Graph([x], [y], nodes=[ir.Node("", "Relu", [x], outputs=[y])], opset_imports={"": 18})
    try:
        providers = _providers(ir.Model(graph, ir_version=9), provider, device, ort.SessionOptions())
    except _REFUSALS as refusal:
        raise not_on(provider, str(refusal)) from refusal
    if providers[0] != provider:
        raise not_on(provider)


def not_on(provider: str, said: str = "") -> EnvironmentProblem:
    """The error of sessions that do not run on a provider; `said`: what ONNX Runtime says about it."""
    available = ort.get_available_providers()
    if provider not in available:
        said = f"this build has {', '.join(available)}"
    elif failure := _load_failure(provider):
        said = f"its library cannot be loaded: {failure}"
    return EnvironmentProblem(f"onnxruntime {ort.__version__} makes no session on the {provider}: {said or 'what it printed may say why'}")


def _load_failure(provider: str) -> str | None:
    """What the system's loader says against the shared library of a provider, where it is one that has its own."""
    library = Path(C.__file__).parent / f"libonnxruntime_providers_{provider.removesuffix('ExecutionProvider').lower()}.so"
    try:
        if library.exists():
            ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return None


class _ContribOps(frozenset[str]):
    """The set of `"domain::Name"` operators outside ONNX, each looked up when it is asked for."""

    _libraries: tuple[str, ...]

    def __new__(cls, libraries: tuple[str, ...]) -> _ContribOps:
        made = super().__new__(cls)
        made._libraries = libraries
        return made

    def __contains__(self, name: object) -> bool:
        domain, _, op_type = str(name).partition("::")
        own = domain in (MS, "")
        return (own or bool(self._libraries)) and has_contrib_op(op_type, domain, () if own else self._libraries)


def register_libraries(options: ort.SessionOptions, libraries: Sequence[str]) -> None:
    """Makes the operators of shared libraries known to the sessions that are made with these options.

    Raises:
        OptionError: ONNX Runtime cannot load one.
    """
    for path in libraries:
        try:
            options.register_custom_ops_library(path)
        except _REFUSALS as error:
            raise OptionError(f"session_options['custom_op_libraries'] has {path!r}, which ONNX Runtime cannot load: {error}") from None


@functools.cache
def has_contrib_op(op_type: str, domain: str = MS, libraries: tuple[str, ...] = ()) -> bool:
    """Whether the build, or one of the libraries, knows the schema of an operator outside ONNX."""
    node = ir.Node(domain, op_type, inputs=[], outputs=[ir.Value(name="y")])
    graph = ir.Graph([], node.outputs, nodes=[node], opset_imports={"": 18, MS: 1, domain: 1})
    message = _refusal(ir.Model(graph, ir_version=9), CPU_PROVIDER, libraries)
    return message is None or "is not a registered function/op" not in message


def has_kernel(node: ir.Node, *, provider: str, opset: int, libraries: tuple[str, ...] = (), device: int = 0) -> bool:
    """Whether `provider` runs `node` with inputs of the dtypes that it has. True where a dtype is not known.

    Raises:
        EnvironmentProblem: ONNX Runtime makes no sessions on that provider.
    """
    if (
        node.op_type in _CONTROL_FLOW
        or node.domain == ATEN_DOMAIN
        or node.domain == MS
        and node.op_type in ("PythonOp", "PythonOpGrad", "YieldOp", TRITON)
    ):
        return True
    if (node.domain, node.op_type) in _UNSAFE_TO_PROBE:
        return provider == CPU_PROVIDER and all(v.dtype in (ir.DataType.FLOAT, ir.DataType.INT64) for v in node.inputs if v)
    if any(v is not None and v.dtype is None for v in node.inputs):
        return True
    if provider == cuda.PROVIDER and not _reduces_rightly_on_cuda(node):
        return False
    # A kernel exists for dtypes, whatever the ranks: nodes that differ in rank only share one probe.
    key = (node.domain, node.op_type, tuple(None if v is None else v.dtype for v in node.inputs), _decisive(node), provider, opset, libraries)
    if key not in _probed:
        check_provider(provider, device)
        _probed[key] = _probe(node, provider, opset, libraries, device)
    return _probed[key]


_probed: dict[tuple[Any, ...], bool] = {}

# The CUDA provider registers these kernels for every dtype. With a reduction, ScatterND refuses all others when it runs, and ScatterElements computes
# on a floating-point type of the same size (read in 1.19.2: `ScatterNDImplReduction`, `ScatterElements::ComputeInternal`).
_SCATTERS_ON_CUDA = {
    "ScatterND": {ir.DataType.FLOAT, ir.DataType.FLOAT16},
    "ScatterElements": {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.INT8},
}


def _reduces_rightly_on_cuda(node: ir.Node) -> bool:
    reduction = node.attributes.get("reduction")
    if node.domain or node.op_type not in _SCATTERS_ON_CUDA or reduction is None or reduction.as_string() == "none":
        return True
    if torch.are_deterministic_algorithms_enabled():  # they add in the order in which threads come; PyTorch then sorts the indices first
        return False
    return node.inputs[0] is not None and node.inputs[0].dtype in _SCATTERS_ON_CUDA[node.op_type]


def _decisive(node: ir.Node) -> tuple[Any, ...]:
    """The attributes that choose a kernel: the dtype to cast to, training or inference, reductions, number of outputs."""
    chosen = ("to", "training_mode", "reduction", "mode", "direction")
    return (*(str(node.attributes[name].value) for name in chosen if name in node.attributes), len(node.outputs))


def _probe(node: ir.Node, provider: str, opset: int, libraries: tuple[str, ...], device: int) -> bool:
    inputs = [None if v is None else ir.Value(name=f"x{i}", type=v.type, shape=v.shape) for i, v in enumerate(node.inputs)]
    outputs = [ir.Value(name=f"y{i}", type=v.type, shape=v.shape) for i, v in enumerate(node.outputs)]
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs)
    graph = ir.Graph([v for v in inputs if v is not None], outputs, nodes=[copy], opset_imports={MS: 1, node.domain: node.version or 1, "": opset})
    message = _refusal(ir.Model(graph, ir_version=9 if opset <= 20 else 10), provider, libraries, device)
    return message is None or not any(word in message for word in _NO_KERNEL)


# What ONNX Runtime says of an operator that it does not know, or has no kernel for, or that does not take such dtypes together. The last two: of one
# that only the CPU provider could run; and of one, or a step in the body of a function, that no provider could, where there are several providers and
# data may have to be copied between them (1.31.1 and 1.32.0: `IsNodeCompatibleWithProvider`; 1.19.2 gets as far as the kernels).
_NO_KERNEL = (
    "NOT_IMPLEMENTED",
    "Could not find an implementation",
    "INVALID_GRAPH",
    "Type Error",
    "is not a registered function/op",
    "assigned to the default CPU EP",
    "Provider type for",
)


def _refusal(model: ir.Model, provider: str, libraries: tuple[str, ...] = (), device: int = 0) -> str | None:
    """What ONNX Runtime says against a model, or None if it takes it."""
    options = ort.SessionOptions()
    register_libraries(options, libraries)
    if provider != CPU_PROVIDER:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        _providers(model, provider, device, options)
    except _REFUSALS as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return None


def _providers(model: ir.Model, provider: str, device: int, options: ort.SessionOptions) -> list[str]:
    """Those of a session over a model, which is gone again: ending one, too, leaves another device as the current one."""
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    denormals.follow_thread(options)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    data, given = ir.to_proto(model).SerializeToString(), {"device_id": str(device)} if provider == cuda.PROVIDER else {}
    try:
        with cuda.device(device) if provider == cuda.PROVIDER else contextlib.nullcontext():
            return ort.InferenceSession(data, options, providers=[(provider, given)], enable_fallback=0).get_providers()
    except (*_REFUSALS, RuntimeError, ValueError) as error:
        # These are the provider's, of the device; 1.19 tries again on the CPU then, whatever `enable_fallback` says, and raises what comes of that.
        failure = error if isinstance(error, (RuntimeError, ValueError)) else error.__cause__
        if failure is None or provider == CPU_PROVIDER:
            raise
        raise not_on(provider, str(failure)) from error


_REFUSALS = (C.Fail, C.InvalidArgument, C.InvalidGraph, C.NotImplemented, C.RuntimeException, C.EPFail, C.InvalidProtobuf)
