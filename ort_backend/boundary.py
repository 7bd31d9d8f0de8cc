"""What enters and leaves an ONNX graph: FX nodes as inputs and outputs, with what the runtime must know of each."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.memory_order import READS_STRIDES, entering_order, order_of, storage_order
from ort_backend.lowering.permuting import inverse
from ort_backend.lowering.splitting.eager_nodes import evaluation_of
from ort_backend.lowering.splitting.partition import root, view_chain
from ort_backend.lowering.symbolic import may_be_zero
from ort_backend.lowering.views import replay
from ort_backend.runtime.binding import Input, Output, carried

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
_FACTORIES = (aten.full.default, aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default)
# ONNX Runtime copies what it reshapes into an output; below this many elements that takes less than a view by PyTorch.
_WORTH_A_VIEW = 1 << 14


def add_inputs(
    lowering: GraphLowering, primals: Sequence[fx.Node], draws: Sequence[fx.Node], calls: Sequence[fx.Node], fetched: Sequence[Any]
) -> tuple[Input, ...]:
    """Graph inputs for the placeholders that the graph computes with, or that it fetches, and for the draws that it returns.

    All others never enter ONNX Runtime.
    """
    inside, wanted = set(calls), {node for node in fetched if isinstance(node, fx.Node)}
    inputs = []
    for position, node in enumerate((*primals, *draws)):
        fake = node.meta["val"]
        if not isinstance(fake, (torch.Tensor, torch.SymInt)) or _is_nested_int(fake):
            lowering.bind(node, fake)
        elif isinstance(fake, torch.SymInt) or node in wanted or any(user in inside or "draw" in node.meta for user in node.users):
            lowering.add_input(node, node.name)
            # Dynamo's guards tell tensors with a pending negation from others.
            negated = isinstance(fake, torch.Tensor) and fake.is_neg()
            inputs.append(input_of(position, fake, as_shape=lowering.target.sizes_on_host, may_be_negated=negated))
    return tuple(inputs)


def _is_nested_int(fake: Any) -> bool:
    """Whether it stands for the lengths of a nested tensor's rows: it is handed on, but has no value to compute with."""
    return isinstance(fake, torch.SymInt) and fake.node.is_nested_int()


def input_of(position: int, fake: Any, *, as_shape: bool = False, may_be_negated: bool = True, as_it_lies: bool = True) -> Input:
    """The input for a tensor or number like `fake` at that place among the arguments.

    `as_shape` and `as_it_lies`: how `GraphLowering.add_input` takes it, an integer as a shape, a tensor in its `entering_order`.
    """
    if not isinstance(fake, torch.Tensor):
        return Input(position, None, as_shape=as_shape and isinstance(fake, torch.SymInt))
    may_be_empty, order = any(map(may_be_zero, fake.shape)), entering_order(fake) if as_it_lies else None
    return Input(position, fake.dtype, may_be_empty, may_be_negated=may_be_negated, device=fake.device, permutation=order)


class Results:
    """Collects what leaves a graph: values of ONNX Runtime once each, arguments and constants as they are, views taken of either."""

    def __init__(
        self,
        lowering: GraphLowering,
        arguments: Sequence[fx.Node],
        results: Sequence[Any],
        *,
        views: bool,
        taken: Set[fx.Node] = frozenset(),
        read: Set[fx.Node] = frozenset(),
    ) -> None:
        """`results`: everything that will be added. `views`: whether views among them are to share memory with what they are views of.

        `taken`, `read`: what the backward reads, and nodes in whose memory that lies.
        """
        self._lowering = lowering
        self._arguments = {node: i for i, node in enumerate(arguments)}
        nodes = [(i, node) for i, node in enumerate(results) if isinstance(node, fx.Node)]
        self._places = {node: i for i, node in reversed(nodes)} if views else {}
        self._read = read
        self._common = self._common_bases() if views else frozenset()
        real = [node for node in taken if isinstance(node.meta.get("val"), torch.Tensor) and not node.meta["val"].is_complex()]
        self._kept: dict[int, set[fx.Node]] = {}  # by the identity of a value: the bases of the nodes that it stands for
        for node in real:
            self._kept.setdefault(id(lowering.value(node)), set()).add(root(node, through_copies=False))
        self._sharing = collections.Counter(root(node) for _, node in nodes)
        self._results = frozenset(node for _, node in nodes)
        self._fetches: dict[Any, int] = {}
        self._constants: set[fx.Node] = set()  # that are results already
        self.nodes: list[fx.Node] = []
        self.values: list[Any] = []
        self._fetched: set[Any] = set()  # the same

    def add(self, node: Any, *, as_view: bool = True, like: fx.Node | None = None) -> Output:
        """How a result, or what PyTorch makes one of, is had.

        `as_view`: it may be taken as a view of another result. `like`: in whose order of memory it is to lie, if not in that of the trace.
        """
        if not isinstance(node, fx.Node):
            return Output("constant", value=node)
        if node in self._arguments:
            return Output("argument", self._arguments[node])
        if self._lowering.is_behind(node):
            return self._made_behind(node)
        if as_view and node in self._places and (constant := _constant_nodes(node)):
            if node in self._constants:
                return Output("result view", self._places[node], value=_itself)
            self._constants.add(node)
            return Output("made", value=evaluation_of(constant, ()))
        view = self._view(node) if as_view and self._places else None
        if view is not None:
            return view
        fake = node.meta["val"]
        is_tensor = isinstance(fake, torch.Tensor)
        permutation = storage_order(fake if like is None else like.meta["val"]) if is_tensor else None
        source = self._reshaped(node) if permutation is None else node  # the order is one of this node's dimensions
        shape = None if source is node else tuple(fake.shape)
        node = source
        value = self._lowering.value(node)
        if not hasattr(value, "producer"):
            return Output("constant", value=value)
        fake = node.meta["val"]
        # The lowering leaves copies out; the user, who may write to one and not to the other, gets memory for each, and the backward keeps its own.
        base = root(node, through_copies=False)
        key = (value, permutation, base)
        if key not in self._fetches:
            self._fetches[key] = len(self.values)
            is_taken = value in self._fetched or not self._kept.get(id(value), set()) <= {base}  # as what the program has copied
            self.values.append(self._outgoing(value, fake, permutation, is_taken=is_taken))
            self._fetched.add(self.values[-1])
            self.nodes.append(node)
        restored = None if permutation is None else inverse(permutation)
        fetched = Output("fetch", self._fetches[key], fake.dtype if is_tensor else None, permutation=restored, shape=shape)
        return Output("made", value=bool, parts=(fetched,)) if isinstance(fake, torch.SymBool) else fetched

    def _reshaped(self, node: fx.Node) -> fx.Node:
        """The node of which a large result is a reshape, and which shares memory with no other result: PyTorch reshapes it without a copy.

        Nor with what the backward reads: AOTAutograd returns such results with a version counter of their own (`_AutogradForwardEpilogue.finalize`,
        read in torch 2.13), so that the backward would not see that the user has written to one.
        """
        source = node
        while source.target in _RESHAPES:
            source = source.args[0]  # type: ignore[assignment]
        if source is node or source.op != "call_function" or root(node) in self._read:
            return node
        if self._sharing[root(node)] > (node in self._results):  # what another result is made of is none itself
            return node
        fakes = (node.meta["val"], source.meta["val"])
        are_plain = all(all(isinstance(size, int) for size in one.shape) and one.is_contiguous() for one in fakes)
        if not are_plain or math.prod(fakes[0].shape) < _WORTH_A_VIEW or carried(fakes[0].dtype) is not fakes[0].dtype:
            return node
        producer = getattr(self._lowering.value(source), "producer", lambda: None)()
        return source if producer is not None and producer.op_type != "YieldOp" else node

    def _made_behind(self, node: fx.Node) -> Output:
        """What PyTorch computes of the session's results."""
        nodes, sources, waiting = {node}, set[fx.Node](), [node]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if not self._lowering.is_behind(source):
                    sources.add(source)
                elif source not in nodes:
                    nodes.add(source)
                    waiting.append(source)
        inputs = sorted(sources)
        return Output("made", value=evaluation_of(sorted(nodes), inputs), parts=tuple(self.add(one, as_view=False) for one in inputs))

    def _view(self, node: fx.Node) -> Output | None:
        """AOTAutograd reads sizes, strides and offsets off views that it makes again, and a user may write through one."""
        chain = view_chain(node, through_copies=False)
        # The last of them: that is no view of another result itself.
        of = max((i for i, one in enumerate(chain) if i and (one in self._arguments or one in self._places or one in self._common)), default=0)
        base, chain = chain[of], chain[:of]
        if not chain:
            return None
        if any(one.target in READS_STRIDES for one in chain) and not self._lies_as_traced(base):
            return None
        if base in self._common:
            return self._view_by_numbers(chain, base)
        made = replay(node, base, list(self._arguments))
        if made is None:
            return self._view_by_numbers(chain, base)
        if base in self._arguments:
            return Output("argument view", self._arguments[base], value=made)
        return Output("result view", self._places[base], value=made)

    def _common_bases(self) -> frozenset[fx.Node]:
        """Of results that are views of the same memory, none of them of another: the last node that all of them are views of.

        AOTAutograd sees to those with gradients: it returns their base as well. Parts from one operator (`chunk`) do not overlap.
        """
        chains = (view_chain(node, through_copies=False) for node in self._places if not self._lowering.is_behind(node))
        waiting = _grouped(chains, lambda chain: chain[-1])
        bases = set()
        while waiting:
            several = waiting.pop()
            if len(several) < 2 or several[0][-1] in self._arguments or several[0][-1] in self._read:
                continue
            shared = next(one for one in several[0] if all(one in chain for chain in several))
            if isinstance(shared.meta["val"], torch.Tensor):
                bases.add(shared)
            else:
                waiting += _grouped(several, lambda chain, end=shared: chain[chain.index(end) - 1])  # type: ignore[misc]
        return frozenset(bases.difference(self._places))

    def _lies_as_traced(self, base: fx.Node) -> bool:
        """Whether the strides that the user's tensor has are those of the trace: Dynamo's guards see to those of arguments."""
        return base in self._arguments or order_of(base.meta["val"]) == storage_order(base.meta["val"])

    def _view_by_numbers(self, chain: Sequence[fx.Node], base: fx.Node) -> Output | None:
        """A view, the first of a chain that ends at `base`, whose place follows from numbers that the graph computes."""
        inputs = sorted({source for one in chain for source in one.all_input_nodes}.difference(chain))
        if not all(source is base or isinstance(source.meta["val"], torch.SymInt) for source in inputs):
            return None
        return Output("made", value=evaluation_of(chain[::-1], inputs), parts=tuple(self.add(one) for one in inputs))

    def _outgoing(self, value: Any, fake: Any, permutation: tuple[int, ...] | None, *, is_taken: bool) -> Any:
        """The value to fetch: a node's own output, that is nobody else's, in the memory order that PyTorch expects."""
        if permutation is not None:
            return self._lowering.transpose(value, (*permutation, len(permutation)) if fake.is_complex() else permutation)
        return self._lowering.fresh(value, fake) if is_taken or value.producer() is None or self._is_tangent(value) else value

    @staticmethod
    def _is_tangent(value: Any) -> bool:
        return value.producer().op_type == "YieldOp"


def _grouped(chains: Iterable[list[fx.Node]], key: Callable[[list[fx.Node]], fx.Node]) -> list[list[list[fx.Node]]]:
    groups: dict[fx.Node, list[list[fx.Node]]] = {}
    for chain in chains:
        groups.setdefault(key(chain), []).append(chain)
    return list(groups.values())


def _itself(tensor: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    return tensor


def _constant_nodes(node: fx.Node) -> list[fx.Node]:
    """What makes a tensor of numbers known beforehand, in order; [] for others. PyTorch makes those that are results: the user's may be resized.

    `buffer = torch.empty(0)`, and behind a graph break `torch.sigmoid(x, out=buffer)`. Memory of ONNX Runtime cannot be.
    """
    if node.target is aten.lift_fresh_copy.default and node.args[0].op == "get_attr":  # type: ignore[union-attr]
        return [node.args[0], node]  # type: ignore[list-item]
    return [node] if node.target in _FACTORIES and not node.all_input_nodes else []


def add_outputs(
    lowering: GraphLowering, results: Sequence[Any], arguments: Sequence[fx.Node], *, views: bool = False, like: Sequence[fx.Node] = ()
) -> tuple[tuple[Output, ...], list[fx.Node]]:
    """Graph outputs for results: how each is made of what is fetched, and the node of each output of the ONNX graph.

    Args:
        lowering: The graph.
        results: Nodes and constants.
        arguments: The nodes of the callable's arguments.
        views: Whether views among the results are taken by PyTorch, so that they share memory as in eager.
        like: Of gradients the tensors that they are of: autograd copies one that lies in another order of memory.
    """
    collected = Results(lowering, arguments, results, views=views)
    if len(like) == len(results):
        outputs = tuple(collected.add(node, like=one if _has_shape_of(node, one) else None) for node, one in zip(results, like))
    else:
        outputs = tuple(map(collected.add, results))
    for value in lowering.after_yield(collected.values, [node.meta["val"] for node in collected.nodes]):
        lowering.add_output(value)
    return outputs, collected.nodes


def _has_shape_of(node: Any, other: fx.Node) -> bool:
    """Whether both are tensors with the same number of dimensions."""
    fakes = [one.meta.get("val") if isinstance(one, fx.Node) else None for one in (node, other)]
    return all(isinstance(one, torch.Tensor) for one in fakes) and fakes[0].dim() == fakes[1].dim()  # type: ignore[union-attr]


def tangent_outputs(graph: fx.Graph, outputs: int, tangents: Sequence[fx.Node]) -> tuple[int, ...] | None:
    """For each tangent, the forward output that it belongs to, from AOTAutograd's descriptors (there since torch 2.9; None without them)."""
    described = graph.output_node().meta.get("desc")
    if described is None:
        return None
    # The tokens of effects come first, and AOTAutograd takes them off before autograd sees the rest.
    names = [str(one) for one in described[:outputs] if type(one).__name__ != "ForwardTokenAOTOutput"]
    wanted = [str(getattr(node.meta.get("desc"), "output", None)) for node in tangents]
    return tuple(names.index(name) for name in wanted) if all(name in names for name in wanted) else None


def device_of(node: fx.Node) -> torch.device:
    """The device of a node's tensor; the CPU for a number."""
    fake = node.meta["val"]
    return fake.device if isinstance(fake, torch.Tensor) else torch.device("cpu")


def is_fixed(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Whether a session with such inputs and outputs works on fixed sizes in one place. What lies elsewhere ONNX Runtime copies before each run to
    wherever there is room, and a captured run would not read it there.
    """
    sizes = [size for fake in outputs if isinstance(fake, torch.Tensor) for size in fake.shape]
    devices = {fake.device.type if isinstance(fake, torch.Tensor) else "number" for fake in (*inputs, *outputs)}
    return all(isinstance(size, int) for size in sizes) and len(devices) == 1
