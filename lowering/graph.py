"""The loop over FX nodes: each becomes ONNX nodes by its own lowering, by torch_lib's, or one that calls PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.errors import LoweringError
from ort_backend.lowering import control_flow, registry, torchlib
from ort_backend.lowering.border import Border
from ort_backend.lowering.builder import Builder
from ort_backend.lowering.calls import Calls
from ort_backend.lowering.calls_on_device.device_calls import rewrite_calls
from ort_backend.lowering.calls_on_device.half_calls import merge_half_calls
from ort_backend.lowering.complex_numbers import Complex, from_pairs, has_complex, is_complex
from ort_backend.lowering.constants import constant
from ort_backend.lowering.dtypes import carried, carrier
from ort_backend.lowering.fast_loops import use_fast_loops
from ort_backend.lowering.functions.autograd_function import BACKWARD, FORWARD
from ort_backend.lowering.functions.function_op import FunctionWriter
from ort_backend.lowering.fx_nodes import attribute, nodes_in
from ort_backend.lowering.kernels import cudnn, dense_products, faster_calls, fused_attention, onednn, optimizer_steps
from ort_backend.lowering.kernels.casts import give_casts_away
from ort_backend.lowering.kernels.empty_tensors import not_for_empty
from ort_backend.lowering.kernels.flex_attention import FLEX_BACKWARD, backward_of
from ort_backend.lowering.kernels.kernel_choice import faster_in_pytorch
from ort_backend.lowering.kernels.row_sums import ADD_ROWS, IN_PLACE
from ort_backend.lowering.kernels.write_back import IN_ARGUMENT, IN_PLACE_WRITES
from ort_backend.lowering.lowered import LoweredGraph, NotOnOrt, Outside
from ort_backend.lowering.memory_order import READS_STRIDES, reads_other_memory
from ort_backend.lowering.passes.effects import has_effect, is_dropped
from ort_backend.lowering.passes.host_values import is_about_sizes, keep_on_host
from ort_backend.lowering.passes.number_checks import is_number_check
from ort_backend.lowering.provenance import Provenance, at, newest, operator_name, user_line
from ort_backend.lowering.python_op import MS, PythonCall, ordered, waited, write_python_op
from ort_backend.lowering.registry import Unsupported
from ort_backend.lowering.splitting.partition import is_collective, is_random
from ort_backend.lowering.splitting.saved import kept_bytes
from ort_backend.lowering.symbolic import with_sign
from ort_backend.lowering.symbolic_numbers import SymbolicNumbers, is_symbolic_number
from ort_backend.lowering.tracing.mutable_operators import FUNCTIONALIZED, on_placed_bases, places_of_bases
from ort_backend.lowering.unread import drop_unread_constants, drop_unread_nodes
from ort_backend.target import OrtTarget

log = logging.getLogger(__name__)

aten = torch.ops.aten

# Behind each collective of `torch.distributed` in a graph.
_WAIT = "_c10d_functional::wait_tensor"
# What a node calls that is not its target, on any device and on the CPU.
_IMPLEMENTATIONS = {**dense_products.IMPLEMENTATIONS, **onednn.IMPLEMENTATIONS, **cudnn.IMPLEMENTATIONS, **fused_attention.IMPLEMENTATIONS}
_ON_CPU = {**_IMPLEMENTATIONS, **faster_calls.IMPLEMENTATIONS}
# Results that are their first argument: nothing in a functional graph sees the difference.
_SAME = {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.clone.default,
    aten.contiguous.default,
    aten._conj_physical.default,
}


class Behind:
    """Stands for a node that PyTorch computes behind the session: a sparse tensor (a gradient of `nn.Embedding(sparse=True)`), or writes in place."""


BEHIND = Behind()

# What writes where a tensor lies -> how the report puts it.
_BEHIND_THE_SESSION: dict[Any, str] = {
    ADD_ROWS: IN_PLACE,
    **dict.fromkeys(IN_PLACE_WRITES, IN_ARGUMENT),
    **dict.fromkeys(optimizer_steps.IMPLEMENTATIONS, optimizer_steps.IN_PARAMETERS),
}


def writes_behind(node: fx.Node) -> bool:
    """Whether PyTorch runs the node behind the session, on what lies in memory then."""
    return node.target in _BEHIND_THE_SESSION


class GraphLowering(Border):
    """Writes one ONNX graph, FX node by FX node."""

    def __init__(self, target: OrtTarget, name: str, *, strict: bool = False) -> None:
        self.target = target
        self.strict = strict
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": target.opset, MS: 1}, name=name)
        self._builder = Builder(self.graph, target.device_type, call_type=target.call_type)
        self.op = self._builder.op
        self.env: dict[fx.Node, Any] = {}
        self.python_calls: list[PythonCall] = []
        self.outside: list[Outside] = []
        self._lowered = 0
        self._behind_session = 0
        self._calls = Calls(self.op, target)
        self._symbols = SymbolicNumbers(self.op, self.graph, self._calls)
        self._functions = FunctionWriter(self.op)
        self._random_order: ir.Value | None = None

    # -- values of nodes

    def bind(self, node: fx.Node, value: Any) -> None:
        """Says that `node`'s value is `value`. Of a loose tangent (`passes.tangents`) the sizes are not known: they may all be 1."""
        fake = node.meta.get("val")
        if "loose" in node.meta:
            value.shape = ir.Shape([None] * node.meta["val"].dim())
        if isinstance(fake, torch.SymInt) and isinstance(value, ir.Value):
            self._symbols.remember(fake, value)
        self.env[node] = with_sign(value, fake)

    @property
    def last_python(self) -> ir.Value | None:
        """A value of the last node so far that runs Python, if there is one: what takes it waits for all of them."""
        return self._random_order

    def value(self, node: Any) -> Any:
        """The ONNX value (or Python constant) of an FX node; symbolic arithmetic is written when it is first asked for."""
        if not isinstance(node, fx.Node):
            return node
        held = self._held(node)
        return held.pairs(self.op) if isinstance(held, Complex) else held

    def _held(self, node: fx.Node) -> Any:
        """What stands for a node: as `value`, but a complex tensor may be `Complex`."""
        if node not in self.env:
            self.env[node] = with_sign(self._symbols.lower(node, self._operand), node.meta.get("val"))
        return self.env[node]

    def _operand(self, node: fx.Node) -> Any:
        """As `value`, but a complex tensor is `Complex`."""
        held = self._held(node)
        if is_complex(node.meta.get("val")) and isinstance(held, ir.Value):
            held = self.env[node] = from_pairs(self.op, held)
        return held

    def finish(self) -> LoweredGraph:
        """The finished graph."""
        drop_unread_nodes(self.graph)
        if self.target.device_type == "cpu":
            use_fast_loops(self.op, self.graph, self._builder.hints, self.target.threads)
        if self.target.sizes_on_host:
            keep_on_host(self.graph)
        casts, outside = give_casts_away(self.op, self.graph, self.target, self._builder.hints)
        self.python_calls += casts
        self.outside += outside
        if self.target.merges_calls:
            self.python_calls, of_calls, merged = rewrite_calls(self.graph, self.python_calls, self.target)
            self.outside += of_calls
        else:
            self.python_calls, merged = merge_half_calls(self.graph, self.python_calls, self.target)
        drop_unread_constants(self.graph)
        for node in self.graph:  # a user's lowering may write operators of a domain of its own
            self.graph.opset_imports.setdefault(node.domain, node.version or 1)
        model = ir.Model(self.graph, ir_version=9 if self.target.opset <= 20 else 10, producer_name="ort_training")
        kept = kept_bytes(self.graph, self._builder.hints)
        functions = self._functions.calls
        calls, names = (*self.python_calls, *functions), tuple(call.title for call in functions)
        nodes = len(self.graph) + merged + self._behind_session
        return LoweredGraph(model, calls, tuple(self.outside), self._lowered, nodes, kept, names)

    # -- nodes

    def run(self, nodes: Iterable[fx.Node]) -> None:
        """Lowers `call_function` and `get_attr` nodes in order.

        Raises:
            LoweringError: a node cannot be expressed at all, or only by PyTorch's kernel under `strict`.
            FaultyLowering: its lowering raises, or returns what the operator does not.
        """
        for node in nodes:
            if node not in self.env and not is_symbolic_number(node):
                with Provenance(self.graph, node):
                    self.env[node] = self._lower(node)

    def _lower(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(node)
        if node.target is operator.getitem:
            return self._item(node)
        if is_dropped(node):
            return None
        if node.target in _SAME and node.args[0].meta["val"].dtype == node.meta["val"].dtype and not _conjugates(node):  # type: ignore[union-attr]
            return self._held(node.args[0])  # type: ignore[arg-type]
        self._lowered += 1
        if self.target.python_op and self._is_behind(node):
            return self._behind(node)
        if node.target in (FORWARD, BACKWARD):
            return self._function(node)
        reason = self._not_native(node)
        if reason is None and is_random(node):
            reason = "a random draw that cannot be made before the graph runs, since it or one before it depends on computed values"
        if reason is None and (faster := faster_in_pytorch(node, self.target)) is not None:
            return self._by_python_op(node, faster, is_choice=True)
        if reason is None:
            result, reason = control_flow.write(self, node) if node.target in control_flow.CONTROL_FLOW else self._by_lowering(node)
            if reason is None:
                return result
        return self._by_python_op(node, reason)

    def _by_lowering(self, node: fx.Node) -> tuple[Any, str | None]:
        """The result of the first lowering that fits, or why none does."""
        reason = "no lowering, as no operator of ONNX has effects, such as errors about values" if has_effect(node) else "no lowering"
        find, operand = registry.find, self.value
        if is_complex_call := has_complex(node):
            reason, find, operand = "no lowering of torch.complex numbers", registry.find_complex, self._operand
        candidates: list[Callable[..., Any]] = [functools.partial(self._calls.call, lowering) for lowering in find(node.target, self.target)]
        if not candidates and not is_complex_call and (function := torchlib.find(node.target)) is not None:
            candidates = [functools.partial(self._calls.call_torchlib, function)]
        args, kwargs = self._arguments(node, operand)
        for candidate in candidates:
            mark = len(self.graph)
            try:
                result = candidate(node, args, kwargs)
            except Unsupported as unsupported:
                reason = str(unsupported) or "arguments not expressible in ONNX"
                self._roll_back(mark)
                continue
            lacking = next((new for new in self._since(mark) if not self._has_kernel(new)), None)
            if lacking is not None:
                reason = f"{self.target.provider} has no {lacking.op_type} kernel for {_types(lacking)}"
            elif (kind := not_for_empty(node, self._since(mark), on_device=self.target.sizes_on_host)) is not None:
                reason = f"{kind} is not for a tensor without elements, as one may be here"
            else:
                return result, None
            self._roll_back(mark)
        return None, reason

    def inside(self, name: str) -> GraphLowering:
        """For the body of a loop: writes a graph of its own, for ONNX Runtime's kernels alone."""
        inner = GraphLowering(dataclasses.replace(self.target, python_op=False), name, strict=True)
        inner._builder.hints = self._builder.hints
        return inner

    def _has_kernel(self, node: ir.Node) -> bool:
        return (self.target.sizes_on_host and is_about_sizes(node)) or self.target.has_kernel(node)

    def _since(self, mark: int) -> list[ir.Node]:
        return newest(self.graph, len(self.graph) - mark)

    def _roll_back(self, mark: int) -> None:
        written = self._since(mark)
        if written:
            self.graph.remove(written, safe=True)

    def _arguments(self, node: fx.Node, operand: Callable[[fx.Node], Any]) -> tuple[list[Any], dict[str, Any]]:
        return [fx.map_arg(arg, operand) for arg in node.args], {key: fx.map_arg(arg, operand) for key, arg in node.kwargs.items()}

    # -- PyTorch

    def is_behind(self, node: fx.Node) -> bool:
        """Whether PyTorch computes the node behind the session."""
        return self.env.get(node) is BEHIND

    def _is_behind(self, node: fx.Node) -> bool:
        leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
        is_sparse = any(isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided for leaf in leaves)
        return is_sparse or writes_behind(node) or any(self.is_behind(source) for source in node.all_input_nodes)

    def _behind(self, node: fx.Node) -> Behind:
        title, where, is_choice = operator_name(node.target), user_line(node), node.target in _BEHIND_THE_SESSION
        reason = _BEHIND_THE_SESSION.get(node.target, "a sparse tensor, which it makes of the session's results")
        if self.strict:
            raise NotOnOrt(title, reason, where)
        self.outside.append(Outside(title, reason, where, is_choice=is_choice))
        self._behind_session += 1
        return BEHIND

    def _not_native(self, node: fx.Node) -> str | None:
        """Why no lowering can take this node: a dtype that ONNX kernels do not work on."""
        fakes = [n.meta.get("val") for n in node.all_input_nodes] + [node.meta.get("val")]
        for fake in torch.utils._pytree.tree_leaves(fakes):
            if isinstance(fake, torch.Tensor):
                kind = carrier(fake.dtype)
                if kind is None or not kind.native:
                    return f"{fake.dtype} has no ONNX Runtime kernels"
        return None

    def _by_python_op(self, node: fx.Node, reason: str, *, is_choice: bool = False) -> Any:
        title, where = operator_name(node.target), user_line(node)
        if self.strict or not self.target.python_op:
            raise NotOnOrt(title, reason, where)
        if not callable(node.target):
            raise LoweringError(f"{title} cannot be called{at(where)}")
        if node.target in READS_STRIDES and reads_other_memory(node):
            raise LoweringError(f"{title} reads memory around its argument, an input of the graph that is a view: pass the whole tensor{at(where)}")
        fake = node.meta.get("val")
        for leaf in torch.utils._pytree.tree_leaves(fake):
            if isinstance(leaf, torch.Tensor):
                self._calls.type_of(leaf)
        args, kwargs = self._arguments(node, self.value)
        fakes = [n.meta["val"] for n in nodes_in((node.args, node.kwargs)) if isinstance(self.env.get(n), (ir.Value, Complex))]
        implementations = _ON_CPU if self.target.device_type == "cpu" else _IMPLEMENTATIONS
        target = backward_of(node) if node.target is FLEX_BACKWARD else implementations.get(node.target, node.target)
        if node.target is FUNCTIONALIZED and (places := places_of_bases(node)):
            target, numbers = on_placed_bases, [number for place in places.values() for number in place]
            kwargs["_places"] = {i: [self._symbols.number(number, node) for number in place] for i, place in places.items()}
            fakes += [number for number in numbers if not isinstance(number, int)]
        if is_collective(node):
            values, call = self._in_random_order(waited(node.target), title, tuple(args), kwargs, fake, fakes)
        elif is_random(node) or has_effect(node):
            values, call = self._in_random_order(target, title, tuple(args), kwargs, fake, fakes)
        else:
            values, call = write_python_op(self.op, target, title, tuple(args), kwargs, fake, fakes)
        self.python_calls.append(call)
        if not is_number_check(node):
            self.outside.append(Outside(title, reason, where, is_choice))
        log.debug("%s runs in PyTorch, inside the session: %s%s", title, reason, at(where))
        return self.stamped(values, fake) if isinstance(fake, (tuple, list)) else None if fake is None else self._calls.stamp(values[0], fake)

    def stamped(self, values: Sequence[Any], fakes: Sequence[Any]) -> list[Any]:
        """`stamp` for each value, also in lists among them; None stays None."""
        pairs = zip(values, fakes, strict=True)
        return [self.stamped(v, f) if isinstance(f, (tuple, list)) else None if v is None else self._calls.stamp(v, f) for v, f in pairs]

    def _function(self, node: fx.Node) -> list[Any]:
        """A call of a user's autograd.Function, or its backward: one node, behind all others that run Python, as the user wrote them."""
        if not self.target.python_op:
            raise LoweringError(
                f"an autograd.Function needs onnxruntime-training, or options={{'autograd_functions': 'inline'}}{at(user_line(node))}"
            )
        values, self._random_order = self._functions.write(node, self.value, self._random_order)
        return [None if value is None else self._calls.stamp(value, fake) for value, fake in zip(values, node.meta["val"], strict=True)]

    def _in_random_order(self, target: Any, title: str, args: Any, kwargs: Any, fake: Any, fakes: list[Any]) -> tuple[Any, PythonCall]:
        """A node that draws random numbers in PyTorch: a value from one such node to the next keeps ONNX Runtime from changing their order."""
        order = torch.zeros((), dtype=torch.int64)
        results = list(fake) if isinstance(fake, (tuple, list)) else [fake]
        before = self._random_order if self._random_order is not None else constant(self.op, 0, ir.DataType.INT64)
        values, call = write_python_op(self.op, ordered(target), title, (before, *args), kwargs, [*results, order], [order, *fakes])
        self._random_order = self._calls.stamp(values.pop(), order)
        return values, call

    # -- other kinds of node

    def _item(self, node: fx.Node) -> Any:
        values, index = self._held(node.args[0]), node.args[1]  # type: ignore[arg-type]
        return BEHIND if values is BEHIND else values[index]

    def _attribute(self, node: fx.Node) -> ir.Value:
        """A tensor constant of the traced module."""
        found = attribute(node)
        if not isinstance(found, torch.Tensor):
            return found
        kind = carrier(found.dtype)
        if kind is None:
            raise LoweringError(f"constant {node.target} has dtype {found.dtype}, which cannot be a constant of an ONNX graph{at(user_line(node))}")
        return constant(self.op, carried(found.detach().cpu()), kind.dtype)


def _conjugates(node: fx.Node) -> bool:
    return node.target is aten._conj_physical.default and node.meta["val"].is_complex()


def _types(node: ir.Node) -> str:
    return ", ".join(str(value.dtype) for value in node.inputs if value is not None)
