"""One call `Fn.apply(...)` in a traced program: which class, which arguments, what comes out; and how its Python runs."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

_ids = itertools.count(1)
# A site lives as long as the graph that calls it: the traced graph, or the session that was made of it.
SITES: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands in an argument template for what the graph computes.

    Attributes:
        kind: `"tensor"`, `"int"` (a symbolic integer), or `"float"` (a Python float that travels as a 0-d tensor).
        index: Which of the tensors (for `"float"` as well), or which of the integers.
    """

    kind: str
    index: int


@dataclasses.dataclass(frozen=True)
class Reference:
    """Stands in an argument template for an object that a guard of Dynamo's looks for where the user has it: the call must not keep it alive.

    A process group that compiled code kept would be there when the process ends, long after `destroy_process_group`.

    Attributes:
        target: To the object.
    """

    target: weakref.ref[Any]

    @classmethod
    def to(cls, value: Any) -> Any:
        """A reference; the object itself where Python has no weak references to it (numbers, tuples, ...)."""
        try:
            return cls(weakref.WeakMethod(value) if isinstance(value, types.MethodType) else weakref.ref(value))
        except TypeError:
            return value

    def value(self) -> Any:
        """The object.

        Raises:
            ReferenceError: it is gone, though the code that got it runs: only without the guard.
        """
        value = self.target()
        if value is None:
            raise ReferenceError("an object that an autograd.Function was compiled with is gone: a guard on it was filtered out")
        return value


@dataclasses.dataclass(frozen=True)
class TensorResult:
    """What is known of a tensor that the Function returns. Sizes may be symbolic."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorResult:
        """Describes a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def fits(self, shape: torch.Size) -> bool:
        """Whether a tensor of that shape is what is known: symbolic sizes may be anything."""
        if shape == self.shape:
            return True
        return len(shape) == len(self.shape) and not any(type(known) is int and known != size for known, size in zip(self.shape, shape))

    def empty(self, shape: Sequence[Any]) -> torch.Tensor:
        """A tensor like it, of another shape."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """What a Function does with arguments of some kind, found out before it runs.

    Attributes:
        results: What `forward` returns: a `TensorResult` for each tensor, anything else as it is.
        single: Whether that is one result, not a tuple of them.
        kept_inputs: Indices of tensors that the backward may read the memory of.
        kept_outputs: Likewise of tensor results.
        non_differentiable: Indices of tensor results that have no gradient.
        gradients: For each tensor, whether the backward gives a gradient.
        is_random: Whether the forward draws from a random generator.
        mutated: Indices of tensors that it writes to.
        dirty: Those of them that it marks as dirty.
        written: What they are afterwards.
        returned: For each tensor result, the index of the tensor it is, if it is one of these.
        last: For each tensor result, the last place at which it is returned: autograd knows a tensor that is returned twice by that one
            (an argument that the Function does not write to is a new tensor at each).
        goes_by_tensors: Whether its backward may ask which tensors it got: it asks autograd for gradients, or reads or sets attributes of theirs.
        told_by: What of the author's says it (`"register_fake"` or `"infer_shape"`), where it was not found out.
    """

    results: tuple[Any, ...]
    single: bool
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    non_differentiable: frozenset[int]
    gradients: tuple[bool, ...]
    is_random: bool = False
    mutated: tuple[int, ...] = ()
    dirty: tuple[int, ...] = ()
    written: tuple[TensorResult, ...] = ()
    returned: tuple[int | None, ...] = ()
    last: tuple[int, ...] = ()
    goes_by_tensors: bool = True
    told_by: str = ""

    @property
    def outputs(self) -> list[TensorResult]:
        """The results that are tensors, then the new values of the tensors that it writes to."""
        return [*self.tensors, *self.written]

    @property
    def tensors(self) -> list[TensorResult]:
        """The results that are tensors."""
        return [result for result in self.results if isinstance(result, TensorResult)]


class Context(FunctionCtx):
    """What the user's `forward` and `backward` get as `ctx`."""

    _forward_cls: type
    needs_input_grad: tuple[bool, ...] = ()
    materialize_grads = True
    to_save: Any = ()  # as `FunctionCtx` names what its methods are given
    non_differentiable: Any = ()
    dirty_tensors: Any = ()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What `save_for_backward` was given."""
        return tuple(self.to_save or ())

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        """The old name of `saved_tensors`."""
        return self.saved_tensors

    def name(self) -> str:
        """As a node of autograd's graph names itself."""
        return type(self).__name__


_context_types: weakref.WeakKeyDictionary[type, type[Context]] = weakref.WeakKeyDictionary()


def context_type(cls: type) -> type[Context]:
    """The type of a Function's `ctx`, named as PyTorch names it."""
    made = _context_types.get(cls)
    if made is None:
        of = weakref.ref(cls)  # the type must not hold the class, whose entry in the table would then never go
        members = {"_forward_cls": property(lambda self: of())}
        made = _context_types[cls] = type(f"{cls.__name__}Backward", (Context,), members)
    return made


class Site:
    """One call of a Function.

    Attributes:
        id: Its number in `SITES`.
        cls: The class. Its `forward` and `backward` are looked up at every run, as PyTorch does.
        template: The arguments of `apply`, with a `Slot` for each tensor and symbolic number, and a `Reference` for objects of the user's;
            containers may hold both as well.
        needs: For each argument of `apply`, what `ctx.needs_input_grad` says.
        differentiable: For each tensor, the argument that it is, where a gradient can go; None for tensors inside containers.
        autocast: Device type and dtype of each autocast region around the call.
        behaviour: What the call does; set once it is known.
        signature: The sizes for which it is known.
        inputs: Rank, dtype and device of each tensor.
        requiring: The tensors that require grad.
        repeated: For a tensor that it gets several times, the other places.
        originals: For each tensor the caller's own, while it is compiled, where the caller gives it.
    """

    def __init__(self, cls: type, template: tuple[Any, ...], needs: tuple[bool, ...], autocast: tuple[tuple[str, torch.dtype], ...] = ()) -> None:
        self.id = next(_ids)
        self.cls = cls
        self.template = template
        self.needs = needs
        self.autocast = autocast
        self.behaviour: Behaviour
        self.signature: tuple[Any, ...] = ()
        self.inputs: tuple[tuple[int, torch.dtype, torch.device], ...] = ()
        self.repeated: dict[int, tuple[int, ...]] = {}
        self.originals: tuple[weakref.ref[torch.Tensor] | None, ...] = ()
        self.context_type = context_type(cls)
        slots = [leaf for leaf in pytree.tree_leaves(template, is_leaf=stands_for) if isinstance(leaf, Slot)]
        self.tensor_count = sum(slot.kind != "int" for slot in slots)
        places = {arg.index: i for i, arg in enumerate(template) if isinstance(arg, Slot) and arg.kind == "tensor"}
        self.differentiable = tuple(places.get(i) for i in range(self.tensor_count))
        self.requiring = [i for i in range(self.tensor_count) if self.needs_gradient(i)]
        self._plain = [(i, arg.index) for i, arg in enumerate(template) if isinstance(arg, Slot) and arg.kind == "tensor"]
        plain = {position for position, _ in self._plain}
        self._other = [i for i, arg in enumerate(template) if i not in plain and any(map(stands_for, pytree.tree_leaves(arg, is_leaf=stands_for)))]
        SITES[self.id] = self

    def again(self) -> Site:
        """The same call at another place of the program."""
        made = copy.copy(self)
        made.id = next(_ids)
        SITES[made.id] = made
        return made

    @property
    def name(self) -> str:
        """The qualified name of the class."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def callers_own(self) -> list[torch.Tensor]:
        """Those of its tensors that the caller gives it, while it is compiled."""
        return [tensor for one in self.originals if one is not None and (tensor := one()) is not None]

    def argument_of(self, index: int) -> int:
        """The place of tensor `index`; for one in a container that is an argument as well, the place as which it is that."""
        if self.differentiable[index] is not None:
            return index
        return next((i for i in self.repeated.get(index, ()) if self.differentiable[i] is not None), index)

    def needs_gradient(self, index: int) -> bool:
        """Whether tensor `index` is one that a gradient goes to."""
        place = self.differentiable[index]
        return place is not None and self.needs[place]

    def arguments(self, tensors: Sequence[Any], ints: Sequence[Any]) -> list[Any]:
        """The arguments of `apply`, as the caller wrote them."""
        arguments = list(self.template)
        for position, index in self._plain:
            arguments[position] = tensors[index]
        for position in self._other:
            arguments[position] = pytree.tree_map(lambda leaf: _filled(leaf, tensors, ints), arguments[position], is_leaf=stands_for)
        return arguments

    # -- the user's Python

    def forward(self, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> tuple[Context, Any]:
        """Runs the user's forward: its `ctx`, and what it returned."""
        ctx = self.context_type()
        ctx.needs_input_grad = self.needs
        if self.autocast or torch.is_grad_enabled():
            with torch.no_grad(), self._autocast():
                return ctx, self._call_forward(ctx, self.arguments(tensors, ints))
        return ctx, self._call_forward(ctx, self.arguments(tensors, ints))

    def _call_forward(self, ctx: Context, arguments: list[Any]) -> Any:
        cls: Any = self.cls
        if cls.setup_context is torch.autograd.Function.setup_context:
            return cls.forward(ctx, *arguments)
        results = cls.forward(*arguments)
        cls.setup_context(ctx, tuple(arguments), results)
        return results

    def backward(self, ctx: Context, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Runs the user's backward. Takes one gradient or None for each result of the forward, gives one for each argument.

        Raises:
            RuntimeError: their number is wrong.
        """
        cls: Any = self.cls
        function = cls.vjp if cls.vjp is not torch.autograd.Function.vjp else cls.backward
        if torch.is_grad_enabled():
            with torch.no_grad():
                made = function(ctx, *gradients)
        else:
            made = function(ctx, *gradients)
        made = made if isinstance(made, tuple) else (made,)
        count = len(self.template)
        if len(made) < count or any(extra is not None for extra in made[count:]):
            raise RuntimeError(f"function {type(ctx).__name__} returned an incorrect number of gradients (expected {count}, got {len(made)})")
        return made[:count]

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield


def _filled(leaf: Any, tensors: Sequence[Any], ints: Sequence[Any]) -> Any:
    if isinstance(leaf, Reference):
        return leaf.value()
    if not isinstance(leaf, Slot):
        return leaf
    if leaf.kind == "int":
        return ints[leaf.index]
    return float(tensors[leaf.index]) if leaf.kind == "float" else tensors[leaf.index]


def stands_for(value: Any) -> bool:
    """Whether a leaf of an argument template stands for the argument, which only a call knows."""
    return isinstance(value, (Slot, Reference))


def held_tensors(ctx: Context) -> list[torch.Tensor]:
    """Every tensor that a `ctx` holds: saved for the backward, and in its attributes."""
    held = [tensor for tensor in ctx.to_save or () if tensor is not None]
    for key, value in vars(ctx).items():
        if isinstance(value, torch.Tensor):
            held.append(value)
        elif isinstance(value, (list, tuple, dict)) and key not in _OWN:
            held.extend(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return held


def kept_of(
    ctx: Context, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = (), stand_ins: Sequence[torch.Tensor] = ()
) -> tuple[int, ...]:
    """Which of `tensors` have memory that the backward may read: what a `ctx` holds, in tensors, `stand_ins` among them, or in numpy's arrays,
    and what something else than these and the `others` holds. All, where a `ctx` has objects that may have an array inside.

    Fake tensors have no memory, and no arrays: what else holds one is seen when the forward runs.
    """
    held = [*held_tensors(ctx), *stand_ins]
    addresses = {tensor.untyped_storage()._cdata for tensor in held}
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return tuple(i for i, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata in addresses)
    leaves = [leaf for key, value in vars(ctx).items() if key not in _OWN for leaf in pytree.tree_leaves(value)]
    if not all(isinstance(leaf, _TRANSPARENT) for leaf in leaves):
        return tuple(range(len(tensors)))
    arrays = [leaf.ctypes.data for leaf in leaves if isinstance(leaf, np.ndarray)]
    known = collections.Counter(one.untyped_storage()._cdata for one in {id(one): one for one in (*tensors, *others, *held)}.values())
    kept = []
    for i, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        foreign = torch._C._storage_Use_Count(storage._cdata) - 1 > known[storage._cdata]  # `storage` is one of the uses (read in torch 2.13)
        in_array = any(0 <= address - storage.data_ptr() < storage.nbytes() for address in arrays)
        if foreign or in_array or storage._cdata in addresses:
            kept.append(i)
    return tuple(kept)


_TRANSPARENT = (torch.Tensor, np.ndarray, np.generic, bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device, torch.SymInt)
# What a ctx has of its own beside the user's attributes.
_OWN = {"to_save", "needs_input_grad", "non_differentiable", "dirty_tensors", "materialize_grads"}


def replace_held(ctx: Context, replacement: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Puts `replacement(tensor)` in the place of every tensor that a `ctx` holds."""
    swap = lambda value: pytree.tree_map_only(torch.Tensor, replacement, value)  # noqa: E731
    if ctx.to_save:
        ctx.to_save = swap(tuple(ctx.to_save))
    attributes: Mapping[str, Any] = vars(ctx)
    for key in [key for key in attributes if key not in _OWN]:
        setattr(ctx, key, swap(attributes[key]))
