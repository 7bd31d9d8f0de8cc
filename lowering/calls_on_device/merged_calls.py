"""Calls of PyTorch that follow one another become one node, whose code is written for them: on a CUDA device, and some on the CPU (`half_calls`).

ONNX Runtime takes 40 to 60 microseconds of the host's time on each side of such a node, as its tensors become Python's and back (a machine with an
H100, 2026-11): as much as the kernel that it starts. A step of GPT-2 small had 161 of them, and waited for the host.
What lies between two calls in one node costs nothing: no capsule, no tensor of ONNX Runtime's. Results that nothing reads are not handed over.

A call joins an earlier one where nothing that it needs depends on that one but by calls of the same node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.calls_on_device.viewed_calls import Part, Sizes, View, Views
from ort_backend.lowering.carriers import AS_THEY_ARE, given
from ort_backend.lowering.permuting import inverse
from ort_backend.lowering.python_op import PythonCall, Recipe, Slot, callable_of, unique_name
from ort_backend.lowering.splitting.saved import sides_of_yield

_VALUE = re.compile(r"\bv\d+\b")
# Calls in one node: the inputs of all of them live until the last one is done. In the backward these are tensors that would be given up one by one.
_LARGEST_IN_FRONT, _LARGEST = 32, 9
# How far back a call looks for one to join, in nodes: as long may another wait for what this one needs.
_WINDOW = 24


class _Group:
    """Calls that are one node, in an order in which they can run."""

    def __init__(self, node: ir.Node, side: int) -> None:
        self.nodes = [node]
        self.side = side

    @property
    def inputs(self) -> Iterator[ir.Value | None]:
        return itertools.chain.from_iterable(node.inputs for node in self.nodes)

    @property
    def outputs(self) -> Iterator[ir.Value]:
        return itertools.chain.from_iterable(node.outputs for node in self.nodes)


def merge_calls(graph: ir.Graph, calls: Sequence[PythonCall], views: Mapping[str, Views], largest: int | None = None) -> list[PythonCall]:
    """Rewrites the graph in place.

    Args:
        graph: With the nodes of the calls.
        calls: All callables of the graph's nodes.
        views: How tensors are viewed around a call, by its name (`viewed_calls`).
        largest: So many calls become one node; None: as many as suit each side of the `YieldOp`.

    Returns:
        The callables of the nodes that there are now.
    """
    graph.sort()
    by_name = {call.name: call for call in calls}
    groups = [one for one in _grouped(graph, set(by_name), largest) if isinstance(one, _Group)]
    made = {}
    for group in groups:
        merged = _merged(graph, group, by_name, views)
        made[_name(group.nodes[0])] = merged
        for node in group.nodes:
            by_name.pop(_name(node))
    graph.sort()
    return [*by_name.values(), *made.values()]


def _name(node: ir.Node) -> str:
    name = callable_of(node)
    assert name is not None
    return name


def _grouped(graph: ir.Graph, names: set[str], largest: int | None) -> list[ir.Node | _Group]:
    """The nodes in an order in which they can run, those of one group behind each other."""
    sides = sides_of_yield(graph)
    done: list[ir.Node | _Group] = []
    for node in graph:
        if callable_of(node) not in names:
            done.append(node)
        elif (rest := _joined(node, sides.get(node, 0), done, largest)) is not None:
            done = rest
        else:
            done.append(_Group(node, sides.get(node, 0)))
    return done


def _joined(node: ir.Node, side: int, done: list[ir.Node | _Group], largest: int | None) -> list[ir.Node | _Group] | None:
    """`done` with the node in the last group that it can join; None where it can join none."""
    last = len(done)
    if largest is None:
        largest = _LARGEST_IN_FRONT if side == 1 else _LARGEST
    for place in range(last - 1, max(-1, last - 1 - _WINDOW), -1):
        group = done[place]
        if isinstance(group, ir.Node):
            if any(_has_graph(one) for one in group.attributes.values()):
                return None  # whose body reads values of this graph
            continue
        if group.side != side or len(group.nodes) >= largest:
            continue
        behind = set(group.outputs)
        others: list[ir.Node | _Group] = []
        free: list[ir.Node | _Group] = []
        for one in done[place + 1 :]:
            waits = any(value in behind for value in one.inputs)
            (others if waits else free).append(one)
            if waits:
                behind.update(one.outputs)
        own = set(group.outputs)
        if any(value in behind and value not in own for value in node.inputs):
            continue
        group.nodes.append(node)
        return [*done[:place], *free, group, *others]
    return None


def _has_graph(attribute: ir.Attr) -> bool:
    return attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


# -- code


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor in the code: a name, and what is to be done with it: views, as methods.

    Attributes:
        layout: Where it lies in what is named, as a tensor without memory; None where sizes are not known.
    """

    name: str
    expression: str = ""
    layout: torch.Tensor | None = None


class _Writer:
    """Python for the calls of a node: a line for each step, in which every value has a name until nothing reads it any more."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._count = itertools.count()

    def constant(self, value: Any) -> str:
        """A name for anything that is there before the code runs."""
        if value is None or type(value) in (bool, int):
            return repr(value)
        known = next((name for name, other in self.names.items() if other is value), None)
        name = known or f"c{len(self.names)}"
        self.names[name] = value
        return name

    def line(self, expression: str) -> str:
        """The name of what the expression gives."""
        name = f"v{next(self._count)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def viewed(self, tensor: _Tensor, views: Sequence[View]) -> _Tensor:
        """A view of a tensor."""
        made = tensor
        for view in views:
            made = _part(made, view) if isinstance(view, Part) else _reshaped(made, view)
        return made

    def read(self, tensor: _Tensor) -> str:
        """The name of a view: as one of the tensor in memory where its place is known, which is the fastest."""
        if not tensor.expression:
            return tensor.name
        if tensor.layout is None:
            return self.line(f"{tensor.name}{tensor.expression}")
        sizes, strides, offset = tuple(tensor.layout.shape), tensor.layout.stride(), tensor.layout.storage_offset()
        place = f", {tensor.name}.storage_offset() + {offset}" if offset else ""
        return self.line(f"{tensor.name}.as_strided({sizes}, {strides}{place})")

    def call(self, call: PythonCall, arguments: Sequence[_Tensor], wanted: Sequence[int]) -> dict[int, str]:
        """The names of the results that are wanted, as the node gives them."""
        if call.recipe is not None:
            return self._by_recipe(call.recipe, arguments, wanted)
        assert not call.allocates
        made = self.line(f"{self.constant(call.function)}({', '.join(map(self.read, arguments))})")
        return {i: self.line(f"{made}[{i}]") for i in wanted}

    def _by_recipe(self, recipe: Recipe, arguments: Sequence[_Tensor], wanted: Sequence[int]) -> dict[int, str]:
        given_as = {id(slot): self._arrived(slot, tensor) for slot, tensor in zip(recipe.slots, arguments, strict=True)}
        args = [self._argument(one, given_as) for one in recipe.args]
        args += [f"{name}={self._argument(one, given_as)}" for name, one in recipe.kwargs.items()]
        made = self.line(f"{self.constant(recipe.target)}({', '.join(args)})")
        return {i: self._given(made, *recipe.results[i]) for i in wanted}

    def _arrived(self, slot: Slot, tensor: _Tensor) -> str:
        if slot.dtype in AS_THEY_ARE:
            return self.read(_permuted(tensor, inverse(slot.order)) if slot.order is not None else tensor)
        return self.line(f"{self.constant(slot.arrival)}({self.read(tensor)})")

    def _argument(self, value: Any, given_as: Mapping[int, str]) -> str:
        if isinstance(value, Slot):
            return given_as[id(value)]
        if type(value) is list:
            return f"[{', '.join(self._argument(one, given_as) for one in value)}]"
        return self.constant(value)

    def _given(self, made: str, number: int | None, dtype: torch.dtype | None, order: tuple[int, ...] | None) -> str:
        name = made if number is None else self.line(f"{made}[{number}]")
        if dtype is None:
            return self.line(f"{self.constant(given)}({name}, None, {order})")
        if order is not None:
            name = self.line(f"{name}.permute({order})")
        fits = f"{name}.dtype is {self.constant(dtype)} and {name}.is_contiguous()"
        return self.line(f"{name} if {fits} else {self.constant(given)}({name}, {self.constant(dtype)}, None)")

    def function(self, arguments: Sequence[str], results: Sequence[str]) -> Callable[..., Sequence[torch.Tensor]]:
        """The code, as a function."""
        body = [*_with_releases(self.lines, {*arguments, *results}), f"return ({', '.join(results)},)"]
        source = f"def run({', '.join(arguments)}):\n" + "\n".join(f"    {line}" for line in body)
        exec(compile(source, "<calls of PyTorch>", "exec"), self.names)
        return self.names["run"]


def _part(tensor: _Tensor, part: Part) -> _Tensor:
    layout = None if tensor.layout is None else tensor.layout.narrow(part.axis, part.start, part.length)
    return _Tensor(tensor.name, f"{tensor.expression}.narrow({part.axis}, {part.start}, {part.length})", layout)


def _reshaped(tensor: _Tensor, sizes: Sizes) -> _Tensor:
    layout = None
    if tensor.layout is not None and -1 not in sizes:
        with contextlib.suppress(RuntimeError):  # it would be a copy
            layout = tensor.layout.view(sizes)
    return _Tensor(tensor.name, f"{tensor.expression}.reshape({sizes})", layout)


def _permuted(tensor: _Tensor, order: Sequence[int]) -> _Tensor:
    return _Tensor(tensor.name, f"{tensor.expression}.permute({tuple(order)})", None if tensor.layout is None else tensor.layout.permute(*order))


def _layout(shape: ir.Shape | None) -> torch.Tensor | None:
    """Of a contiguous tensor of these sizes."""
    if shape is None or not all(isinstance(size, int) and size > 0 for size in shape):
        return None
    return torch.empty([int(size) for size in shape], device="meta")  # type: ignore[arg-type]


def _with_releases(lines: Sequence[str], kept: Set[str]) -> Iterator[str]:
    """The lines, and behind the last one that reads a value one that gives it up."""
    read = [set(_VALUE.findall(line)) for line in lines]
    last = {name: i for i, names in enumerate(read) for name in names}
    for i, (line, names) in enumerate(zip(lines, read)):
        yield line
        if over := sorted(name for name in names - kept if last[name] == i):
            yield f"del {', '.join(over)}"


def _merged(graph: ir.Graph, group: _Group, calls: Mapping[str, PythonCall], views: Mapping[str, Views]) -> PythonCall:
    """Puts one node in the place of a group's; its callable."""
    writer, names, inputs = _Writer(), dict[ir.Value, str](), list[ir.Value]()
    nodes = set(group.nodes)
    for node in group.nodes:
        call, viewed = calls[_name(node)], views.get(_name(node), Views())
        for value in node.inputs:
            assert value is not None
            if value not in names:
                names[value] = f"a{len(inputs)}"
                inputs.append(value)
        tensors = [(value, viewed.inputs.get(i, ())) for i, value in enumerate(node.inputs) if value is not None]
        arguments = [writer.viewed(_Tensor(names[value], "", _layout(value.shape)), some) for value, some in tensors]
        wanted = _read(node.outputs) or range(len(node.outputs))  # it has an effect
        for i, name in writer.call(call, arguments, wanted).items():
            names[node.outputs[i]] = writer.read(writer.viewed(_Tensor(name), viewed.outputs.get(i, ())))
    outputs = [value for value in group.outputs if value.is_graph_output() or any(use.node not in nodes for use in value.uses())]
    outputs = outputs or list(group.nodes[-1].outputs)
    function = writer.function([names[value] for value in inputs], [names[value] for value in outputs])
    title = "+".join(calls[_name(node)].title for node in group.nodes)
    merged = PythonCall(unique_name(title), title, function, op_type=group.nodes[0].op_type)
    _replace(graph, group.nodes, inputs, outputs, merged.name)
    return merged


def _read(values: Sequence[ir.Value]) -> list[int]:
    return [i for i, value in enumerate(values) if value.uses() or value.is_graph_output()]


def _replace(graph: ir.Graph, nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], name: str) -> None:
    made = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in outputs]
    first, old_name = nodes[0], _name(nodes[0])
    renamed = [ir.AttrString(one.name, name) if one.value == old_name else one for one in first.attributes.values()]
    node = ir.Node(first.domain, first.op_type, inputs, renamed, version=1, outputs=made, metadata_props=dict(first.metadata_props))
    graph.insert_after(nodes[-1], node)
    for old, new in zip(outputs, made, strict=True):
        old.name = f"{old.name}_before"
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(nodes, safe=True)
