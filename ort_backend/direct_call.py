"""Calls of a training graph without AOTAutograd's wrappers, where these have nothing to do.

They put back what functionalisation took out: writes to inputs, results that are views, subclasses of tensors, effects. Where a graph has none of
that, forward and backward are two calls between autograd and the session, and the wrappers 40 microseconds of every step (torch 2.13). Writes to
inputs that need no gradient, such as a normalization's averages, are put back here as well, those of one dtype in one call.
What only shows when a graph is called, as hooks on saved tensors, sends that call AOTAutograd's way.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import aot_module_simplified  # noqa: F401  (first: what follows imports nothing by itself)
from torch import fx
from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ort_backend import compiled_autograd
from ort_backend.runtime.lazy_zeros import Kind, kind_of, zeros
from ort_backend.runtime.region_graph import RegionTraining
from ort_backend.runtime.training_graph import TrainingGraph

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DirectPlan:
    """What autograd has to know of a graph.

    Attributes:
        detached: Those that require gradients and get none: what they come from is not to see gradients of zeros.
        constant: Results that have no gradient.
        tangents: Results that have one, in the order of the graph's tangents.
        written: Arguments that the program writes to. Their new values come in front of the results.
        deterministic: Whether it was traced under `torch.use_deterministic_algorithms`.
        tangent_metadata: AOTAutograd's, for tangents that are no plain tensors.
        writes: Where new values of arguments stand among the results of the graph, and the arguments, of those that need no gradient.
        needs_wrappers: Whether AOTAutograd's wrappers are needed all the same: what is said above, but for `writes`, is then empty.
    """

    detached: tuple[int, ...]
    constant: tuple[int, ...]
    tangents: tuple[int, ...]
    written: tuple[int, ...]
    deterministic: bool
    tangent_metadata: tuple[Any, ...]
    writes: tuple[tuple[int, int], ...] = ()
    needs_wrappers: bool = False


def plan_of(metadata: Any, has_gradient: Sequence[bool]) -> DirectPlan | None:
    """The plan of a graph; None where AOTAutograd describes graphs in a way not known here.

    Args:
        metadata: AOTAutograd's `ViewAndMutationMeta` (read in torch 2.11 to 2.15).
        has_gradient: For each argument whether the backward returns one.
    """
    try:
        return _plan(metadata, has_gradient)
    except AttributeError as error:
        log.info("calls go AOTAutograd's way: %s", error)
        return None


def _plan(metadata: Any, has_gradient: Sequence[bool]) -> DirectPlan:
    inputs, outputs = metadata.input_info, metadata.output_info
    tensors = [i for i, one in enumerate(outputs) if issubclass(one.raw_type, torch.Tensor)]
    # Torch 2.11 has no word for results that require a gradient but whose gradient the backward does not take.
    tangents = [i for i in tensors if getattr(outputs[i], "requires_grad_for_backward", outputs[i].requires_grad)]
    if not _is_plain(metadata) or len(has_gradient) != len(inputs) or len(tangents) != len(metadata.subclass_tangent_meta):
        return DirectPlan((), (), (), (), False, (), _writes(metadata), needs_wrappers=True)
    return DirectPlan(
        detached=tuple(i for i, one in enumerate(inputs) if one.requires_grad and not one.is_leaf and not has_gradient[i]),
        constant=tuple(i for i in tensors if not outputs[i].requires_grad),
        tangents=tuple(tangents),
        written=tuple(metadata.mutated_inp_runtime_indices),
        deterministic=metadata.deterministic is not False,
        tangent_metadata=tuple(metadata.subclass_tangent_meta),
        writes=_writes(metadata),
    )


def _writes(metadata: Any) -> tuple[tuple[int, int], ...]:
    if metadata.tokens or not all(map(_is_plain_tensor, metadata.subclass_inp_meta)):  # arguments and results are not AOTAutograd's
        return ()
    infos = metadata.input_info
    plain = [i for i, one in enumerate(infos) if not (one.requires_grad or one.mutates_metadata or one.mutates_storage_metadata)]
    return tuple((place, i) for place, i in enumerate(metadata.mutated_inp_runtime_indices) if i in plain)


_OWN_MEMORY = ("non_alias", "unsafe_view_alias")  # names of AOTAutograd's `OutputType`: results are new tensors
# What none of these counts, lists and flags of AOTAutograd's may say of a graph.
_SPECIAL = (
    "num_intermediate_bases",
    "num_backward_tokens",
    "num_graphsafe_rng_states",
    "num_tensors_saved_with_no_vc_check",
    "num_symints_saved_for_bw",
    "num_opaque_objects_saved_for_bw",
    "tokens",
    "act_input_indices",
    "is_rng_op_functionalized",
    "dynamic_outputs",
    "indices_of_inputs_that_requires_grad_with_mutations_in_bw",
)


def _is_plain(metadata: Any) -> bool:
    if any(getattr(metadata, name, None) for name in _SPECIAL) or metadata.grad_enabled_mutation is not None:
        return False
    if any(one.mutates_metadata or one.mutates_storage_metadata or (one.mutates_data and one.requires_grad) for one in metadata.input_info):
        return False
    if any(one is not None for one in getattr(metadata, "mutated_inp_stream_indices", None) or ()):  # written to on a stream of the user's
        return False
    if any(one.output_type.name not in _OWN_MEMORY for one in metadata.output_info):
        return False
    subclasses = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta, *metadata.subclass_tangent_meta)
    return all(map(_is_plain_tensor, subclasses))


def _is_plain_tensor(described: Any) -> bool:
    return isinstance(described, int) or type(described).__name__ == "PlainTensorMeta"


def can_be_direct(plan: DirectPlan, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd hands arguments to the compiled graph, and its results back, as they are.

    Its metadata does not tell: where there are subclasses of tensors it is about their parts, and where an argument that is written to shares its
    memory with another, AOTAutograd makes one of them. And what Dynamo's graph holds comes first among the arguments.
    """
    if plan.needs_wrappers or any(True for _ in itertools.chain(gm.parameters(), gm.buffers())):
        return False
    results = gm.graph.output_node().all_input_nodes
    values = [*example_inputs, *(node.meta.get("example_value") for node in results)]
    if not all(type(one) in _PLAIN for one in values if isinstance(one, torch.Tensor)):
        return False
    tensors = [one for one in example_inputs if isinstance(one, torch.Tensor)]
    if plan.written and len({id(one) for one in tensors}) < len(tensors):
        return False
    memory = collections.Counter(StorageWeakRef(one.untyped_storage()) for one in tensors)
    return all(memory[StorageWeakRef(example_inputs[i].untyped_storage())] == 1 for i in plan.written)


_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def direct(
    training: TrainingGraph | RegionTraining,
    plan: DirectPlan,
    compiled: Callable[..., Any],
    is_ready: Callable[[], bool],
    example_inputs: Sequence[Any],
    autocast: bool,
) -> Callable[..., Any]:
    """A function that calls the training graph; `compiled`, AOTAutograd's, where only that will do.

    Args:
        training: The graph.
        plan: What autograd has to know of it.
        compiled: AOTAutograd's callable over it.
        is_ready: Whether AOTAutograd is done with compiling: it calls for a backward when that runs first.
        example_inputs: What Dynamo compiles for: a parameter is one at every call, and computed by nothing.
        autocast: Whether it was traced under autocast, and is called so: the graph has its casts, and what runs in PyTorch is not to have them again.
    """
    computed = tuple(i for i, one in enumerate(example_inputs) if isinstance(one, torch.Tensor) and not isinstance(one, torch.nn.Parameter))
    start, resume = map(_without_autocast, (training.start, training.resume)) if autocast else (training.start, training.resume)
    writes, new_values = _grouped(plan.written, example_inputs), len(plan.written)
    detached, constant, tangents_of = plan.detached, plan.constant, plan.tangents
    # Autograd would make zeros for every result without a gradient. The backward wants those of some, and is to know of all.
    filled = [(i, place) for i, place in enumerate(tangents_of) if i not in training.loose]

    class CompiledFunction(torch.autograd.Function):  # named as AOTAutograd's: so is the node of autograd that users see
        boxed_grads_call = True  # gradients come as a list, to be emptied (from torch 2.13 on)

        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
            results, saved, ctx.run = start(args, computed=computed)
            ctx.computed = [weakref.ref(args[i]) for i in computed if args[i].grad_fn is not None]
            new, results = results[:new_values], results[new_values:]
            results = [_no_view(one) for one in results]  # autograd forbids to write to a view that a Function returns
            ctx.save_for_backward(*map(_no_view, saved))  # a view's place in autograd's graph would be kept alive
            for arguments, places in writes:
                torch._foreach_copy_([args[i] for i in arguments], [new[i] for i in places])
            if constant:
                ctx.mark_non_differentiable(*(results[i] for i in constant))
            ctx._materialize_non_diff_grads = False
            ctx.set_materialize_grads(False)
            ctx.kinds = [(i, kind_of(results[place])) for i, place in filled]
            return tuple(results)

        @staticmethod
        @torch.compiler.disable  # as `callables.boxed` is
        def backward(ctx: Any, *grads: Any) -> Any:
            if len(grads) == 1 and isinstance(grads[0], list):
                tangents = [grads[0][i] for i in tangents_of]
                grads[0].clear()
            else:
                tangents = [grads[i] for i in tangents_of]
            del grads
            undefined = _fill(tangents, ctx.kinds)
            _check_backward(plan, tangents)
            saved = list(ctx.saved_tensors)  # raises PyTorch's errors: for what was modified in place, and where it was freed
            if torch.is_grad_enabled():
                known = [*tangents, *saved, *(_sources(ctx) if training.is_differentiable else ())]
                reached = [one for one in known if isinstance(one, torch.Tensor) and one.requires_grad]
                return _Once.apply(lambda: resume(ctx.run, tangents, saved, undefined), *reached)
            ctx.maybe_clear_saved_tensors()
            return tuple(resume(ctx.run, tangents, saved, undefined))

        @staticmethod
        def _compiled_autograd_key(ctx: Any) -> Any:
            raise compiled_autograd.untraceable()

    def call(*args: Any) -> Any:
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if hooked or not is_ready() or compiled_autograd.is_on() or not torch.is_grad_enabled():
            return compiled(*args)
        if detached:
            args = tuple(one.detach() if i in detached else one for i, one in enumerate(args))
        return CompiledFunction.apply(*args)

    return call


def writing(forward: Callable[[list[Any]], Any], plan: DirectPlan | None) -> Callable[[list[Any]], Any]:
    """AOTAutograd's forward, which under hooks on saved tensors writes to arguments itself, before AOTAutograd does so again.

    A checkpoint around a compiled module runs it a second time, and ends that as soon as autograd saves the last of what the backward needs. In eager
    PyTorch, and in a call without hooks, that is behind the writes; AOTAutograd's own come later.
    """
    if plan is None or not plan.writes:
        return forward
    places, written = zip(*plan.writes)

    def call(args: list[Any]) -> Any:
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            return forward(args)
        arguments = [args[i] for i in written]
        results = forward(args)
        torch._foreach_copy_(arguments, [results[place] for place in places])
        return results

    return call


def _grouped(written: Sequence[int], example_inputs: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """The arguments that are written to, and the places of their new values, by dtype and device: a group is one kernel on a GPU."""
    groups: dict[Any, tuple[list[int], list[int]]] = {}
    for place, i in enumerate(written):
        arguments, places = groups.setdefault((example_inputs[i].dtype, example_inputs[i].device), ([], []))
        arguments.append(i)
        places.append(place)
    return list(groups.values())


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def _no_view(one: Any) -> Any:
    return one.detach() if isinstance(one, torch.Tensor) and one._is_view() else one


def _fill(tangents: list[Any], kinds: Sequence[tuple[int, Kind]]) -> frozenset[int]:
    """Which tangents autograd has no gradient for. In place, those of a kind that is given become zeros."""
    undefined = frozenset(i for i, one in enumerate(tangents) if one is None)
    if undefined:
        for i, kind in kinds:
            if i in undefined:
                tangents[i] = zeros(kind)
    return undefined


def _check_backward(plan: DirectPlan, tangents: list[Any]) -> None:
    """What AOTAutograd checks in front of a backward, with its words."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "It looks like you're trying to call a compiled backward function within vmap/grad/vjp, which isn't supported. "
            "Try wrapping vmap inside torch.compile, or skip compiling the backward function."
        )
    if not plan.deterministic and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "This compiled backward function is being run with torch.use_deterministic_algorithms(True), but it was previously generated "
            "during the forward function while torch.use_deterministic_algorithms(False) was set."
        )
    for i, tangent in enumerate(tangents):
        if tangent is not None and type(tangent) is not torch.Tensor:
            tangents[i] = AOTDispatchAutograd.process_runtime_tangent(tangent, plan.tangent_metadata[i])[0]


def _sources(ctx: Any) -> list[Any]:
    """The tensors that the graph's arguments come from: leaves, and those arguments that are none and still there."""
    found = [argument() for argument in ctx.computed]
    waiting = [source for source, _ in ctx.next_functions]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            found.append(getattr(node, "variable", None))
            waiting.extend(source for source, _ in node.next_functions)
    return found


class _Once(torch.autograd.Function):
    """A backward under `create_graph=True`: its results say that they require gradients, and asking for one is an error.

    Autograd meets it on the way to every tensor that it is given.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Sequence[Any]], *reached: torch.Tensor) -> tuple[Any, ...]:
        return tuple(run())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")
