"""A user's autograd.Function in the ONNX graph: one `PythonOp` for its forward, one `PythonOpGrad` for its backward.

The attributes are ONNX Runtime's own mapping: `input_convention` has `d` for a tensor and `c` for a constant; bool, int and float scalars and
tuples of one of these have typed attributes; any other object stands there by its address. Behind the arguments of `apply` follow the tensors
inside its containers, the symbolic integers, and a value of the Function before, which keeps their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.lowering.carriers import from_carrier, number_of, to_carrier
from ort_backend.lowering.constants import constant
from ort_backend.lowering.dtypes import Carrier, carrier
from ort_backend.lowering.functions import function_run
from ort_backend.lowering.functions.autograd_function import BACKWARD, FORWARD
from ort_backend.lowering.functions.function_site import SITES, Reference, Site, Slot
from ort_backend.lowering.functions.original_tensors import input_of
from ort_backend.lowering.fx_nodes import tangents_of
from ort_backend.lowering.python_op import (
    MS,
    PythonCall,
    as_declared,
    declared,
    kinds,
    release_context,
    typed_context,
)
from ort_backend.lowering.splitting.dependencies import reach, run_by

_names = itertools.count()
_TYPED: tuple[tuple[type, str, Callable[[Any], Any]], ...] = ((bool, "bool", int), (int, "int", int), (float, "float", float))  # bool is an int
_NOTHING = torch.zeros((), dtype=torch.int64, device="cpu")  # a value whose number nobody reads, such as the one that keeps the order of backwards
_INT64 = range(-(1 << 63), 1 << 63)


class FunctionWriter:
    """Writes the nodes of users' Functions into one graph."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self._calls: dict[int, FunctionCall] = {}
        self._with_backward: set[int] | None = None
        self._reach: dict[Any, frozenset[int]] = {}

    @property
    def calls(self) -> list[FunctionCall]:
        """The calls written so far."""
        return list(self._calls.values())

    def write(self, node: fx.Node, value: Callable[[Any], Any], order: ir.Value | None) -> tuple[list[ir.Value | None], ir.Value]:
        """Writes a forward or a backward.

        Args:
            node: The FX node, a call of `function_forward` or `function_backward`.
            value: Gives the ONNX value of an FX node.
            order: A value of the Python node that must run before this one, if there is one.

        Returns:
            One value for each result, and the value that keeps the order.
        """
        if order is None:
            order = constant(self._op, 0, ir.DataType.INT64)
        if node.target is FORWARD:
            return self._forward(node, value, order)
        return self._backward(node, value, order)

    def _forward(self, node: fx.Node, value: Callable[[Any], Any], order: ir.Value) -> tuple[list[ir.Value | None], ir.Value]:
        tensors, ints, number = node.args
        if self._with_backward is None:
            self._with_backward = {one.args[4] for one in node.graph.find_nodes(op="call_function", target=BACKWARD)}
        call = self._calls[number] = FunctionCall(SITES[number], [value(one) for one in ints])  # type: ignore[index, union-attr]
        inputs = node.graph.find_nodes(op="placeholder") if call.site.behaviour.goes_by_tensors else ()
        call.inputs = {i: place for i, one in enumerate(tensors) if (place := input_of(one, inputs)) is not None}  # type: ignore[arg-type]
        made = self._op.PythonOp(
            *call.arguments([value(one) for one in tensors], order),  # type: ignore[union-attr]
            **call.attributes,
            **kinds("output", call.outputs),
            training_mode=int(number in self._with_backward),
            _domain=MS,
            _version=1,
            _outputs=1 + len(call.outputs),
        )
        context, *given = typed_context((made,) if isinstance(made, ir.Value) else made)
        if number not in self._with_backward:
            release_context(self._op, context)
        results = as_declared(self._op, given, [torch.empty((), dtype=r.dtype, device="meta") for r in call.site.behaviour.outputs], call.outputs)
        return [*results, context], context

    def _tangents(self, graph: fx.Graph) -> dict[Any, frozenset[int]]:
        """For each node, which of the backward's tangents it depends on."""
        if not self._reach:
            self._reach.update(reach([node for node in graph.nodes if node.op == "call_function"], tangents_of(graph)))
        return self._reach

    def _backward(self, node: fx.Node, value: Callable[[Any], Any], order: ir.Value) -> tuple[list[ir.Value | None], ir.Value]:
        gradients, handle, kept, _, number = node.args
        call = self._calls[number]  # type: ignore[index]
        call.present = [one is not None for one in gradients]  # type: ignore[union-attr]
        call.tangents = [self._tangents(node.graph).get(one, frozenset()) for one in gradients]  # type: ignore[union-attr]
        call.run_by = run_by(node)
        arriving = [*(value(one) for one in gradients if one is not None), *(value(one) for one in kept), order]  # type: ignore[union-attr]
        fakes = [*node.meta["val"], torch.empty((), dtype=torch.int64, device="meta")]
        outputs = [declared(fake.dtype, fake.dim()) for fake in fakes]
        made = self._op.PythonOpGrad(
            value(handle),
            *arriving,
            func_name=call.name,
            **kinds("input", [_kind_of(one) for one in arriving]),
            **kinds("output", outputs),
            output_convention="d" * len(outputs),
            output_tensor_requires_grads=ir.AttrInt64s("output_tensor_requires_grads", [1] * len(outputs)),
            comment=f"{call.site.cls.__qualname__}.backward: {sum(call.present)} gradients in, {len(outputs) - 1} out",
            _domain=MS,
            _version=1,
            _outputs=len(outputs),
        )
        made = (made,) if isinstance(made, ir.Value) else tuple(made)
        results = as_declared(self._op, made, fakes, outputs)
        return results[:-1], made[-1]


class FunctionCall(PythonCall):
    """One call of a Function in a graph: the attributes of its nodes, and what they run.

    Attributes:
        site: The call in the traced program.
        tangents: For each of them, the backward's tangents that its gradient depends on.
        run_by: Those by which autograd runs its backward where none of them has a gradient (`splitting.dependencies`).
        present: For each tensor result, whether the backward's node gets a gradient.
        reads: Where the site's tensors and integers stand among the arguments of the forward's node.
        inputs: For each of the site's tensors that is an input of the graph, which one, where its backward may ask autograd for gradients.
    """

    def __init__(self, site: Site, ints: Sequence[Any]) -> None:
        super().__init__(f"{site.name}#{next(_names)}", site.name, None)
        self.site, self.present = site, [True] * len(site.behaviour.tensors)
        self.reads: list[int] = []
        self.inputs: dict[int, int] = {}
        self.tangents: list[frozenset[int]] = []
        self.run_by: frozenset[int] = frozenset()
        self.attributes: dict[str, Any] = {}
        # ONNX Runtime asks for a result: what returns numbers only gives the one that nobody reads.
        self.outputs = [declared(result.dtype, len(result.shape)) for result in site.behaviour.outputs] or [declared(_NOTHING.dtype, 0)]
        self._ints = [value if isinstance(value, int) else None for value in ints]
        self._symbolic = [value for value in ints if not isinstance(value, int)]
        self._arriving = [(i, dtype) for i, (_, dtype, _) in enumerate(site.inputs) if _is_carried(dtype)]
        self._all_plain = not any(_is_carried(result.dtype) for result in site.behaviour.tensors)
        self._leaving = [i for i, result in enumerate(site.behaviour.outputs) if _is_carried(result.dtype)]

    def arguments(self, tensors: Sequence[ir.Value], order: ir.Value) -> list[ir.Value]:
        """The inputs of the forward's node; sets the attributes that say what each is."""
        values, self.reads, attributes = _arguments(self.site, tensors, self._symbolic, order)
        self.attributes = {"func_name": self.name, **attributes, **kinds("input", map(_kind_of, values)), "comment": _comment(self.site)}
        return values

    # -- what runs

    def forward(self, run: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The forward, on tensors as ONNX carries them. `run` is the runtime's state of a forward, None where it has no arguments of the graph."""
        site = self.site
        count = site.tensor_count
        ints: Sequence[Any] = ()
        if self._ints:
            numbers = iter([number_of(tensor) for tensor in tensors[count:]])
            ints = [next(numbers) if value is None else value for value in self._ints]
            del tensors[count:]
        for i, dtype in self._arriving:
            tensors[i] = from_carrier(tensors[i], dtype)
        given = {i: run.given[place] for i, place in self.inputs.items()} if self.inputs and run is not None else None
        follows = run is not None and run.follows
        outputs, pending = function_run.forward(site, tensors, ints, keep=follows, given=given)
        if follows:
            run.pending[site.id] = pending
        for i in self._leaving:
            outputs[i] = to_carrier(outputs[i])
        return outputs or [_NOTHING]

    def backward(self, run: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The backward: takes the gradients that are there, gives those that the site announces."""
        gradients: Sequence[torch.Tensor | None] = tensors
        if not self._all_plain or len(tensors) != len(self.present):
            arrived = iter(tensors)
            results = zip(self.present, self.site.behaviour.tensors)
            gradients = [from_carrier(next(arrived), result.dtype) if present else None for present, result in results]
        reached, pending = True, run.pending.pop(self.site.id)
        if run.undefined:  # autograd has no gradient there, and zeros only because AOTAutograd asks for them
            gradients = [None if needs and needs <= run.undefined else one for one, needs in zip(gradients, self.tangents)]
            reached = any(one is not None for one in gradients) or not self.run_by <= run.undefined
        made = function_run.backward(self.site, pending, gradients) if reached else function_run.unreached(self.site, pending)
        for i, gradient in enumerate(made):
            if _is_carried(gradient.dtype):
                made[i] = to_carrier(gradient)
        made.append(_NOTHING)
        return made


def _is_carried(dtype: torch.dtype) -> bool:
    """Whether ONNX carries such a tensor as one of another dtype."""
    kind = carrier(dtype)
    return dtype == torch.bool or dtype.is_complex or kind is None or not kind.native


def _kind_of(value: ir.Value) -> tuple[Carrier, int]:
    assert value.dtype is not None and value.shape is not None
    return Carrier(value.dtype), value.shape.rank()


# -- arguments


def _arguments(
    site: Site, tensors: Sequence[ir.Value], ints: Sequence[ir.Value], order: ir.Value
) -> tuple[list[ir.Value], list[int], dict[str, Any]]:
    """The node's inputs; where tensors and integers of the site stand among its arguments; the attributes that say what each argument is."""
    convention, values, requires = "", [], []
    lists: dict[str, list[Any]] = {}
    places: dict[int, int] = {}
    for position, argument in enumerate(site.template):
        if isinstance(argument, Slot) and argument.kind == "tensor":
            places[argument.index] = position
            values.append(tensors[argument.index])
            requires.append(int(site.needs[position]))
            convention += "d"
        else:
            _constant(argument, position, lists)
            requires.append(0)
            convention += "c"
    for index, value in enumerate((*tensors, *ints)):
        if index not in places:
            places[index] = len(convention)
            values.append(value)
            requires.append(0)
            convention += "d"
    values.append(order)
    attributes = {key: ir.AttrFloat32s(key, found) if key.startswith("input_float") and "pos" not in key and "begin" not in key
                  else ir.AttrInt64s(key, found) for key, found in lists.items()}  # fmt: skip
    attributes["input_requires_grads"] = ir.AttrInt64s("input_requires_grads", [*requires, 0])
    return values, [places[i] for i in range(len(tensors) + len(ints))], {"input_convention": convention + "d", **attributes}


def _constant(argument: Any, position: int, lists: dict[str, list[Any]]) -> None:
    """Writes one constant argument into the attributes."""
    for kind, name, convert in _TYPED:
        if type(argument) is kind and (kind is not int or argument in _INT64):
            lists.setdefault(f"input_{name}_scalars", []).append(convert(argument))
            lists.setdefault(f"input_{name}_scalar_positions", []).append(position)
            return
        if type(argument) is tuple and argument and all(type(part) is kind and (kind is not int or part in _INT64) for part in argument):
            parts = lists.setdefault(f"input_{name}_tuples", [])
            lists.setdefault(f"input_{name}_tuple_begins", []).append(len(parts))
            lists.setdefault(f"input_{name}_tuple_positions", []).append(position)
            parts.extend(map(convert, argument))
            return
    lists.setdefault("input_pointer_scalars", []).append(id(argument))  # the site keeps it alive
    lists.setdefault("input_pointer_scalar_positions", []).append(position)


def _comment(site: Site) -> str:
    """The call for people: the class and what each argument is."""
    return f"{site.cls.__qualname__}({', '.join(_kind(argument) for argument in site.template)})"


def _kind(argument: Any) -> str:
    if isinstance(argument, Slot):
        return argument.kind
    if isinstance(argument, Reference):
        return type(argument.value()).__name__
    text = repr(argument) if isinstance(argument, (bool, int, float, str, tuple, type(None))) else ""
    return text if 0 < len(text) <= 40 and "Slot(" not in text and " at 0x" not in text else type(argument).__name__
