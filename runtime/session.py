"""One ONNX Runtime session over a model."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.errors import OptionError, OutOfMemoryError, OutOfRangeError, SessionError
from ort_backend.runtime import arena, cuda, denormals, layer_norm, out_of_memory, out_of_range, profiling, square_root
from ort_backend.runtime.aten_op import AtenRegistration
from ort_backend.runtime.callbacks import take_error, watch
from ort_backend.runtime.capabilities import CPU_PROVIDER, not_on, register_libraries
from ort_backend.runtime.harmful_optimizers import harmful_optimizers
from ort_backend.runtime.idle_optimizers import idle_optimizers
from ort_backend.runtime.late_frees import frees_late
from ort_backend.runtime.python_op import Call, Registration, RunState, call_alone, call_without_autograd, ordering, running
from ort_backend.runtime.result_memory import memory
from ort_backend.runtime.triton_op import TritonRegistration
from ort_backend.target import ATEN, TRITON

log = logging.getLogger(__name__)

# Everything that ONNX Runtime's bindings raise.
ORT_ERRORS = (
    C.Fail,
    C.InvalidArgument,
    C.InvalidGraph,
    C.InvalidProtobuf,
    C.NotImplemented,
    C.RuntimeException,
    C.EPFail,
    C.EngineError,
    C.NoModel,
    C.NoSuchFile,
    C.ModelLoaded,
    RuntimeError,
)

_profiles = itertools.count()
_FUSING = (ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)

# What registers the callable behind a node, by its type; a `Registration` behind a `PythonOp`.
_REGISTRATIONS: dict[str, Callable[[Call], Any]] = {ATEN: AtenRegistration, TRITON: TritonRegistration}

# What TensorFloat-32 concerns.
_PRODUCTS = {"MatMul", "Gemm", "FusedMatMul", "Einsum", "Attention", "MultiHeadAttention", "LSTM", "GRU", "RNN"}
_CONVOLUTIONS = {"Conv", "ConvGrad", "ConvTranspose", "ConvTransposeGrad"}


@dataclasses.dataclass(frozen=True)
class SessionConfig:
    """How sessions are made: the options that concern ONNX Runtime, resolved."""

    provider: str = CPU_PROVIDER
    device: int = 0  # its index, where there are several
    provider_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    session_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimized_path: str | None = None
    cuda_graph: bool = False  # whether runs are to be captured, see `captured_run`

    def make_options(self) -> ort.SessionOptions:
        """ONNX Runtime's options: its threads follow torch's, and none of them spins between calls.

        Raises:
            OptionError: `session_options` names something that ONNX Runtime does not have, or a library that it cannot load.
        """
        options = ort.SessionOptions()
        options.log_severity_level = 4  # every error is raised; printing it besides helps nobody
        options.intra_op_num_threads = torch.get_num_threads()
        options.enable_mem_pattern = False
        # Nodes of the backward would take over the memory of the forward's temporaries, which would be held at the `YieldOp` for that.
        options.enable_mem_reuse = False
        # In the order of the graph: ONNX Runtime's own default leaves every parameter's gradient, and what it is computed from, to the end.
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.use_deterministic_compute = torch.are_deterministic_algorithms_enabled()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.disable_quant_qdq", "1")  # what is dequantized here are masks, see `fast_loops.masks`
        denormals.follow_thread(options)
        if self.provider == CPU_PROVIDER:
            arena.use_shared(options)
        if self.optimized_path is not None:
            options.optimized_model_filepath = self.optimized_path
        for name, value in self.session_options.items():
            self._set(options, name, value)
        return options

    @staticmethod
    def _set(options: ort.SessionOptions, name: str, value: Any) -> None:
        if name == "custom_op_libraries":
            register_libraries(options, tuple(map(str, value)))
            return
        if "." in name:
            options.add_session_config_entry(name, str(value))
            return
        if not hasattr(options, name) or callable(getattr(options, name)):
            raise OptionError(f"session_options names {name!r}, which onnxruntime.SessionOptions does not have")
        try:
            setattr(options, name, value)
        except TypeError as error:
            raise OptionError(f"session_options[{name!r}] cannot be {value!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Program:
    """A model in the form that a session takes, with what has to be known of it. It can be pickled.

    Attributes:
        name: The graph's.
        model: The serialised `onnx.ModelProto`.
        inputs: Names of the graph's inputs.
        outputs: Names of its outputs.
        float32_operators: The types of its nodes that read float32.
        lines: The user's line for each node by name.
        disabled: ONNX Runtime's graph optimizers that would break it, or that have nothing to do in it.
        can_be_captured: Whether a CUDA graph of one run can be replayed for every other.
        frees_late: Whether a run on CUDA must be waited for, see `late_frees`.
    """

    name: str
    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    float32_operators: frozenset[str]
    lines: Mapping[str | None, str | None]
    disabled: tuple[str, ...]
    can_be_captured: bool
    frees_late: bool

    @classmethod
    def of(cls, model: ir.Model, provider: str = CPU_PROVIDER) -> Program:
        """The program of a model for a provider; rewrites the model where ONNX Runtime's own kernel would lose precision."""
        disabled = harmful_optimizers(model, provider)
        if provider == CPU_PROVIDER and layer_norm.cancels():
            layer_norm.take_means_off(model)
            disabled.extend(layer_norm.FUSIONS)
        if provider == CPU_PROVIDER and square_root.is_inexact():
            square_root.take_in_float64(model)
        disabled.extend(name for name in idle_optimizers(model) if name not in disabled)
        nodes = ir.traversal.RecursiveGraphIterator(model.graph)  # those inside loops as well
        return cls(
            name=str(model.graph.name),
            model=ir.to_proto(model).SerializeToString(),
            inputs=tuple(str(value.name) for value in model.graph.inputs),
            outputs=tuple(str(value.name) for value in model.graph.outputs),
            float32_operators=frozenset(node.op_type for node in nodes if any(map(_may_be_float32, node.inputs))),
            lines={node.name: node.metadata_props.get("stack_trace") for node in model.graph},
            disabled=tuple(disabled),
            can_be_captured=_can_be_captured(model),
            frees_late=provider == cuda.PROVIDER and frees_late(model),
        )

    def renamed(self, name: str, functions: Mapping[str, str]) -> Program:
        """The same under another name, with other names for the callables that its Python nodes call."""
        model = onnx.ModelProto.FromString(self.model)
        model.graph.name = name
        for attribute in (one for node in model.graph.node for one in node.attribute if one.name in profiling.CALLED):
            attribute.s = functions.get(attribute.s.decode(), attribute.s.decode()).encode()
        return dataclasses.replace(self, name=name, model=model.SerializeToString())

    def profiled(self) -> Program:
        """The same with the user's lines in the names of its nodes."""
        model = onnx.ModelProto.FromString(self.model)
        lines = profiling.with_lines(model.graph.node, self.lines, backward=".backward" in self.name)
        return dataclasses.replace(self, model=model.SerializeToString(), lines=lines)


class Session:
    """An ONNX Runtime session and the Python callables behind its nodes. It can be closed, and opened again."""

    def __init__(self, program: Program, config: SessionConfig, calls: Sequence[Call]) -> None:
        self._registrations = [_REGISTRATIONS.get(call.op_type, Registration)(call) for call in calls]
        # Whether there are `PythonOp` nodes, in which a thread is alone.
        self.has_python_ops = any(call.op_type not in _REGISTRATIONS for call in calls)
        self._is_profiled = bool(config.session_options.get("enable_profiling"))
        self._program = program.profiled() if self._is_profiled else program
        self.name = program.name
        self._config = config
        self.on_cuda = config.provider == cuda.PROVIDER and torch.cuda.is_available()
        self.captures = config.cuda_graph and not cuda.has_stream(config.provider_options) and program.can_be_captured
        self._stream = torch.cuda.Stream(config.device) if self.captures and self.on_cuda else None
        self.inputs, self.outputs = list(program.inputs), list(program.outputs)
        self._open: ort.InferenceSession | None = None
        self.openings = 0
        self.open()
        if self._is_profiled:
            profiling.ends_at_exit(self)

    def open(self) -> Any:
        """ONNX Runtime's own session object, made if there is none.

        Raises:
            SessionError: ONNX Runtime rejects the model.
            EnvironmentProblem: it makes no session on the provider.
        """
        if self._open is None:
            with self._on_its_device():
                self._open = self._made()
            self.openings += 1
        return self._open._sess

    def _on_its_device(self) -> contextlib.AbstractContextManager[object]:
        return cuda.device(self._config.device) if self.on_cuda else contextlib.nullcontext()

    def _made(self, *, fuses: bool = True) -> ort.InferenceSession:
        provider = (self._config.provider, self._provider_options())
        options = self._config.make_options()
        if not fuses:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.enable_profiling = self._is_profiled
        if self._is_profiled:  # ONNX Runtime adds the second, in which other sessions are made as well
            options.profile_file_prefix += f"_{self.name}_{next(_profiles)}"
        disabled = list(self._program.disabled)
        try:
            # Without fallback: on an error it would make the session again on the CPU, with all optimizers. 1.19 does so all the same.
            made = ort.InferenceSession(self._program.model, options, providers=[provider], disabled_optimizers=disabled, enable_fallback=0)
        except ORT_ERRORS as error:
            if self.captures and "graph capture" in str(error):
                self.capture_no_more(error)
                return self._made(fuses=fuses)
            if options.graph_optimization_level in _FUSING:
                return self._without_fusions(error)
            raise SessionError(f"ONNX Runtime rejects the graph {self.name!r}: {error}") from error
        if made.get_providers()[0] != self._config.provider:
            raise not_on(self._config.provider)
        return made

    def _without_fusions(self, error: Exception) -> ort.InferenceSession:
        """The session of a graph that it rejects otherwise: every node has a kernel, but one that it has made of several may not."""
        try:
            made = self._made(fuses=False)
        except SessionError:
            raise SessionError(f"ONNX Runtime rejects the graph {self.name!r}: {error}") from error
        log.warning("ONNX Runtime runs the graph %r without its fusions of nodes, of which one fails: %s", self.name, error)
        return made

    def _provider_options(self) -> dict[str, str]:
        given = self._config.provider_options
        if self._config.provider != cuda.PROVIDER:
            return {key: str(value) for key, value in given.items()}
        operators = self._program.float32_operators  # 1.31 turns tensor cores off for half convolutions, too, where TensorFloat-32 is (`conv.cc`)
        numerics = cuda.Numerics.now(products=not operators.isdisjoint(_PRODUCTS), convolutions=not operators.isdisjoint(_CONVOLUTIONS))
        if self.captures:
            stream = None if self._stream is None else self._stream.cuda_stream
            return cuda.capture_options(self._config.device, numerics, stream, given)
        allocator = cuda.torch_allocator(self._config.device) if self.on_cuda else None
        return cuda.provider_options(self._config.device, numerics, allocator, given)

    def call(self, run: Callable[..., object], *args: Any, state: RunState | None = None) -> None:
        """Calls `run`, which runs this session: a method of ONNX Runtime's. What Python nodes keep for the backward goes to `state`."""
        if self._registrations:
            watch()
        if self.on_cuda:
            with self._running_on_cuda(state):
                run(*args)
        elif self.has_python_ops:
            call_alone(run, args, state)
        elif self._registrations:
            call_without_autograd(run, args)
        else:
            run(*args)

    @contextlib.contextmanager
    def _running_on_cuda(self, state: RunState | None) -> Iterator[None]:
        device = self._config.device
        cuda.take_failure()  # one that ONNX Runtime survived, by running with less memory, is not the reason of a later error
        with torch.cuda.device(device):  # ONNX Runtime makes it the current one and leaves it so
            fence = cuda.Fence.of(device, self._stream)
            if fence is not None:
                fence.to_onnxruntime()
            try:
                python = running(state, fence) if self.has_python_ops else ordering(fence)
                with python, torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
                    yield
            finally:
                if fence is not None:
                    fence.to_torch()

    def reads_on_host(self, devices: Sequence[torch.device]) -> bool:
        """Whether some of a run's results are on the CPU while the session works on a device: the host must wait for them."""
        return self.on_cuda and any(device.type == "cpu" for device in devices)

    def wait(self) -> None:
        """Waits until the device has done what runs on this thread have started."""
        torch.cuda.current_stream(self._config.device).synchronize()

    def run_options(self, devices: Sequence[torch.device], *, capture: int = -1) -> ort.RunOptions:
        """ONNX Runtime's options of a run with results on `devices`: the host waits for the device only where some are on the CPU, or memory is
        freed late.

        The first run with an id as `capture` is captured under it, the next ones replay that.
        """
        options = ort.RunOptions()
        if self.captures:
            options.add_run_config_entry("gpu_graph_id", str(capture))
        if self.on_cuda and not self.reads_on_host(devices) and (self.captures or not self._program.frees_late):
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options

    def capture_no_more(self, why: Exception) -> None:
        """Makes plain runs of the next ones."""
        log.warning("%s runs without a CUDA graph: %s", self.name, why)
        self.close()
        self.captures, self._stream = False, None

    def used(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, after PyTorch was told that this session's stream uses its memory, also when nobody else does any more."""
        if self._stream is not None:
            memory.record_stream(self._stream)
        return memory

    def close(self) -> None:
        """Gives the session's memory back, once nothing that it made is in use."""
        if self._open is not None:
            if self.on_cuda:
                cuda.finish(self._config.device)
            with self._on_its_device():
                self._open = None
            if self._config.provider == CPU_PROVIDER:
                arena.shrink()
                memory.release()

    def end_profile(self) -> str | None:
        """Writes the profile of the session's runs, and records no more; returns its path, None where there is none any more."""
        if self._open is None or not self._is_profiled:
            return None
        self._is_profiled = False
        return str(self._open.end_profiling())

    def failure(self, error: Exception) -> BaseException:
        """What to raise for an error of a run: the exception that a callable inside raised, as itself, or a `SessionError`."""
        raised = take_error() or cuda.take_failure()
        named = re.search(r"Name:'([^']+)'", str(error))
        line = self._program.lines.get(named.group(1)) if named else None  # None too for a node that ONNX Runtime's optimiser made
        if raised is not None:
            return noted(raised, line)
        where = f"\n  at {line}" if line else ""
        index = out_of_range.described(str(error))
        if index is not None:
            return OutOfRangeError(f"{index}, in graph {self.name!r}{where}")
        wanted = out_of_memory.described(str(error), on_cuda=self.on_cuda)
        if wanted is not None:
            return OutOfMemoryError(f"{wanted}, in graph {self.name!r}{where}")
        return SessionError(f"ONNX Runtime failed in graph {self.name!r}: {error}{where}")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # the modules are empty by then
            return
        for registration in getattr(self, "_registrations", ()):
            registration.release()
        if getattr(self, "_open", None) is not None:
            self.close()


def noted(error: BaseException, line: str | None) -> BaseException:
    """The exception with the user's line behind its text in a traceback; before Python 3.11 there are no notes."""
    note = f"  at {line}"
    if line and hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


# The host decides what comes next, or waits for a size.
_READ_BY_HOST = ("If", "Loop", "Scan", "PythonOp", TRITON, "NonZero", "Compress", "Unique")


def _may_be_float32(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in (ir.DataType.FLOAT, None)


def _can_be_captured(model: ir.Model) -> bool:
    """Whether a CUDA graph of one run can be replayed for every other."""
    fixed = all(value.shape is not None and value.shape.is_static() and 0 not in value.shape for value in model.graph.inputs)
    return fixed and bool(model.graph.inputs) and {node.op_type for node in model.graph}.isdisjoint(_READ_BY_HOST)
