"""A graph as a sequence of sessions with eager PyTorch between them: for an ONNX Runtime that cannot run a whole training graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.runtime import loose_tangents
from ort_backend.runtime.autograd_node import Undefined, node_of, without_gradient
from ort_backend.runtime.batched_gradients import is_batch, row_by_row
from ort_backend.runtime.binding import Input, Output, allocator, fetcher, lender, ort_device
from ort_backend.runtime.captured_run import CapturedRun, CaptureError, can_capture
from ort_backend.runtime.counts import RunCounts
from ort_backend.runtime.owner import Owner
from ort_backend.runtime.session import ORT_ERRORS, Session, noted

Values = list[Any]


@dataclasses.dataclass(frozen=True)
class EagerStep:
    """A call of PyTorch.

    Attributes:
        run: Computes the result from the list of values.
        result: Where in the list it goes.
        line: The user's line, for a note on what it raises.
    """

    run: Callable[[Values], Any]
    result: int
    line: str


@dataclasses.dataclass(frozen=True)
class SessionStep:
    """A run of a session.

    Attributes:
        session: Which of the graph's sessions.
        inputs: Its inputs; positions are places in the list of values.
        outputs: What goes back into the list: fetches of the session.
        results: Where in the list each of them goes.
        devices: The device of each output of the ONNX graph.
        shapes: From the graph's arguments, the shape of each output of the ONNX graph; None where it is not known before the run, so that
            ONNX Runtime allocates.
        moving: Indices of the inputs whose memory is another at every call.
        is_fixed: Whether no size of an output depends on the graph's arguments, and all inputs and outputs are on one kind of device.
    """

    session: int
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    results: tuple[int, ...]
    devices: tuple[torch.device, ...]
    shapes: Callable[[Sequence[Any]], Sequence[tuple[int, ...]]] | None
    moving: frozenset[int] = frozenset()
    is_fixed: bool = False

    def is_captured(self, session: Session) -> bool:
        """Whether the runs of the session made for it are captured as CUDA graphs."""
        if not (session.captures and self.is_fixed and self.shapes is not None and can_capture(self.inputs)):
            return False
        return not session.reads_on_host(self.devices) and all(0 not in shape for shape in self.shapes(()))


@dataclasses.dataclass(frozen=True)
class RegionPlan:
    """What a graph of regions takes, does and gives. It can be pickled where the callables in it can.

    The list of values starts with the callable's arguments, the draws and the set of undefined tangents.

    Attributes:
        steps: In the order in which they run.
        freed: For each step, the places in the list that nothing reads after it.
        size: Length of the list.
        results: The callable's results: a place in the list, or None for a constant.
        constants: For each result its value where it is a constant.
        draws: Random tensors, drawn from PyTorch's generator in this order before the first step, from the callable's arguments.
        depends_on: For each result, the tangents that it depends on.
        loose: The tangents that may come with every size 1, each with the zero that it is where autograd has no gradient for it.
    """

    steps: tuple[EagerStep | SessionStep, ...]
    freed: tuple[tuple[int, ...], ...]
    size: int
    results: tuple[int | None, ...]
    constants: tuple[Any, ...]
    draws: tuple[Callable[[Sequence[Any]], torch.Tensor], ...] = ()
    depends_on: tuple[frozenset[int], ...] = ()
    loose: Mapping[int, loose_tangents.Zero] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RegionTrainingPlan:
    """A forward and its backward.

    Attributes:
        forward: Gives outputs and saved values.
        backward: Takes saved values and tangents. Its sessions are counted on from those of the forward.
        tangent_outputs: For each tangent, the result of the forward that it belongs to; None if that is not known.
        has_functions: Whether a user's Function runs in the backward.
        outputs: How many results of the forward are the user's; the saved values follow them.
    """

    forward: RegionPlan
    backward: RegionPlan
    tangent_outputs: tuple[int, ...] | None
    has_functions: bool
    outputs: int


class RegionGraph:
    """A boxed callable: takes a list of arguments, which it empties, and returns the list of results.

    Args:
        plan: Its steps.
        sessions: What they run, of which each knows its own.
        count: Called at every run.
    """

    _boxed_call = True

    def __init__(self, plan: RegionPlan, sessions: Sequence[Session], count: Callable[[], None]) -> None:
        self._plan = plan
        self._count = count
        self._closed: list[Callable[[], None]] = []
        self.captured_sessions = 0
        shapes: list[Any] = []
        self._steps: list[tuple[Callable[[Values, Any], None], tuple[int, ...]]] = []
        for step, freed in zip(plan.steps, plan.freed, strict=True):
            if isinstance(step, EagerStep):
                self._steps.append((_eager(step), freed))
                continue
            session = sessions[step.session]
            run = _session(step, session, len(shapes))
            shapes.append(step.shapes)
            self._closed.append(session.close)
            if step.is_captured(session):
                captured = _captured_run(step, session)
                self._closed.append(captured.close)
                self.captured_sessions += 1
                run = _captured(step, session, captured, run)
            self._steps.append((run, freed))
        self._shapes = shapes
        self.results = list(zip(plan.results, plan.constants, strict=True))
        self.loose = plan.loose
        self._owner = Owner(self.release)
        self.beside: list[RegionGraph] = []

    def __call__(self, args: Values, undefined: frozenset[int] = frozenset()) -> Values:
        plan = self._plan
        self._count()
        self._owner.watch(args)
        shapes = [shape if shape is None else shape(args) for shape in self._shapes]
        values = [*args, *[draw(args) for draw in plan.draws], undefined]
        values.extend([None] * (plan.size - len(values)))
        args.clear()
        for step, freed in self._steps:
            step(values, shapes)
            for place in freed:
                values[place] = None
        if undefined:
            values = [*values, None]
            missing = without_gradient(plan.depends_on, undefined)
            places = [len(values) - 1 if i in missing else place for i, place in enumerate(plan.results)]
            return [constant if place is None else values[place] for place, constant in zip(places, plan.constants)]
        return [constant if place is None else values[place] for place, constant in self.results]

    def release(self) -> None:
        """Closes the sessions, and those of the graphs `beside`, until the next call."""
        for graph in (self, *self.beside):
            for close in graph._closed:
                close()


def _eager(step: EagerStep) -> Callable[[Values, Any], None]:
    run, result, line = step.run, step.result, step.line

    def call(values: Values, shapes: Any) -> None:
        try:
            values[result] = run(values)
        except Exception as error:
            noted(error, line)
            raise

    return call


def _captured_run(step: SessionStep, session: Session) -> CapturedRun:
    assert step.shapes is not None
    return CapturedRun(session, step.inputs, step.outputs, step.devices, step.shapes(()), step.moving)


def _captured(step: SessionStep, session: Session, run: CapturedRun, plain: Callable[[Values, Any], None]) -> Callable[[Values, Any], None]:
    """The captured run, and `plain` from the call on in which it cannot be captured."""
    results = step.results

    def call(values: Values, shapes: Any) -> None:
        if session.captures:
            try:
                for place, value in zip(results, run(values)):
                    values[place] = value
                return
            except CaptureError as error:
                run.close()
                session.capture_no_more(error)
        plain(values, shapes)

    return call


def _session(step: SessionStep, session: Session, index: int) -> Callable[[Values, Any], None]:
    results = step.results
    lend, fetch = lender(step.inputs), fetcher(step.outputs)
    allocate = allocator(step.outputs, step.devices) if step.shapes is not None else None
    devices = [ort_device(device) for device in step.devices]
    options = session.run_options(step.devices)

    def call(values: Values, shapes: Any) -> None:
        fetches = C.OrtValueVector()
        tensors = None if allocate is None else allocate(shapes[index], fetches)
        feeds, _lent = lend(values)
        run = session.open().run_with_ortvaluevector
        try:
            session.call(run, options, session.inputs, feeds, session.outputs, fetches, devices)
        except ORT_ERRORS as error:
            raise session.failure(error) from None
        for place, value in zip(results, fetch(fetches, values) if tensors is None else tensors):
            values[place] = value

    return call


class RegionTraining:
    """A forward and its backward, each a graph of regions. Autograd keeps what the one saves for the other.

    Args:
        plan: Their steps.
        sessions: What both run.
        counts: Counts their runs.
    """

    def __init__(self, plan: RegionTrainingPlan, sessions: Sequence[Session], counts: RunCounts) -> None:
        self._forward = RegionGraph(plan.forward, sessions, counts.ran_forward)
        self._backward = RegionGraph(plan.backward, sessions, counts.ran_backward)
        self._forward.beside.append(self._backward)
        self.captured_sessions = self._forward.captured_sessions + self._backward.captured_sessions
        self._places = plan.tangent_outputs
        self._undefined = Undefined()
        # Then `watch` is to be called. In front of one tangent a user's Function gets zeros, as in eager PyTorch.
        self.watches = self.may_be_undefined = plan.tangent_outputs is not None and (len(plan.tangent_outputs) > 1 or not plan.has_functions)
        self.has_gradient = tuple(place is not None or value is not None for place, value in self._backward.results)
        self._outputs = plan.outputs
        self.loose = frozenset(plan.backward.loose)
        self.is_differentiable = len(plan.forward.results) > plan.outputs  # or the gradients depend on the tangents alone

    def start(self, args: Sequence[Any], *, computed: Sequence[int] | None = None) -> tuple[Values, Values, None]:
        """Runs the forward: the outputs; the saved values; and nothing else that `resume` would need."""
        results = self._forward(list(args))
        return results[: self._outputs], results[self._outputs :], None

    def resume(self, run: None, tangents: Values, saved: Values, undefined: frozenset[int] = frozenset()) -> Values:
        """Runs the backward: the gradients. Both lists are emptied, so that each saved value goes when it has been read.

        `undefined`: the tangents that autograd has no gradient for: zeros, or None where they are loose.
        """
        for i in undefined & self.loose:
            tangents[i] = self._zeros[i]
        if not self.may_be_undefined:
            undefined = frozenset()
        if is_batch(tangents):
            return row_by_row(lambda row, _: self._backward([*saved, *row], undefined), tangents)
        args = [*saved, *tangents]
        saved.clear()
        tangents.clear()
        return self._backward(args, undefined)

    @functools.cached_property
    def _zeros(self) -> dict[int, torch.Tensor]:
        return loose_tangents.made(self._backward.loose)

    def forward(self, args: Values) -> Values:
        """Takes the primals (the list is emptied); returns outputs and saved values."""
        results = self._forward(args)
        if self.watches:
            self._undefined.see(results, self._places or ())
        return results

    def backward(self, args: Values) -> Values:
        """Takes saved values and tangents (the list is emptied); returns the gradients."""
        count = len(args) - len(self._places or ())
        tangents = args[count:]
        undefined = self._undefined.take(tangents, self._zeros)
        args[count:] = tangents
        if is_batch(args):
            return row_by_row(lambda row, _: self._backward(row, undefined), args)
        return self._backward(args, undefined)

    def watch(self, results: Sequence[Any], since: int) -> None:
        """Lets the backward of the forward that gave `results` see which of them have no gradient. `since` as in `node_of`.

        Autograd replaces missing gradients by zeros before AOTAutograd sees them; eager gives `None` to what only they would reach.
        """
        node = node_of(results, since)
        if node is not None:
            self._undefined.watch(node, self._places or (), results)
