"""FX nodes that run by PyTorch's kernel itself, inside the session, on the same memory: `org.pytorch.aten::ATen` on the CPU,
`com.microsoft::TritonOp` on a CUDA device, and `com.microsoft::PythonOp` elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.call_orders import Order, call_orders, laid_out, read_back
from ort_backend.lowering.carriers import AS_THEY_ARE, arrival, departure, number_of
from ort_backend.lowering.constants import constant
from ort_backend.lowering.dtypes import Carrier, carrier
from ort_backend.lowering.kernels import dense_products, faster_calls, fused_attention
from ort_backend.lowering.kernels.device_kernels import FASTER_ON_DEVICE
from ort_backend.lowering.kernels.given_memory import Empty, into_given_memory
from ort_backend.lowering.kernels.kernel_table import FASTER_IN_PYTORCH
from ort_backend.lowering.kernels.operator_class import NORMALIZATIONS
from ort_backend.target import ATEN, ATEN_DOMAIN, RELEASE, TRITON

MS = "com.microsoft"
_UNUSED = -1
_names = itertools.count()

_CHOSEN_FOR_SPEED = {key.split()[0] for key in FASTER_IN_PYTORCH}
_IN_THEIR_PLACE = {*dense_products.IMPLEMENTATIONS.values(), *faster_calls.IMPLEMENTATIONS.values()}

_FOR_DEVICES = {*FASTER_ON_DEVICE, *fused_attention.KERNELS, *NORMALIZATIONS, torch.ops.aten._log_softmax.default, torch.ops.aten._softmax.default}


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a tensor or symbolic number stands in the flattened arguments, and how it arrives."""

    position: int
    dtype: torch.dtype | None  # None: a number
    order: Order = None  # in which its dimensions arrive

    @property
    def arrival(self) -> Callable[[torch.Tensor], Any] | None:
        """What makes the argument of the tensor that arrives; None where that is the argument."""
        return number_of if self.dtype is None else arrival(self.dtype, self.order)


@dataclasses.dataclass
class PythonCall:
    """A callable behind one node.

    Attributes:
        name: The node's `operator` or `func_name`, unique in the process.
        title: What a person calls it, such as `aten::sort`.
        function: Takes the node's input tensors as ONNX carries them (contiguous, complex as pairs), returns its output tensors likewise.
            The dimensions of both are in the order in which they lie in memory (`call_orders`).
            None for a user's autograd.Function, which has a backward as well (`function_op`).
        allocates: Whether `function` takes, in front of the tensors, what makes a tensor for its result (`given_memory.Empty`).
        op_type: The node's.
        recipe: What `function` does, for code that does the same with less Python around it (`merged_calls`); None where nothing tells.
    """

    name: str
    title: str
    function: Callable[..., Sequence[torch.Tensor]] | None
    allocates: bool = False
    op_type: str = "PythonOp"
    recipe: Recipe | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A call of `target` whose results are new memory.

    Attributes:
        target: What is called.
        args: Its arguments, in which a `Slot` stands for a tensor or number that arrives.
        kwargs: Likewise.
        slots: Those in the order in which they arrive.
        results: Of each result that the node has: its number among `target`'s (None: it is the only one), its dtype, in which order it is given.
            The dtype is None where it is no tensor, or one that ONNX carries in another way than as it is.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: tuple[Slot, ...]
    results: tuple[tuple[int | None, torch.dtype | None, Order], ...]


_NAME_OF_CALLABLE = {TRITON: "func_name", ATEN: "operator"}


def callable_of(node: ir.Node) -> str | None:
    """The name of the callable behind a node that calls PyTorch; None for other nodes."""
    attribute = _NAME_OF_CALLABLE.get(node.op_type)
    return None if attribute is None else node.attributes[attribute].as_string()


def unique_name(title: str) -> str:
    """A name for a callable that no other in this process has."""
    return f"{title}#{next(_names)}"


def make_call(
    target: Callable[..., Any],
    title: str,
    spec: Any,
    constants: list[Any],
    slots: list[Slot],
    results: list[Any],
    orders: list[Order],
    op_type: str = ATEN,
) -> PythonCall:
    """The callable that fills `slots` of the flattened arguments, runs `target`, and gives back its tensors as ONNX carries them.

    Each step calls it between large products, which leave nothing of it in the processor's caches: what little it does beside `target` counts.

    `results` are `target`'s as fake values. The node has an output for those that are not None; an operator may return None there (an unused
    workspace), and gives it with its dimensions in the order that `orders` has for it. On a device (`op_type`) no call takes memory for its result.
    """
    fill = _filler(spec, constants, slots)
    departures = [
        (i, departure(value.dtype if isinstance(value, torch.Tensor) else None, orders[i])) for i, value in enumerate(results) if value is not None
    ]
    is_fresh = _returns_new_memory(target)
    recipe = _recipe(target, spec, constants, slots, results, orders) if is_fresh else None
    if op_type != TRITON and len(results) == 1 and (into := into_given_memory(target, results[0])) is not None:
        function = functools.partial(_run_into, into, fill, departures[0][1])
        return PythonCall(unique_name(title), title, function, allocates=True, recipe=recipe)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = fill(tensors)
        result = target(*args, **kwargs)
        made = result if isinstance(result, (tuple, list)) else (result,)
        carried = [depart(made[i]) for i, depart in departures]
        if is_fresh:
            return carried
        # ONNX Runtime may reuse the memory of an input, so that an output must not be a view of it.
        mine = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return [_own(one, mine) for one in carried]

    return PythonCall(unique_name(title), title, run, recipe=recipe)


def _recipe(target: Callable[..., Any], spec: Any, constants: list[Any], slots: list[Slot], results: list[Any], orders: list[Order]) -> Recipe | None:
    args, kwargs = _with_slots(spec, constants, slots)
    if sum(map(_slots_in, (*args, *kwargs.values()))) != len(slots):  # some stand elsewhere, or nowhere
        return None
    is_one = len(results) == 1
    made = tuple((None if is_one else i, _dtype_as_it_is(value), orders[i]) for i, value in enumerate(results) if value is not None)
    return Recipe(target, tuple(args), kwargs, tuple(slots), made)


def _with_slots(spec: Any, constants: list[Any], slots: list[Slot]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Positional and named arguments, in which slots stand for what arrives."""
    leaves = list(constants)
    for slot in slots:
        if slot.position != _UNUSED:
            leaves[slot.position] = slot
    return torch.utils._pytree.tree_unflatten(leaves, spec)


def _slots_in(argument: Any) -> int:
    """How many there are, also in lists."""
    return sum(map(_slots_in, argument)) if type(argument) is list else isinstance(argument, Slot)


def _dtype_as_it_is(result: Any) -> torch.dtype | None:
    """Of a tensor that is its own carrier if it is contiguous: with elements, of a dtype that ONNX has."""
    if not isinstance(result, torch.Tensor) or result.dtype not in AS_THEY_ARE:
        return None
    return result.dtype if all(isinstance(size, int) and size > 0 for size in result.shape) else None


def _run_into(
    into: Callable[..., torch.Tensor], fill: Callable[..., Any], depart: Callable[[Any], torch.Tensor], empty: Empty, *tensors: torch.Tensor
) -> list[torch.Tensor]:
    args, kwargs = fill(tensors)
    return [depart(into(empty, *args, **kwargs))]


def _filler(spec: Any, constants: list[Any], slots: list[Slot]) -> Callable[[Sequence[torch.Tensor]], tuple[Sequence[Any], dict[str, Any]]]:
    """Puts tensors into their slots among the constants: positional and named arguments.

    `tree_unflatten` walks over every leaf; it does so once where every slot is a positional argument of its own, and in each call where not.
    """
    args, kwargs = _with_slots(spec, constants, slots)
    places = [i for i, argument in enumerate(args) if isinstance(argument, Slot)]
    arrivals = [slot.arrival for slot in slots]

    def by_position(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        filled = list(args)
        for place, arrive, tensor in zip(places, arrivals, tensors):
            filled[place] = tensor if arrive is None else arrive(tensor)
        return filled, kwargs

    def anywhere(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        flat = list(constants)
        for slot, arrive, tensor in zip(slots, arrivals, tensors, strict=True):
            if slot.position != _UNUSED:
                flat[slot.position] = tensor if arrive is None else arrive(tensor)
        return torch.utils._pytree.tree_unflatten(flat, spec)

    return by_position if len(places) == len(slots) else anywhere


def _returns_new_memory(target: Any) -> bool:
    """Whether a result is never an argument or a view of one: so of those that are chosen for their speed.

    A schema does not tell: `aten::_conj_physical`, which has none of a view, returns a real argument itself.
    """
    return str(target) in _CHOSEN_FOR_SPEED or target in _IN_THEIR_PLACE or inspect.unwrap(target) in _FOR_DEVICES


def ordered(target: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """`target` with one more argument in front, which it ignores, and one more result, a 0-d int64: links that force an order on calls."""

    def call(before: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        result = target(*args, **kwargs)
        return (*(result if isinstance(result, (tuple, list)) else (result,)), torch.zeros((), dtype=torch.int64, device="cpu"))

    call.__wrapped__ = target  # type: ignore[attr-defined]
    return call


def waited(target: Callable[..., Any]) -> Callable[..., Any]:
    """A functional collective that ends when its result is there.

    PyTorch knows a result that is under way by its memory, and would not know it again behind the session.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        result = target(*args, **kwargs)
        wait = torch.ops._c10d_functional.wait_tensor
        return [wait(one) for one in result] if isinstance(result, (tuple, list)) else wait(result)

    return call


def _own(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    return tensor.clone() if tensor.numel() and tensor.untyped_storage().data_ptr() in taken else tensor


def write_python_op(
    op: Any, target: Callable[..., Any], title: str, args: tuple[Any, ...], kwargs: dict[str, Any], fake: Any, fakes: Sequence[Any]
) -> tuple[list[Any], PythonCall]:
    """Writes a node that calls `target(*args, **kwargs)`.

    Args:
        op: The builder.
        target: What to call with torch tensors.
        title: Its name for people, also in the dumped graph.
        args: Arguments in which tensors and symbolic numbers are `ir.Value`.
        kwargs: Likewise.
        fake: The node's fake result: a tensor, or a sequence of tensors, numbers, None, and sequences of those.
        fakes: The fake value of every `ir.Value` among the flattened arguments, in order.

    Returns:
        One value for each result (None where the fake result is None, a list where it is a sequence), and the callable to register.
    """
    results = list(fake) if isinstance(fake, (tuple, list)) else [fake]
    if any(isinstance(one, (tuple, list)) for one in results):
        values, call = write_python_op(op, _flat(target), title, args, kwargs, torch.utils._pytree.tree_leaves(results), fakes)
        return _nested(iter(values), results), call
    flat, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    places = [position for position, argument in enumerate(flat) if isinstance(argument, ir.Value)]
    values = [flat[position] for position in places]
    given, orders = call_orders(target, values, fakes, results, on_cpu=op.builder.call_type == ATEN)
    values = [laid_out(op, value, order) for value, order in zip(values, given, strict=True)]
    dtypes = [like.dtype if isinstance(like, torch.Tensor) else None for like in fakes]
    slots = [Slot(*one) for one in zip(places, dtypes, given, strict=True)]
    if not values:  # a PythonOp has at least one input, and of nothing but constants ONNX Runtime would take one for all steps
        values.append(constant(op, 0, ir.DataType.INT64))
        slots.append(Slot(_UNUSED, None))
    constants = [None if isinstance(argument, ir.Value) else argument for argument in flat]
    call = make_call(target, title, spec, constants, slots, results, orders, op.builder.call_type)
    outputs = [_output_of(value) for value in results if value is not None]
    if op.builder.call_type == ATEN and outputs:
        call.op_type = ATEN
        made = op.ATen(*values, operator=call.name, overload_name="", _domain=ATEN_DOMAIN, _version=1, _outputs=len(outputs))
        return _read(op, as_declared(op, [made] if isinstance(made, ir.Value) else made, results, outputs), orders), call
    if op.builder.call_type == TRITON and outputs:
        call.op_type = TRITON
        made = op.TritonOp(*values, func_name=call.name, _domain=MS, _version=1, _outputs=len(outputs))
        return _read(op, as_declared(op, [made] if isinstance(made, ir.Value) else made, results, outputs), orders), call
    made = op.PythonOp(*values, _domain=MS, _version=1, _outputs=1 + len(outputs), **_attributes(call, values, outputs))
    context, *made = typed_context((made,) if isinstance(made, ir.Value) else made)
    release_context(op, context)
    return _read(op, as_declared(op, made, results, outputs), orders), call


def _flat(target: Callable[..., Any]) -> Callable[..., list[Any]]:
    """`target` with all results in one list, also those that are in lists among them."""

    def call(*args: Any, **kwargs: Any) -> list[Any]:
        return torch.utils._pytree.tree_leaves(target(*args, **kwargs))

    call.__wrapped__ = target  # type: ignore[attr-defined]
    return call


def _nested(values: Iterator[Any], results: Sequence[Any]) -> list[Any]:
    """The values in lists where the results are."""
    return [_nested(values, one) if isinstance(one, (tuple, list)) else next(values) for one in results]


def _read(op: Any, values: Sequence[ir.Value | None], orders: Sequence[Order]) -> list[ir.Value | None]:
    return [None if value is None else read_back(op, value, order) for value, order in zip(values, orders, strict=True)]


def release_context(op: Any, context: ir.Value) -> None:
    """Writes the node behind a `PythonOp` without a backward that gives up the context which ONNX Runtime has kept for one.

    Else each call would leave some bytes behind (1.19.2), and these, between large tensors, keep the C library from using their memory again.
    """
    order = constant(op, 0, ir.DataType.INT64)
    nothing = [(Carrier(ir.DataType.INT64), 0)]
    op.PythonOpGrad(
        context,
        order,
        func_name=RELEASE,
        **kinds("input", nothing),
        **kinds("output", nothing),
        output_convention="d",
        output_tensor_requires_grads=ir.AttrInt64s("output_tensor_requires_grads", [0]),
        comment="releases the context",
        _domain=MS,
        _version=1,
    )


def kinds(prefix: str, found: Iterable[tuple[Carrier, int]]) -> dict[str, Any]:
    """The attributes of a Python node that declare the types and ranks of its tensors."""
    types, ranks, pairs = f"{prefix}_tensor_types", f"{prefix}_tensor_ranks", list(found)
    return {types: ir.AttrInt64s(types, [int(kind.dtype) for kind, _ in pairs]), ranks: ir.AttrInt64s(ranks, [rank for _, rank in pairs])}


def _output_of(value: Any) -> tuple[Carrier, int]:
    """Carrier and rank of one result as the node declares it."""
    if not isinstance(value, torch.Tensor):
        return Carrier(ir.DataType.INT64 if isinstance(value, (int, torch.SymInt)) else ir.DataType.DOUBLE), 0
    return declared(value.dtype, value.dim())


def declared(dtype: torch.dtype, rank: int) -> tuple[Carrier, int]:
    """Carrier and rank of a tensor as a node declares it."""
    kind = carrier(dtype)
    assert kind is not None
    if dtype == torch.bool:  # DLPack hands bool tensors to ONNX Runtime as bytes
        kind = Carrier(ir.DataType.UINT8)
    return kind, rank + len(kind.extra_dims)


def _attributes(call: PythonCall, values: list[ir.Value], outputs: list[tuple[Carrier, int]]) -> dict[str, Any]:
    dtypes = [value.dtype for value in values]
    assert all(dtype is not None for dtype in dtypes)
    return {
        "func_name": call.name,
        "input_convention": "d" * len(values),
        "input_tensor_types": ir.AttrInt64s("input_tensor_types", [int(dtype) for dtype in dtypes]),  # type: ignore[arg-type]
        "input_tensor_ranks": ir.AttrInt64s("input_tensor_ranks", [value.shape.rank() for value in values]),  # type: ignore[union-attr]
        "input_requires_grads": ir.AttrInt64s("input_requires_grads", [0] * len(values)),
        "output_tensor_types": ir.AttrInt64s("output_tensor_types", [int(kind.dtype) for kind, _ in outputs]),
        "output_tensor_ranks": ir.AttrInt64s("output_tensor_ranks", [rank for _, rank in outputs]),
        "training_mode": 0,
        "comment": call.title,
    }


def typed_context(made: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """The outputs of a `PythonOp`, of which the first, the autograd context, gets its type."""
    made[0].type, made[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
    return made


def as_declared(op: Any, made: Sequence[ir.Value], results: list[Any], outputs: list[tuple[Carrier, int]]) -> list[ir.Value | None]:
    """The outputs of a node (without a context) with their types, bool again where they were."""
    remaining = iter(zip(made, outputs, strict=True))
    values: list[ir.Value | None] = []
    for result in results:
        if result is None:
            values.append(None)
            continue
        value, (kind, rank) = next(remaining)
        value.type = ir.TensorType(kind.dtype)
        value.shape = ir.Shape([None] * rank)
        is_bool = isinstance(result, torch.Tensor) and result.dtype == torch.bool
        values.append(op.Cast(value, to=ir.DataType.BOOL) if is_bool else value)
    return values
