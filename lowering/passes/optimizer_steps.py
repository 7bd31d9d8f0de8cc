"""A compiled optimizer's step, told from what it computes, as one call for all parameters (`kernels.optimizer_steps`)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ort_backend.lowering.fx_nodes import written_arguments
from ort_backend.lowering.kernels.optimizer_steps import ADAM_STEP
from ort_backend.lowering.memory_order import is_dense
from ort_backend.lowering.passes.effects import drop_unread
from ort_backend.lowering.passes.optimizer_rules import Rule, Update, rule_of
from ort_backend.lowering.passes.write_back import is_sparse
from ort_backend.target import OrtTarget

aten = torch.ops.aten

# Elements of all parameters together from which on the call is worth leaving the session for.
_LEAST = 4096
# Pointwise operators without the tag of these (torch 2.13).
_UNTAGGED = {
    aten.lerp.Scalar, aten.lerp.Tensor, aten.copy.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.full_like.default,
}  # fmt: skip


class _Step(NamedTuple):
    """The step of one parameter."""

    parameter: fx.Node
    gradient: fx.Node
    states: tuple[fx.Node, ...]
    counter: fx.Node | None  # how many steps there were
    rate: fx.Node | None  # the learning rate, if it is a tensor
    nodes: tuple[fx.Node, ...]  # what computes the new values of all these, in order


def fuse_optimizer_steps(graph: fx.Graph, target: OrtTarget, *, alone: bool = False) -> int:
    """Replaces, in place, the new values of parameters, and of an optimizer's states, that are arguments.

    Args:
        graph: A graph without gradients.
        target: What it is lowered for: on the CPU, and not for ONNX Runtime's kernels alone.
        alone: Whether nothing else may read what the call writes to, as where it may run before the rest.

    Returns:
        How many arguments it writes to.
    """
    if target.device_type != "cpu" or target.kernels == "onnxruntime":
        return 0
    results: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    arguments = written_arguments(graph)
    new = {one: results[place] for one, place in arguments.items() if isinstance(results[place], fx.Node)}
    if not new or any(map(is_sparse, graph.nodes)):  # what is made behind the session may read what is written to
        return 0
    place_of = {node: i for i, node in enumerate(graph.nodes)}
    known: dict[Any, Rule | None] = {}
    found: list[tuple[_Step, Rule]] = []
    for argument in new:
        step = _step_of(argument, new, place_of)
        if step is None or (alone and not _is_alone(step, new, results)):
            continue
        if not step.states and any(user.op != "output" for user in new[argument].users):  # a sum or an average that another rule reads
            continue
        key = _form(step, new)
        if key not in known:
            known[key] = rule_of(_update(step, new), len(step.states), counts=step.counter is not None, has_rate=step.rate is not None)
        if (rule := known[key]) is not None:
            found.append((step, rule))
    states = collections.Counter(state for step, _ in found for state in step.states)
    groups: dict[Any, list[tuple[_Step, Rule]]] = collections.defaultdict(list)
    for step, rule in found:
        # A momentum is what a parameter of another rule might be; one of two parameters is to be written to once.
        if step.parameter not in states and all(states[one] == 1 for one in step.states):
            groups[rule.target, rule.settings, step.parameter.meta["val"].dtype, step.rate].append((step, rule))
    replaced: dict[fx.Node, fx.Node] = {}
    for steps in groups.values():
        if sum(step.parameter.meta["val"].numel() for step, _ in steps) >= _LEAST:
            replaced |= _replacements(graph, steps, new)
    for argument, value in replaced.items():
        results[arguments[argument]] = value
    if replaced:
        graph.output_node().args = (tuple(results),)
        drop_unread(graph)
    return len(replaced)


def _step_of(argument: fx.Node, new: Mapping[fx.Node, fx.Node], place_of: Mapping[fx.Node, int]) -> _Step | None:
    """The step of which an argument may be the parameter: pointwise functions give its new value and those of the states."""
    fake = argument.meta["val"]
    if not _is_plain(fake) or fake.dtype not in (torch.float32, torch.float64):
        return None
    alone = _Region((new[argument],), fake, new, place_of)
    states = tuple(one for one in alone.written if one is not argument and one.meta["val"].dim())
    region = _Region((new[argument], *map(new.__getitem__, states)), fake, new, place_of)
    counters = [one for one in region.written if not one.meta["val"].dim()]
    if set(region.written) != {argument, *states, *counters} or not all(_lies_like(one.meta["val"], fake) for one in states):
        return None
    rates = region.sources(lambda one: not one.meta["val"].dim(), at_most=0)
    gradients = region.sources(lambda one: one.meta["val"].dim() > 0, at_most=1)
    if len(counters) > 1 or len(rates) > 1 or len(gradients) != 1 or gradients[0].meta["val"].dtype != fake.dtype:
        return None
    if counters and not _counts(new[counters[0]], counters[0]):
        return None
    counter, rate = (one[0] if one else None for one in (counters, rates))
    return _Step(argument, gradients[0], states, counter, rate, tuple(sorted(region.nodes, key=place_of.__getitem__)))


class _Region:
    """Pointwise nodes that compute values from arguments that get new ones, and what they read.

    Attributes:
        nodes: Those that depend on such an argument, and what `sources` has gone through.
        written: The arguments.
    """

    def __init__(self, roots: Iterable[fx.Node], fake: Tensor, new: Mapping[fx.Node, fx.Node], place_of: Mapping[fx.Node, int]) -> None:
        self._place_of = place_of
        self._pointwise: set[fx.Node] = set()
        waiting = [root for root in roots if _is_pointwise(root, fake)]
        while waiting:
            node = waiting.pop()
            if node not in self._pointwise:
                self._pointwise.add(node)
                waiting += [one for one in node.all_input_nodes if _is_pointwise(one, fake)]
        self.nodes: set[fx.Node] = set()
        for node in sorted(self._pointwise, key=place_of.__getitem__):
            if any(one in new or one in self.nodes for one in node.all_input_nodes):
                self.nodes.add(node)
        read = {one for node in self.nodes for one in node.all_input_nodes if one not in self.nodes}
        self.written = sorted((one for one in read if one in new), key=place_of.__getitem__)
        self._given = read - set(self.written)

    def sources(self, is_one: Callable[[fx.Node], bool], *, at_most: int) -> list[fx.Node]:
        """What else the nodes read: of such nodes `at_most` so many that all are made of by pointwise ones, or as few as there are."""
        found = {one for one in self._given if is_one(one)}
        while len(found) > at_most:
            last = max(found, key=self._place_of.__getitem__)
            inputs = set(last.all_input_nodes)
            if last not in self._pointwise or not inputs or not all(map(is_one, inputs)):
                break
            self.nodes.add(last)
            found = (found - {last}) | inputs
        return sorted(found, key=self._place_of.__getitem__)


def _is_pointwise(node: fx.Node, fake: Tensor) -> bool:
    """Whether a node computes each element from those at its place, and from scalars, in the dtype of `fake`, as far as it has its shape."""
    value, target = node.meta.get("val"), node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    if not all(isinstance(one.meta.get("val"), Tensor) for one in node.all_input_nodes):  # a number that is symbolic, say
        return False
    if value.dim() and (value.shape != fake.shape or value.dtype != fake.dtype):
        return False
    return torch.Tag.pointwise in target.tags or target in _UNTAGGED or str(target) == "prims.fma.default"


def _is_plain(fake: Any) -> bool:
    """Whether it is a tensor of fixed sizes without gaps or repetitions, and not a scalar."""
    if not isinstance(fake, Tensor) or not fake.dim() or not all(isinstance(number, int) for number in (*fake.shape, *fake.stride())):
        return False
    return is_dense(fake)


def _lies_like(one: Any, other: Tensor) -> bool:
    return _is_plain(one) and one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


def _counts(value: fx.Node, counter: fx.Node) -> bool:
    return value.target is aten.add.Tensor and value.args == (counter, 1) and not value.kwargs


def _is_alone(step: _Step, new: Mapping[fx.Node, fx.Node], results: Sequence[Any]) -> bool:
    """Whether nothing else reads what the step writes to, nor what it computes on the way, but for the count of steps."""
    owned = (step.parameter, *step.states)
    counted = None if step.counter is None else new[step.counter]
    computed = (node for node in step.nodes if node is not counted)
    is_read = any(user not in step.nodes and user.op != "output" for one in (*owned, *computed) for user in one.users)
    return not is_read and sum(one in step.nodes and one is not counted for one in results) == len(owned)


def _form(step: _Step, new: Mapping[fx.Node, fx.Node]) -> Any:
    """What steps have in common that are written alike."""
    given = [step.parameter, step.gradient, *step.states, step.counter, step.rate]
    number = {node: i for i, node in enumerate([*(one for one in given if one is not None), *step.nodes])}
    written = [(node.target, *(fx.node.map_arg(part, lambda one: ("node", number[one])) for part in (node.args, node.kwargs))) for node in step.nodes]
    results = [number[new[one]] for one in (step.parameter, *step.states)]
    return repr((len(step.states), step.counter is None, step.rate is None, results, written))


def _update(step: _Step, new: Mapping[fx.Node, fx.Node]) -> Update:
    """The step as a function of numbers."""

    def update(parameter: Tensor, gradient: Tensor, states: Sequence[Tensor], counter: Tensor, rate: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        values: dict[fx.Node | None, Any] = {step.parameter: parameter, step.gradient: gradient, step.counter: counter, step.rate: rate}
        values |= dict(zip(step.states, states, strict=True))
        for node in step.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values[new[step.parameter]], [values[new[one]] for one in step.states]

    return update


def _replacements(graph: fx.Graph, steps: Sequence[tuple[_Step, Rule]], new: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Writes the call for steps of one rule: its result is the first parameter's new value, and the others are the arguments, which it writes to."""
    (first, rule), *_ = steps
    states = [[step.states[one.order[i]] for step, one in steps] for i in range(len(rule.order))]
    counters = [[new[step.counter] for step, _ in steps if step.counter is not None]] if rule.target is ADAM_STEP else []
    momenta = states or [[]]
    with graph.inserting_before(graph.output_node()):
        call = graph.call_function(
            rule.target,
            ([step.parameter for step, _ in steps], [step.gradient for step, _ in steps], *momenta, *counters, first.rate, *rule.settings),
        )
    value = new[first.parameter]
    call.meta = {"val": first.parameter.meta["val"], "stack_trace": value.meta.get("stack_trace")}
    return {**{one: one for step, _ in steps for one in (step.parameter, *step.states)}, first.parameter: call}
