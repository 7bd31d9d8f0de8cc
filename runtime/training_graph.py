"""A forward and its backward in one session: `TrainingAgent` runs up to the `YieldOp` and resumes there."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.errors import OrtBackendError
from ort_backend.runtime import loose_tangents
from ort_backend.runtime.autograd_node import Undefined, node_of, without_gradient
from ort_backend.runtime.batched_gradients import is_batch, row_by_row
from ort_backend.runtime.binding import Input, Output, feeder, fetcher, ort_device
from ort_backend.runtime.counts import RunCounts
from ort_backend.runtime.owner import Owner
from ort_backend.runtime.pending_run import PendingRun, versions_of
from ort_backend.runtime.python_op import RunState
from ort_backend.runtime.random_state import random_state, set_random_state
from ort_backend.runtime.session import ORT_ERRORS, Session

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """What a training graph takes and gives.

    Attributes:
        inputs: The ONNX graph's inputs; positions count the forward's arguments first, then the draws.
        outputs: The forward's results.
        saved: What the forward returns behind them for the backward to hold, which reads it where it lies: indices of arguments.
        tangents: The tangents that enter at the `YieldOp`; positions count the backward's tangents.
        gradients: The backward's results; arguments are the tangents, then `returned`.
        draws: Random tensors, drawn from PyTorch's generator in this order before the session runs, from the forward's arguments.
        draws_inside: Whether the session itself draws random numbers as well.
        yield_devices: The device of each value that the `YieldOp` hands out.
        gradient_devices: The device of each gradient, the first outputs of the ONNX graph; what the `YieldOp` hands out follows them.
        saved_outputs: Likewise: indices of results.
        returned: Which of `saved` are results of the backward themselves.
        replayed: Indices of the arguments on which the backward depends, for a second backward over one forward.
        changing: Those of them that the program writes to behind the forward, each with what makes the copy that is read instead.
        depends_on: For each result of the backward, the tangents that it depends on.
        tangent_outputs: For each tangent, the result of the forward that it belongs to; None if that is not known.
        loose: The tangents that may come with every size 1, each with the zero that it is where autograd has no gradient for it.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    tangents: tuple[Input, ...]
    gradients: tuple[Output, ...]
    draws: tuple[Callable[[Sequence[Any]], torch.Tensor], ...] = ()
    draws_inside: bool = False
    yield_devices: tuple[torch.device, ...] = ()
    gradient_devices: tuple[torch.device, ...] = ()
    saved: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    changing: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = dataclasses.field(default_factory=dict)
    depends_on: tuple[frozenset[int], ...] = ()
    tangent_outputs: tuple[int, ...] | None = None
    loose: Mapping[int, loose_tangents.Zero] = dataclasses.field(default_factory=dict)


class _Agent:
    """ONNX Runtime's agent and the session that it works on, which it does not keep alive itself."""

    __slots__ = ("_session", "run_backward", "run_forward")

    def __init__(self, session: Session, plan: TrainingPlan) -> None:
        self._session = session.open()
        devices = [[ort_device(device) for device in some] for some in (plan.yield_devices, plan.gradient_devices)]
        gradients = session.outputs[: len(plan.gradient_devices)]
        agent = C.TrainingAgent(self._session, session.inputs, devices[0], gradients, devices[1], 0)
        self.run_forward, self.run_backward = agent.run_forward, agent.run_backward


class _Latest(threading.local):
    """The forward that ran last on this thread, where something is to be done with its results."""

    run: PendingRun | None = None


class _Holder:
    """Lives as long as the node of autograd that it is put on, and tells its run."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: int) -> None:
        self.key = key


# Of all graphs: a backward may come with the token of another one.
_TOKENS = itertools.count()


class TrainingGraph:
    """Two boxed callables over one session.

    Every forward makes a run state of its own, so that any number of them may be pending, in any order. The state waits under a token,
    a 0-d int64 tensor that autograd saves for the backward: when the token's memory goes, with the graph that holds it, so does the state.

    Under `torch.autograd.graph.saved_tensors_hooks` the token's memory goes at once: it is packed, as a copy (offloading) or not at all
    (`torch.utils.checkpoint` around the compiled module, whose forward will run again and save another token). So goes the state then, and the
    arguments wait under autograd's node for a backward that comes with a copy of the token and runs the forward again.
    """

    def __init__(self, session: Session, plan: TrainingPlan, counts: RunCounts) -> None:
        self._session = session
        self._plan = plan
        self._feed, self._fetch = feeder(plan.inputs), fetcher(plan.outputs)
        self._feed_tangents, self._fetch_gradients = feeder(plan.tangents), fetcher(plan.gradients)
        self._runs: dict[int, PendingRun] = {}
        self._latest, self._undefined = _Latest(), Undefined()
        # Then `watch` is to be called. In front of one tangent a user's Function gets zeros, as in eager PyTorch.
        self.may_be_undefined = plan.tangent_outputs is not None and (len(plan.tangents) > 1 or not session.has_python_ops)
        self.watches = True
        self.is_differentiable = bool(plan.replayed)
        self.has_gradient = tuple(one.source != "constant" or one.value is not None for one in plan.gradients)
        self.loose = frozenset(plan.loose)
        self._counts = counts
        self._waits = tuple(session.reads_on_host(devices) for devices in (plan.yield_devices, plan.gradient_devices))
        self._agent: _Agent | None = _Agent(session, plan)
        self._warned_of_release = False
        self._owner = Owner(self.release)

    def start(self, args: Sequence[Any], *, hooked: bool = False, computed: Sequence[int] | None = None) -> tuple[list[Any], list[Any], PendingRun]:
        """Runs up to the `YieldOp`.

        Args:
            args: The primals.
            hooked: Whether hooks are on saved tensors, see above.
            computed: Indices of the arguments that autograd may have computed; None: any of them. They are held without their place in its graph,
                which a write to them may put behind this very run.

        Returns:
            The outputs; the saved tensors, for autograd to hold until the backward; and the run, for `resume`.
        """
        self._counts.forward += 1
        plan = self._plan
        self._owner.watch(args)
        before = random_state() if hooked and plan.draws else None
        everything = [*args, *(draw(args) for draw in plan.draws)]
        python = RunState() if self._session.has_python_ops else None
        random = random_state() if plan.draws_inside else None
        held = everything.copy()
        for i in range(len(args)) if computed is None else computed:
            if isinstance(held[i], torch.Tensor) and held[i].grad_fn is not None:
                held[i] = held[i].detach()
        for i, copy in plan.changing.items():
            held[i] = copy(held[i].detach())
        agent, state, fetches = self._advance(held, python, args)
        results = self._fetch(fetches, everything)
        saved = [args[i] for i in plan.saved] + [results[i] for i in plan.saved_outputs]
        run = PendingRun(agent, state, python, held, versions_of(held, plan.replayed), (*plan.saved, *plan.changing))
        run.random, run.redraw = random, before
        run.arguments = len(args) if hooked else None
        return results, saved, run

    def resume(self, run: PendingRun, tangents: list[Any], saved: Sequence[Any], undefined: frozenset[int] | None = None) -> list[Any]:
        """Resumes behind the `YieldOp`: the gradients.

        Args:
            run: What `start` returned.
            tangents: The tangents; None for a loose one that autograd has no gradient for.
            saved: The saved tensors.
            undefined: The tangents that autograd has no gradient for; None where `watch` tells.

        Raises:
            OrtBackendError: the run state is gone, or what a second backward needs was modified in place.
        """
        if undefined is not None:
            run.undefined = undefined if self.may_be_undefined else frozenset()
            for i in undefined & self.loose:
                tangents[i] = self._zeros[i]
        if is_batch(tangents):
            return row_by_row(lambda row, is_last: self._resume(run, row, saved, keep=not is_last), tangents)
        return self._resume(run, tangents, saved)

    def _resume(self, run: PendingRun, tangents: list[Any], saved: Sequence[Any], *, keep: bool = False) -> list[Any]:
        self._counts.backward += 1
        arguments = [*tangents, *(saved[i] for i in self._plan.returned)] if self._plan.returned else tangents
        if run.state is not None and run.is_released():
            self._warn_of_release()
            run.state = None
        state = run.state if run.state is not None else self._replay(run)
        agent, run.state = run.agent, None
        assert agent is not None
        if not (keep or torch._C._autograd._get_current_graph_task_keep_graph()):
            run.args = None
        fetches = C.OrtValueVector()
        if run.python is not None:
            run.python.undefined = run.undefined
        try:
            self._session.call(agent.run_backward, self._feed_tangents(tangents), fetches, state, state=run.python)
            if self._waits[1]:
                self._session.wait()
        except ORT_ERRORS as error:
            raise self._session.failure(error) from None
        if run.args is None:  # behind the run, which has read that memory
            run.agent, run.memory, run.addresses, run.random, run.redraw = None, [], [], None, None
        gradients = self._fetch_gradients(fetches, arguments)
        if run.undefined:
            missing = without_gradient(self._plan.depends_on, run.undefined)
            return [None if i in missing else gradient for i, gradient in enumerate(gradients)]
        return gradients

    @functools.cached_property
    def _zeros(self) -> dict[int, torch.Tensor]:
        return loose_tangents.made(self._plan.loose)

    def forward(self, args: list[Any]) -> list[Any]:
        """AOTAutograd's forward. Takes the primals (the list is emptied); returns outputs, saved tensors and the token."""
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        results, saved, run = self.start(args, hooked=hooked)
        args.clear()
        if hooked or self.may_be_undefined:
            self._latest.run = run
            self._undefined.see(results, self._plan.tangent_outputs or ())
        return [*results, *saved, self._token(run)]

    def backward(self, args: list[Any]) -> list[Any]:
        """AOTAutograd's backward. Takes saved tensors, the token and the tangents (the list is emptied); returns the gradients.

        Raises:
            OrtBackendError: as `resume`.
        """
        count = len(self._plan.saved) + len(self._plan.saved_outputs)
        saved, token, tangents = args[:count], args[count], args[count + 1 :]
        args.clear()
        run = self._runs.get(token.item())
        if run is None:  # `torch.utils.checkpoint` has called a graph that Dynamo has compiled since, for other sizes
            holder = getattr(torch._C._current_autograd_node(), "ort_training", None)
            run = None if holder is None else self._runs.get(holder.key)
        if run is None:
            raise OrtBackendError("the state of this forward is gone: its backward ran in a way that autograd does not know of")
        run.undefined = self._undefined.take(tangents, self._zeros)
        return self.resume(run, tangents, saved)

    def watch(self, results: Sequence[Any], since: int) -> None:
        """To be called behind each forward, with what AOTAutograd's callable returned for it; `since` as in `node_of`.

        Lets the backward see which of the results have no gradient: autograd replaces missing gradients by zeros before AOTAutograd sees them; eager
        gives `None` to what only they would reach. And ties a forward without a state to autograd's node.
        """
        run = self._latest.run
        if run is None:
            return
        self._latest.run = None
        node = node_of(results, since)
        if run.arguments is not None:
            self._keep(run, node)
        if node is not None and self.may_be_undefined:
            self._undefined.watch(node, self._plan.tangent_outputs or (), results)

    def _keep(self, run: PendingRun, node: Any) -> None:
        """Ends the run with its token, where hooks have left that as it was, or else with autograd's node."""
        kept = run.guard()
        if kept is None and node is not None:
            node.ort_training = kept = _Holder(run.key)
        if kept is None:
            self._runs.pop(run.key, None)
        else:
            self._end_with(run, kept)

    def _end_with(self, run: PendingRun, what: Any) -> None:
        key, runs = run.key, self._runs
        run.guard = weakref.ref(what, lambda _: runs.pop(key, None))

    def release(self) -> None:
        """Closes the session until the next forward; forwards that wait for their backward keep it until then."""
        self._agent = None
        self._session.close()

    def _advance(self, everything: list[Any], python: RunState | None, given: Sequence[Any]) -> tuple[_Agent, Any, Any]:
        """Runs the session up to the `YieldOp`: the agent that did, the state there, and what is handed out."""
        state, fetches = C.PartialGraphExecutionState(), C.OrtValueVector()
        if self._agent is None:
            self._agent = _Agent(self._session, self._plan)
        agent = self._agent
        if python is not None:
            python.given = given
        try:
            self._session.call(agent.run_forward, self._feed(everything), fetches, state, None, state=python)
            if self._waits[0]:
                self._session.wait()
        except ORT_ERRORS as error:
            raise self._session.failure(error) from None
        finally:
            if python is not None:
                python.given = ()
        return agent, state, fetches

    def _replay(self, run: PendingRun) -> Any:
        """The state at the `YieldOp` where there is none: the forward runs again.

        So it does for a second backward over one forward, as the first used the state up; and where the memory of an input was released since, as
        FSDP does with the parameters of a block behind its forward, to gather them again in front of its backward.
        """
        if run.args is None:
            raise OrtBackendError("trying to run the backward a second time after its state was freed; use retain_graph=True the first time")
        for i, version, found in zip(self._plan.replayed, run.versions, versions_of(run.args, self._plan.replayed), strict=True):
            if found != version:
                raise OrtBackendError(
                    "the forward runs again for this backward, but one of the tensors needed for it has been modified by an inplace operation: "
                    f"[{tuple(run.args[i].shape)}] is at version {found}; expected version {version} instead"
                )
        if any(isinstance(arg, torch.Tensor) and arg.numel() and not arg.untyped_storage().nbytes() for arg in run.args):
            raise OrtBackendError("the memory of a tensor that the backward needs was released behind the forward, and is not there again")
        random = run.redraw or run.random
        now = random_state() if random is not None else None
        if random is not None:
            set_random_state(random)  # it draws what it drew
        everything = [*run.args, *(draw(run.args) for draw in self._plan.draws)] if run.redraw else run.args
        try:
            run.agent, state, _ = self._advance(everything, run.python, run.args)
        finally:
            if now is not None:
                set_random_state(now)
        return state

    def _warn_of_release(self) -> None:
        if not self._warned_of_release:
            self._warned_of_release = True
            log.warning(
                "the memory of parameters or inputs of %s was released behind the forward, as FSDP does: its backward runs the forward again, "
                "which fully_shard(..., reshard_after_forward=False) spares.",
                self._session.name,
            )

    def _token(self, run: PendingRun) -> torch.Tensor:
        """A token for the run, which ends with it; under hooks it rests until `watch` is called."""
        run.key = key = next(_TOKENS)
        runs = self._runs
        memory = np.array(key)
        runs[key] = run
        if run.arguments is None:
            self._end_with(run, memory)
        else:
            run.guard = weakref.ref(memory, lambda _: runs[key].rest())
        return torch.from_numpy(memory)
