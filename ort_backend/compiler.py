"""The backend: one compile from Dynamo's graph to callables that run ONNX Runtime sessions, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.utils
from functorch.compile import aot_module_simplified
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ort_backend import aot_metadata, compile_cache, compiled_autograd, debug, direct_call, garbage, graph_report, traced_graph
from ort_backend.callables import Boxed, boxed, eager_where, in_forward_mode, random_numbers, watched, with_dtypes
from ort_backend.compile_cache import CompiledGraph, CompiledModel, CompiledPart, Kept
from ort_backend.direct_call import DirectPlan
from ort_backend.eager_graph import eager_graph
from ort_backend.environment import check_environment
from ort_backend.errors import OptionError
from ort_backend.guards import records
from ort_backend.lowering.functions import autograd_function, dynamo_hook, traced_function
from ort_backend.lowering.fx_nodes import graph_modules
from ort_backend.lowering.kernels.kernel_choice import onednn_may_run_layers
from ort_backend.lowering.lowered import Content, LoweredGraph
from ort_backend.lowering.tracing import decompositions, recurrent_layers
from ort_backend.lowering.tracing.assigned_data import assigned_behind_the_graph
from ort_backend.lowering.tracing.checkpoints import nothing_to_compute_again
from ort_backend.lowering.tracing.composites import right_losses, whole_operators
from ort_backend.lowering.tracing.unread_draws import unread_draws
from ort_backend.options import CompileOptions
from ort_backend.runtime import python_op
from ort_backend.runtime.counts import RunCounts
from ort_backend.runtime.inference_graph import InferenceGraph, InferencePlan
from ort_backend.runtime.region_graph import RegionGraph, RegionPlan, RegionTraining, RegionTrainingPlan
from ort_backend.runtime.session import Program, Session, SessionConfig
from ort_backend.runtime.training_graph import TrainingGraph, TrainingPlan
from ort_backend.target import OrtTarget
from ort_backend.target_choice import target_of
from ort_backend.user_passes import name_of, run_fx_passes, run_onnx_passes
from ort_backend.verify import verified

if TYPE_CHECKING:
    from ort_backend.regions import RegionLowering

log = logging.getLogger(__name__)

# What a warning has said already: (operator, reason).
_warned: set[tuple[str, str]] = set()
# Sessions of one graph that are captured as CUDA graphs, at most: the host waits for each of them. A step of GPT-2 small, in 26,
# took 64 ms on an H100, and 26 in one session that is not captured (2026-11).
_MANY_CAPTURES = 4


def ort_training(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The `torch.compile` backend `"ort_training"`: trains on ONNX Runtime.

    Args:
        gm: Dynamo's graph. Parameters, buffers and inputs are its placeholders.
        example_inputs: Fake or real values of the placeholders.
        options: See `CompileOptions`.
        mode: `torch.compile`'s; None, or `"reduce-overhead"`, which is the option `cuda_graphs`.

    Returns:
        A callable with the graph's signature.

    Raises:
        OptionError: an option is unknown or has a value that is not accepted; or `mode` is one of inductor's.
        EnvironmentProblem: a package is missing, too old, or installed twice; or ONNX Runtime makes no session on the provider.
        LoweringError: `strict` is set and an operator does not run on ONNX Runtime's own kernels; or the tensors are on several CUDA devices, or on
            one that is neither that nor the CPU.
        PassError: a pass of the user's raised, or left a graph that cannot be used.
        SessionError: ONNX Runtime rejects the graph.
        OrtBackendError: a lowering raised, or returned what its operator does not.
        TypeError: `gm` is a model or a function: this is called by `torch.compile`.
    """
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(f"ort_training takes the graph that Dynamo hands to a backend, not {gm!r}: say torch.compile(model, backend='ort_training')")
    # 1. What is asked for, and what there is.
    settings = CompileOptions.parse(options)
    if mode == "reduce-overhead":
        settings = dataclasses.replace(settings, cuda_graphs=True)
    elif mode is not None:
        raise OptionError(f'mode={mode!r} belongs to inductor; backend="ort_training" takes its settings as options={{...}}')
    check_environment()
    if compiled_autograd.has_lists(example_inputs):
        flat, row = compiled_autograd.spread(gm, example_inputs)
        return compiled_autograd.with_lists(ort_training(flat, row, options=options, mode=mode))
    eager = traced_graph.simplify(gm)
    compilation = records.start(gm, settings)
    name = graph_report.next_name()
    traced = traced_function.make_opaque(gm) if settings.autograd_functions == "opaque" and not HAS_HOOK else 0
    if traced:
        log.warning("this torch has no place for the hook on autograd.Function: %d of them run as Dynamo traced them", traced)
    dump = debug.Dump.asked_for(settings, name)
    if dump is not None and not compiled_autograd.has_own_operators(gm):
        dump.repro(gm, example_inputs, settings)
    one = _Compilation(settings, target_of(settings, gm, example_inputs), compilation, name, dump, _inlined_functions(gm))

    # 2. AOTAutograd functionalises and decomposes, traces forward and backward as one joint graph, and calls back with it.
    #    What it has compiled before it finds in its cache.
    whole_layers = decompositions.lstm_as_steps(onednn=onednn_may_run_layers(one.target, strict=settings.strict))
    one.functions_write = autograd_function.write_to_arguments(gm)
    one.keeps = compile_cache.is_for(settings, one.target, gm, example_inputs)
    cache = compile_cache.keeping(settings, one.target, gm, example_inputs, one.load) if one.keeps else contextlib.nullcontext()
    with (
        compilation.phase("aot"),
        whole_layers,
        whole_operators(),
        right_losses(),
        assigned_behind_the_graph(),
        unread_draws(),
        nothing_to_compute_again(gm),
        cache,
    ):
        compiled = aot_module_simplified(
            gm,
            example_inputs,
            fw_compiler=compile_cache.serializable(one.forward_of) if one.keeps else one.forward_of,
            bw_compiler=one.backward_of,
            inference_compiler=one.compile_inference,
            partition_fn=one.compile_joint,
            decompositions=decompositions.Table(),
        )

    # 3. What came of it goes on record.
    compilation.finish(one.publish())
    return one.around(compiled, gm, example_inputs, eager_graph(eager))


class _Compilation:
    """The callbacks of one compile, in the order in which AOTAutograd calls them."""

    def __init__(
        self, settings: CompileOptions, target: OrtTarget, compilation: records.Compilation, name: str, dump: debug.Dump | None, inlined: int
    ) -> None:
        self.settings, self.target, self.name, self.dump = settings, target, name, dump
        self._compilation = compilation
        self._seconds = {"lowering": 0.0, "session": 0.0}
        self._started = time.perf_counter()
        self._content: Content | None = None
        self._inlined = inlined
        self._counts = RunCounts()
        self._training: TrainingGraph | RegionTraining | None = None
        self._inference: InferenceGraph | RegionGraph | None = None
        self._kept: Kept | None = None
        self._captured = 0
        self._direct: DirectPlan | None = None
        self._autocast = torch._C._is_any_autocast_enabled()
        self._has_backward = threading.Event()  # AOTAutograd asks for it when it runs first, unless the cache is to have it
        self.keeps = False  # whether PyTorch's cache is to have what is compiled
        self.functions_write = False  # whether users' Functions write to their arguments
        self._from_cache = False

    # A graph with gradients: the joint graph is compiled whole, then its halves are handed out.

    def compile_joint(self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's `partition_fn`."""
        with self._phase("lowering"):
            joint = run_fx_passes(self.settings.fx_passes, joint)
        if self.dump is not None:
            self.dump.graph(joint)
        if not self.target.whole_graphs:
            return self._compile_regions(joint, joint_inputs, num_fwd_outputs, rest)
        with _imports():
            from ort_backend.joint import halves, lower_joint
        with self._phase("lowering"):
            made = lower_joint(joint, num_fwd_outputs, self.target, strict=self.settings.strict, name=self.name, rewrite=self._rewrite)
        self._build(CompiledGraph(self.name, (self._model(made.lowered),), made.plan, made.lowered.content))
        return halves(joint, made.partition, made.plan.saved_outputs)

    def forward_of(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        """AOTAutograd's `fw_compiler`."""
        metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
        aot_metadata.keep_saved_tensors(metadata)
        if not self.functions_write:
            aot_metadata.hide_writes(metadata)
        if self._training is not None:
            self._direct = direct_call.plan_of(metadata, self._training.has_gradient)
            if self._kept is not None:
                self._kept.add(self._direct)
        return self._part("forward")

    @torch.compiler.disable  # it is called while the program runs, which Dynamo may be compiling
    def backward_of(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        """AOTAutograd's `bw_compiler`, called at the first backward, or at once."""
        self._has_backward.set()
        return self._part("backward")

    # A graph without gradients.

    def compile_inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        """AOTAutograd's `inference_compiler`."""
        aot_metadata.hide_writes(getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None))
        with self._phase("lowering"):
            module = run_fx_passes(self.settings.fx_passes, module)
        if self.dump is not None:
            self.dump.graph(module)
        if not self.target.whole_graphs:
            made = self._regions(module, "")
            self._build(CompiledGraph(self.name, tuple(map(self._model, made.regions)), made.plan, made.content))
            return self._part("inference")
        with _imports():
            from ort_backend.joint import lower_inference
        with self._phase("lowering"):
            lowered, plan = lower_inference(module.graph, self.target, strict=self.settings.strict, name=self.name, rewrite=self._rewrite)
        models = (self._model(lowered),) if plan.fetch_devices else ()
        self._build(CompiledGraph(self.name, models, plan, lowered.content))
        return self._part("inference")

    # Either, compiled here or before.

    def load(self, graph: Callable[[], CompiledGraph], part: str) -> Boxed:
        """For each part of a graph that AOTAutograd's cache has: its callable."""
        self._from_cache = True
        if self._content is None:
            with self._phase("lowering"):
                read = graph().renamed(self.name)
            self._build(read)
            self._direct = read.direct
            self._has_backward.set()
        return self._callable(part)

    def _build(self, graph: CompiledGraph) -> None:
        """Makes the sessions and the callables around them."""
        sessions = [self._session(model) for model in graph.models]
        match graph.plan:
            case TrainingPlan():
                self._training = TrainingGraph(sessions[0], graph.plan, self._counts)
            case InferencePlan():
                self._inference = InferenceGraph(sessions[0] if sessions else None, graph.plan, self._counts)
            case RegionTrainingPlan():
                self._training = RegionTraining(graph.plan, sessions, self._counts)
                self._captured = self._training.captured_sessions
            case RegionPlan():
                self._inference = RegionGraph(graph.plan, sessions, self._counts.ran_forward)
                self._captured = self._inference.captured_sessions
        self._content, self._kept = graph.content, Kept(graph)

    def _part(self, name: str) -> Boxed:
        """What AOTAutograd gets for one of its graphs."""
        run = self._callable(name)
        return CompiledPart(self._kept, name, run) if self.keeps and self._kept is not None else boxed(run)

    def _callable(self, part: str) -> Boxed:
        if part == "inference":
            assert self._inference is not None
            return self._inference
        assert self._training is not None
        return direct_call.writing(self._training.forward, self._direct) if part == "forward" else self._training.backward

    # Either, where ONNX Runtime cannot run all of a graph: sessions with eager PyTorch between them.

    def _compile_regions(self, joint: fx.GraphModule, joint_inputs: Any, num_fwd_outputs: int, rest: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        with _imports():
            from ort_backend import min_cut
        made = min_cut.split(joint, joint_inputs, num_fwd_outputs, rest, self.target)
        forward = self._regions(made.forward, ".forward")
        backward = self._regions(made.backward, ".backward", first_session=len(forward.regions))
        content = forward.content.and_of(backward.content)
        plan = RegionTrainingPlan(forward.plan, backward.plan, made.tangent_outputs, bool(content.functions), num_fwd_outputs)
        self._build(CompiledGraph(self.name, tuple(map(self._model, (*forward.regions, *backward.regions))), plan, content))
        return made.forward, made.backward

    def _regions(self, module: fx.GraphModule, part: str, first_session: int = 0) -> RegionLowering:
        with _imports():
            from ort_backend import regions
        name = self.name + part
        if self.dump is not None and part:
            self.dump.of(name).graph(module)
        with self._phase("lowering"):
            made = regions.lower(module, self.target, strict=self.settings.strict, name=name, is_half=bool(part), first_session=first_session)
            rewritten = tuple(map(self._rewrite, made.regions))
        by_passes = sum(one.onnx_nodes for one in rewritten) - sum(one.onnx_nodes for one in made.regions)
        content = dataclasses.replace(made.content, onnx_nodes=made.content.onnx_nodes + by_passes)
        return dataclasses.replace(made, regions=rewritten, content=content)

    # What all have in common.

    def _rewrite(self, lowered: LoweredGraph) -> LoweredGraph:
        """The graph behind the user's ONNX passes."""
        if not self.settings.onnx_passes:
            return lowered
        before = len(lowered.model.graph)
        model = run_onnx_passes(self.settings.onnx_passes, lowered.model)
        return dataclasses.replace(lowered, model=model, onnx_nodes=lowered.onnx_nodes + len(model.graph) - before)

    def _model(self, lowered: LoweredGraph) -> CompiledModel:
        with self._phase("session"):
            if self.dump is not None:
                self.dump.of(str(lowered.model.graph.name)).model(lowered.model)
            return CompiledModel(Program.of(lowered.model, self.target.provider), lowered.python_calls)

    def _session(self, model: CompiledModel) -> Session:
        with self._phase("session"):
            config = SessionConfig(
                provider=self.target.provider,
                device=self.target.device_index,
                provider_options=self.settings.provider_options,
                session_options=self.settings.session_options,
                optimized_path=self.dump.of(model.program.name).optimized_path if self.dump is not None else None,
                cuda_graph=self.target.cuda_graphs,
            )
            debug.trace(model.program.name, model.program.model)
            return Session(model.program, config, model.calls)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        # AOTAutograd calls back under its fake mode, in which a constant of ours would be fake as well.
        timed = torch._dynamo.utils.dynamo_timed(f"ort_training.{name}", log_pt2_compile_event=True)  # for tlparse, and `compile_times`
        with self._compilation.phase(name), timed, unset_fake_temporarily():
            yield
        self._seconds[name] += time.perf_counter() - started

    def publish(self) -> graph_report.GraphReport | None:
        """Puts the compiled graph on the report and in the log; warns once about what does not run on ONNX Runtime's kernels."""
        if self._content is None:
            return None
        seconds = {**self._seconds, "capture": time.perf_counter() - self._started - sum(self._seconds.values())}
        kind = "inference" if self._training is None else "training"
        made = graph_report.add(
            *(self.name, kind, self._compilation.function, self._content, seconds, self._counts),
            *(self._inlined, self._passes(), self._captured, self._from_cache),
        )
        log.info("%s", made.summary())
        if self._captured > _MANY_CAPTURES and self._is_first_warning("cuda_graphs"):
            operators = ", ".join(sorted({one.operator for one in made.outside}))
            log.warning(
                "cuda_graphs: %s is in %d sessions, between calls of PyTorch (%s), and the host waits for each: it may be faster without the option",
                *(self.name, made.sessions, operators),
            )
        place = "inside the ONNX Runtime session (" if self.target.whole_graphs else "between ONNX Runtime sessions ("
        for one in made.outside:
            if not one.is_choice and (one.operator, one.reason) not in _warned:
                _warned.add((one.operator, one.reason))
                log.warning(
                    "%s runs in PyTorch, %s%d times in %s): %s%s",
                    *(one.operator, place, one.count, self.name, one.reason, f". First at {one.where}" if one.where else ""),
                )
        return made

    def _is_first_warning(self, option: str) -> bool:
        """Whether a warning about this function is the first one."""
        if (why := (self._compilation.function, option)) in _warned:
            return False
        _warned.add(why)
        return True

    def _passes(self) -> tuple[str, ...]:
        return tuple(name_of(one) for one in (*self.settings.fx_passes, *self.settings.onnx_passes))

    def around(self, compiled: Callable[..., Any], gm: fx.GraphModule, example_inputs: Sequence[Any], eager: fx.GraphModule) -> Callable[..., Any]:
        """AOTAutograd's callable as Dynamo is to call it."""
        call, training = watched(compiled, self._training), self._training
        plan = self._direct
        if training is not None and plan is not None and direct_call.can_be_direct(plan, gm, example_inputs):
            call = direct_call.direct(training, plan, call, self._has_backward.is_set, example_inputs, self._autocast)
        if self._content is not None and self._content.python_ops:
            call = eager_where(python_op.inside, call, eager, self._counts)  # ONNX Runtime would wait for itself
        if training is None:
            call = eager_where(in_forward_mode, call, eager, self._counts)
        return verified(with_dtypes(call, random_numbers(gm, example_inputs)), eager, self.name, self.settings.verify)


def _imports() -> contextlib.AbstractContextManager[Any]:
    """To be around imports of what lowers. They wait until there is something to lower: a graph from the cache saves half a second without them.

    AOTAutograd calls back under its fake mode, in which a tensor that a module makes for itself would be a fake one for good.
    """
    return unset_fake_temporarily()


def _inlined_functions(gm: fx.GraphModule) -> int:
    """How many autograd.Functions Dynamo has traced into their operators. In Dynamo's graph they show where gradients are needed only."""
    if (counted := dynamo_hook.inlined()) is not None:
        return counted
    return sum(node.target is torch.ops.higher_order.autograd_function_apply for module in graph_modules(gm) for node in module.graph.nodes)


def _autograd_functions(options: Any) -> str:
    """The option of that name, before the options are checked."""
    if compiled_autograd.is_on():  # which traces the operators of their backwards
        return "inline"
    if isinstance(options, CompileOptions):
        return options.autograd_functions
    return str(options.get("autograd_functions", "opaque")) if isinstance(options, Mapping) else "opaque"


# torch.compile imports this module when it is told the backend's name, before it traces anything.
HAS_HOOK = dynamo_hook.install(lambda backend: backend is ort_training, _autograd_functions)
recurrent_layers.keep_whole_in_dynamo(lambda: dynamo_hook.is_compiling(lambda backend: backend is ort_training))
garbage.waits_while_compiling(lambda backend: dynamo_hook.innermost(backend)[0] is ort_training)
