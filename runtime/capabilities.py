"""What the installed ONNX Runtime can do, found by asking it: one-node sessions, each asked once per process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.capi import _pybind_state as C

from ort_backend.errors import EnvironmentProblem, OptionError
from ort_backend.runtime import denormals
from ort_backend.target import OrtTarget

MS = "com.microsoft"

# Written with a declared output type and shape only; a probe without them brings the process down (onnxruntime-training 1.19.2).
_UNSAFE_TO_PROBE = {("", "MaxPoolGrad"), ("", "AveragePoolGrad")}
_CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}


def has_training() -> bool:
    """Whether this ONNX Runtime runs a forward and a backward in one session (`TrainingAgent`, `YieldOp`)."""
    return hasattr(C, "TrainingAgent") and has_contrib_op("YieldOp")


def has_python_op() -> bool:
    """Whether `PythonOp` nodes can run here."""
    return hasattr(C, "register_forward_runner")


def target(provider: str, opset: int, libraries: tuple[str, ...] = ()) -> OrtTarget:
    """The installed ONNX Runtime as a lowering target; `libraries`: paths of shared libraries with further operators.

    Raises:
        EnvironmentProblem: it cannot exchange tensors with PyTorch.
    """
    if not hasattr(C.OrtValueVector, "dlpack_at"):
        raise EnvironmentProblem(
            f"onnxruntime {ort.__version__} cannot exchange tensors with PyTorch by DLPack, which its wheels can since 1.21. "
            "Fix: pip install --upgrade onnxruntime"
        )
    return OrtTarget(
        opset=opset,
        provider=provider,
        training=has_training(),
        python_op=has_python_op(),
        has_kernel=functools.partial(has_kernel, provider=provider, opset=opset, libraries=libraries),
        contrib_ops=_ContribOps(libraries),
    )


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
    message = _refusal(ir.Model(graph, ir_version=9), ("CPUExecutionProvider",), libraries)
    return message is None or "is not a registered function/op" not in message


def has_kernel(node: ir.Node, *, provider: str, opset: int, libraries: tuple[str, ...] = ()) -> bool:
    """Whether `provider` runs `node` with inputs of the dtypes that it has. True where a dtype is not known."""
    if node.op_type in _CONTROL_FLOW or node.domain == MS and node.op_type in ("PythonOp", "PythonOpGrad", "YieldOp"):
        return True
    if (node.domain, node.op_type) in _UNSAFE_TO_PROBE:
        return provider == "CPUExecutionProvider" and all(v.dtype in (ir.DataType.FLOAT, ir.DataType.INT64) for v in node.inputs if v)
    if any(v is not None and v.dtype is None for v in node.inputs):
        return True
    if provider == "CUDAExecutionProvider" and not _reduces_rightly_on_cuda(node):
        return False
    # A kernel exists for dtypes, whatever the ranks: nodes that differ in rank only share one probe.
    key = (node.domain, node.op_type, tuple(None if v is None else v.dtype for v in node.inputs), _decisive(node), provider, opset, libraries)
    if key not in _probed:
        _probed[key] = _probe(node, provider, opset, libraries)
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
    return node.inputs[0] is not None and node.inputs[0].dtype in _SCATTERS_ON_CUDA[node.op_type]


def _decisive(node: ir.Node) -> tuple[Any, ...]:
    """The attributes that choose a kernel: the dtype to cast to, training or inference, reductions, number of outputs."""
    chosen = ("to", "training_mode", "reduction", "mode", "direction")
    return (*(str(node.attributes[name].value) for name in chosen if name in node.attributes), len(node.outputs))


def _probe(node: ir.Node, provider: str, opset: int, libraries: tuple[str, ...]) -> bool:
    inputs = [None if v is None else ir.Value(name=f"x{i}", type=v.type, shape=v.shape) for i, v in enumerate(node.inputs)]
    outputs = [ir.Value(name=f"y{i}", type=v.type, shape=v.shape) for i, v in enumerate(node.outputs)]
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs)
    graph = ir.Graph([v for v in inputs if v is not None], outputs, nodes=[copy], opset_imports={MS: 1, node.domain: node.version or 1, "": opset})
    message = _refusal(ir.Model(graph, ir_version=9 if opset <= 20 else 10), (provider,), libraries)
    return message is None or not any(word in message for word in _NO_KERNEL)


# What ONNX Runtime says of an operator that it does not know, or has no kernel for; the last, of one that only the CPU provider could run.
_NO_KERNEL = (
    "NOT_IMPLEMENTED",
    "Could not find an implementation",
    "INVALID_GRAPH",
    "is not a registered function/op",
    "assigned to the default CPU EP",
)


def _refusal(model: ir.Model, providers: tuple[str, ...], libraries: tuple[str, ...] = ()) -> str | None:
    """What ONNX Runtime says against a model, or None if it takes it."""
    options = ort.SessionOptions()
    register_libraries(options, libraries)
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    denormals.follow_thread(options)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if providers != ("CPUExecutionProvider",):
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=list(providers))
    except _REFUSALS as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return None


_REFUSALS = (C.Fail, C.InvalidArgument, C.InvalidGraph, C.NotImplemented, C.RuntimeException, C.EPFail, C.InvalidProtobuf)
