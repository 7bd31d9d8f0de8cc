"""A compiled optimizer's step, told from what it computes, as one call for all parameters.

A rule that PyTorch has a kernel for becomes that (`kernels.optimizer_steps`), any other of pointwise functions a program (`kernels.pointwise_steps`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ort_backend.lowering.fx_nodes import written_arguments
from ort_backend.lowering.kernels.optimizer_steps import ADAM_STEP
from ort_backend.lowering.kernels.pointwise_steps import POINTWISE_STEP, Program
from ort_backend.lowering.memory_order import is_dense
from ort_backend.lowering.passes.effects import drop_unread
from ort_backend.lowering.passes.optimizer_rules import Rule, Update, rule_of
from ort_backend.lowering.passes.pointwise_programs import NoProgram, program_of
from ort_backend.lowering.passes.write_back import is_sparse
from ort_backend.target import OrtTarget

aten = torch.ops.aten

# Elements of all parameters together from which on a kernel, and a program, is worth leaving the session for. For one tensor of 16,384 elements a
# program of one or two calls took 0.05 ms and the session 0.04, for one of 65,536 0.06 and 0.09 (an Intel Xeon, one thread).
_LEAST, _LEAST_FOR_PROGRAMS = 1 << 12, 1 << 15
# Pointwise operators without the tag of these (torch 2.13).
_UNTAGGED = {
    aten.lerp.Scalar, aten.lerp.Tensor, aten.copy.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.full_like.default,
    aten.scalar_tensor.default, torch.ops.prims.convert_element_type.default,
}  # fmt: skip


# What makes scalars of the dtype of a tensor, which is float64 where a rule is told.
_IN_DOUBLE: dict[Any, Callable[[Any], Tensor]] = {
    aten.scalar_tensor.default: lambda number: torch.tensor(number, dtype=torch.float64),
    torch.ops.prims.convert_element_type.default: lambda tensor: tensor,
}


class _Step(NamedTuple):
    """The step of one parameter."""

    parameter: fx.Node
    gradients: tuple[fx.Node, ...]  # what is read of that shape; of an optimizer's step one
    states: tuple[fx.Node, ...]
    counters: tuple[fx.Node, ...]  # arguments without dimensions that get new values: of an optimizer's step how many there were
    rates: tuple[fx.Node, ...]  # what else without dimensions is read: the learning rate, if it is a tensor
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
    found: list[tuple[_Step, Rule | _Program]] = []
    for argument in new:
        step = _step_of(argument, new, place_of)
        if step is None or (alone and not _is_alone(step, new, results)):
            continue
        if not step.states and any(user.op != "output" for user in new[argument].users):  # a sum or an average that another rule reads
            continue
        key = _form(step, new)
        if key not in known:
            known[key] = _rule(step, new)
        if (rule := known[key] or _program(step, new)) is not None:
            found.append((step, rule))
    groups: dict[Any, list[tuple[_Step, Any]]] = collections.defaultdict(list)
    taken: set[fx.Node] = set()
    # A momentum may look like a parameter, too, but has fewer states or another rule; one of two parameters is to be written to once.
    for step, rule in sorted(found, key=lambda one: (-len(one[0].states), not isinstance(one[1], Rule))):
        if taken.isdisjoint((step.parameter, *step.states)):
            taken |= {step.parameter, *step.states}
            of_rule = (rule.target, rule.settings, step.rates) if isinstance(rule, Rule) else rule.text
            groups[of_rule, step.parameter.meta["val"].dtype].append((step, rule))
    replaced: dict[fx.Node, fx.Node] = {}
    for steps in groups.values():
        least = _LEAST if isinstance(steps[0][1], Rule) else _LEAST_FOR_PROGRAMS
        if sum(step.parameter.meta["val"].numel() for step, _ in steps) >= least:
            replaced |= _replacements(graph, steps, new, results)
    if replaced:
        replaced |= _count(graph, new, results)
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
    if any(one.meta["val"].shape != fake.shape or one.meta["val"].dtype != fake.dtype for one in gradients):
        return None
    nodes = sorted(region.nodes, key=place_of.__getitem__)
    return _Step(argument, *map(tuple, (gradients, states, counters, rates, nodes)))


def _rule(step: _Step, new: Mapping[fx.Node, fx.Node]) -> Rule | None:
    """The rule that it follows of those that PyTorch has a kernel for."""
    if len(step.gradients) != 1 or len(step.counters) > 1 or len(step.rates) > 1 or not all(_counts(new[one], one) for one in step.counters):
        return None
    if not all(one.meta["val"].is_floating_point() for one in (*step.counters, *step.rates)):
        return None
    return rule_of(_update(step, new), len(step.states), counts=bool(step.counters), has_rate=bool(step.rates))


class _Program(NamedTuple):
    """A step as a program, and the scalars that it takes."""

    text: str
    scalars: tuple[fx.Node, ...]


def _program(step: _Step, new: Mapping[fx.Node, fx.Node]) -> _Program | None:
    try:
        program, scalars = program_of(
            [node for node in step.nodes if node.meta["val"].dim()], {one: new[one] for one in (step.parameter, *step.states)}, step.gradients
        )
    except NoProgram:
        return None
    return _Program(program.text(), scalars)


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
            if last not in self._pointwise or not all(map(is_one, inputs)) or not (inputs or last.target is aten.scalar_tensor.default):
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
    """Whether nothing else reads what the step writes to, nor what it computes on the way, but for what has no dimensions."""
    owned = (step.parameter, *step.states)
    computed = [node for node in step.nodes if node.meta["val"].dim()]
    is_read = any(user not in step.nodes and user.op != "output" for one in (*owned, *computed) for user in one.users)
    return not is_read and sum(one in computed for one in results) == len(owned)


def _form(step: _Step, new: Mapping[fx.Node, fx.Node]) -> Any:
    """What steps have in common that are written alike."""
    number = {node: i for i, node in enumerate([step.parameter, *step.gradients, *step.states, *step.counters, *step.rates, *step.nodes])}
    written = [(node.target, *(fx.node.map_arg(part, lambda one: ("node", number[one])) for part in (node.args, node.kwargs))) for node in step.nodes]
    results = [number[new[one]] for one in (step.parameter, *step.states)]
    return repr((*map(len, step[1:]), results, written))


def _update(step: _Step, new: Mapping[fx.Node, fx.Node]) -> Update:
    """The step as a function of numbers."""

    def update(parameter: Tensor, gradient: Tensor, states: Sequence[Tensor], counter: Tensor, rate: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        values: dict[fx.Node, Any] = {step.parameter: parameter, step.gradients[0]: gradient, **dict(zip(step.states, states, strict=True))}
        values |= dict.fromkeys(step.counters, counter) | dict.fromkeys(step.rates, rate)
        for node in step.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs) if node.target not in _IN_DOUBLE else _IN_DOUBLE[node.target](args[0])  # type: ignore
        return values[new[step.parameter]], [values[new[one]] for one in step.states]

    return update


def _replacements(
    graph: fx.Graph, steps: Sequence[tuple[_Step, Any]], new: Mapping[fx.Node, fx.Node], results: Sequence[Any]
) -> dict[fx.Node, fx.Node]:
    """Writes the call for steps of one rule: its result is the first parameter's new value, and the others are the arguments, which it writes to."""
    (first, rule), *_ = steps
    parameters, gradients = [step.parameter for step, _ in steps], [one for step, _ in steps for one in step.gradients]
    written = [one for step, _ in steps for one in (step.parameter, *step.states)]
    target, args, kwargs = POINTWISE_STEP, tuple[Any, ...](), dict[str, Any]()
    if isinstance(rule, Rule):
        target = rule.target
        states = [[step.states[one.order[i]] for step, one in steps] for i in range(len(rule.order))] or [[]]
        counters = []
        if target is ADAM_STEP:
            kwargs = {"counts": all(_counts_alone(step, new, results) for step, _ in steps)}
            counters = [[one if kwargs["counts"] else new[one] for step, _ in steps for one in step.counters]]
            written += counters[0] if kwargs["counts"] else []
        args = (parameters, gradients, *states, *counters, first.rates[0] if first.rates else None, *rule.settings)
    else:
        args = (written, gradients, [one for _, program in steps for one in program.scalars], rule.text)
    with graph.inserting_before(graph.output_node()):
        call = graph.call_function(target, args, kwargs)
    call.meta = {"val": first.parameter.meta["val"], "stack_trace": new[first.parameter].meta.get("stack_trace")}
    return {**{one: one for one in written}, first.parameter: call}


def _count(graph: fx.Graph, new: Mapping[fx.Node, fx.Node], results: Sequence[Any]) -> dict[fx.Node, fx.Node]:
    """Writes the call for counts of steps that nothing reads, which are then all that a session would be left with."""
    counters = [
        one
        for one, value in new.items()
        if _counts(value, one) and _is_count(one.meta["val"]) and len(one.users) == len(value.users) == 1 and results.count(value) == 1
    ]
    if not counters:
        return {}
    program = Program((("add", ("w0", 1), {}, "w0"),), 1, 0, 0, 0)
    with graph.inserting_before(graph.output_node()):
        call = graph.call_function(POINTWISE_STEP, (counters, [], [], program.text()))
    call.meta = {"val": counters[0].meta["val"], "stack_trace": new[counters[0]].meta.get("stack_trace")}
    return {**{one: one for one in counters}, counters[0]: call}


def _is_count(fake: Tensor) -> bool:
    """As those of PyTorch's optimizers."""
    return fake.dim() == 0 and fake.dtype is torch.float32


def _counts_alone(step: _Step, new: Mapping[fx.Node, fx.Node], results: Sequence[Any]) -> bool:
    """Whether the counts of steps are read for this step alone, and counted."""
    users = (user for one in step.counters for node in (one, new[one]) for user in node.users)
    return all(user.op == "output" or user in step.nodes for user in users) and all(results.count(new[one]) == 1 for one in step.counters)
