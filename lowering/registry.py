"""The table of lowerings: ATen operator -> functions that write ONNX nodes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch

from ort_backend.target import OrtTarget

Promote = Literal["output", "same", "inputs", "bool"]
Function = TypeVar("Function", bound=Callable[..., Any])


class Unsupported(Exception):
    """Raised by a lowering for arguments that it does not express; the next lowering, or `PythonOp`, takes the node."""


@dataclasses.dataclass(frozen=True)
class Lowering:
    """One way to write one operator in ONNX.

    Attributes:
        target: The operator overload; its name (`"library::operator"`) where a package defines it that may not be there.
        function: `function(op, *args, **kwargs)` with `op` an `onnxscript` OpBuilder and the schema's arguments: tensors and
            symbolic numbers as `onnx_ir.Value`, everything else as in the FX graph. Returns one value, or a sequence of values for
            an operator with several results (None for a result that is not computed).
        requires: Operators outside ONNX (`"com.microsoft::GeluGrad"`) that the target must have.
        device: The only kind of device that it is for (`"cpu"`), where kernels there ask for another form; None for any.
        promote: `"output"` casts the tensor arguments to the result's dtype first, `"same"` too if they have one dtype and else leaves the node
            to PyTorch, which refuses several (products), `"inputs"` to their common dtype (comparisons), `"bool"` to bool.
        keep: Names of the arguments that `promote` leaves alone.
        any_dtype: The operator only moves data, so that no dtype needs a cast to compute in.
        whole_storage: Names of the arguments whose memory the operator addresses by strides: the lowering is for tensors that are
            contiguous and all of their storage, so that the memory is the elements in order.
        linear: Where a lowering of real numbers serves complex ones: the arguments whose real parts give the result's real
            part, and whose imaginary parts its imaginary part.
    """

    target: torch._ops.OpOverload | str
    function: Callable[..., Any]
    requires: tuple[str, ...] = ()
    device: str | None = None
    promote: Promote | None = None
    keep: frozenset[str] = frozenset()
    any_dtype: bool = False
    whole_storage: frozenset[str] = frozenset()
    linear: frozenset[str] | None = None


_table: dict[torch._ops.OpOverload | str, list[Lowering]] = {}
# The same for calls with complex tensors, and the operators whose lowerings of real numbers serve those.
_complex: dict[torch._ops.OpOverload, Lowering] = {}
_linear: dict[torch._ops.OpOverload, frozenset[str]] = {}


def register(
    *targets: torch._ops.OpOverload | str,
    requires: tuple[str, ...] = (),
    device: str | None = None,
    promote: Promote | None = None,
    keep: tuple[str, ...] = (),
    any_dtype: bool = False,
    whole_storage: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Registers a function as a lowering of operator overloads, or names of operators of other packages (see `Lowering` for the arguments).

    A lowering with more requirements is tried first, so that a faster kernel stands beside the plain ONNX form; then one for a device.

    Raises:
        TypeError: there is no target, or one is an overload packet (`aten.add`) instead of an overload (`aten.add.Tensor`); names stand in a string
            instead of a tuple; what is decorated cannot be called.
        ValueError: that target already has a lowering with these requirements for this device; `promote` or `device` is none that there is, a name in
            `requires` has no domain, one in `keep` or `whole_storage` is no argument; an operator's name is one that no operator is looked up by.
    """
    _check(targets, device, promote, {"requires": requires, "keep": keep, "whole_storage": whole_storage})

    def add(function: Function) -> Function:
        if not callable(function):
            raise TypeError(f"a lowering is a function from an operator's arguments to ONNX nodes, not {function!r}")
        for target in targets:
            _check_arguments(target, function, {"keep": keep, "whole_storage": whole_storage})
            present = _table.setdefault(target, [])
            if any((lowering.requires, lowering.device) == (requires, device) for lowering in present):
                raise ValueError(f"{target} already has a lowering with requires={requires}" + (f" and device={device!r}" if device else ""))
            present.append(Lowering(target, function, requires, device, promote, frozenset(keep), any_dtype, frozenset(whole_storage)))
            present.sort(key=lambda lowering: (-len(lowering.requires), lowering.device is None))
        return function

    return add


def _check(targets: Sequence[object], device: str | None, promote: str | None, names: Mapping[str, Sequence[str]]) -> None:
    """What `register` can tell before it has the function."""
    for target in targets or (None,):
        if not isinstance(target, torch._ops.OpOverload) and not (isinstance(target, str) and "::" in target):
            raise TypeError(f"a lowering is registered for operator overloads such as torch.ops.aten.add.Tensor, not {target!r}")
        if isinstance(target, str) and (target.startswith(("aten::", "prims::")) or target.endswith(".default")):
            raise ValueError(f"{target!r} would not be found: PyTorch's own operators are given as overloads, and a default overload has no ending")
    for option, given in names.items():
        if not isinstance(given, tuple):
            raise TypeError(f"{option}={given!r} must be a tuple of names")
    for name in names["requires"]:
        if "::" not in name:
            raise ValueError(f"requires has {name!r}, but must name operators with their domain, such as 'com.microsoft::GeluGrad'")
    if promote not in (None, *get_args(Promote)):
        raise ValueError(f"promote={promote!r} must be None or one of {', '.join(map(repr, get_args(Promote)))}")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device={device!r} must be None, 'cpu' or 'cuda'")


def _check_arguments(target: torch._ops.OpOverload | str, function: Callable[..., Any], names: Mapping[str, Sequence[str]]) -> None:
    """Whether the names are arguments: of the operator, or of the function, which several overloads may share."""
    if isinstance(target, str) or not any(names.values()):
        return
    known = {argument.name for argument in target._schema.arguments}
    for option, given in names.items():
        if unknown := set(given) - known - set(inspect.signature(function).parameters):
            raise ValueError(f"{option}={tuple(given)!r} names {min(unknown)!r}, which {target._schema} does not take")


def register_complex(*targets: torch._ops.OpOverload, promote: Promote | None = None, keep: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Registers a function as the lowering of operators where an argument or the result is complex.

    It gets complex tensors as `complex_numbers.Complex`, real ones as `onnx_ir.Value`, and returns likewise; `promote` is about their parts.

    Raises:
        ValueError: a target has such a lowering already.
    """

    def add(function: Function) -> Function:
        for target in targets:
            if target in _complex or target in _linear:
                raise ValueError(f"{target} already has a lowering of complex numbers")
            _complex[target] = Lowering(target, function, promote=promote, keep=frozenset(keep))
        return function

    return add


def register_linear(*targets: torch._ops.OpOverload, linear: tuple[str, ...]) -> None:
    """Says that the lowerings of these operators serve complex tensors, once for the real and once for the imaginary parts.

    Args:
        targets: The operators.
        linear: Names of the arguments (tensors, lists of tensors, numbers) that have such parts. All others are the same for both.

    Raises:
        ValueError: a target has a lowering of complex numbers already.
    """
    for target in targets:
        if target in _complex or target in _linear:
            raise ValueError(f"{target} already has a lowering of complex numbers")
        _linear[target] = frozenset(linear)


def find_complex(target: object, ort: OrtTarget) -> Iterator[Lowering]:
    """The lowerings of `target` for complex numbers, best first; one with `linear` is for their parts."""
    load()
    if not isinstance(target, torch._ops.OpOverload):
        return
    if target in _complex:
        yield _complex[target]
    elif target in _linear:
        for lowering in find(target, ort):
            yield dataclasses.replace(lowering, linear=_linear[target])


def registered_complex() -> tuple[dict[torch._ops.OpOverload, Lowering], dict[torch._ops.OpOverload, frozenset[str]]]:
    """Every lowering of complex numbers by operator, and the operators whose lowerings of real numbers serve them, with their linear arguments."""
    load()
    return dict(_complex), dict(_linear)


def find(target: object, ort: OrtTarget) -> Iterator[Lowering]:
    """The lowerings of `target` that are for `ort`'s device, and that it has the operators for, best first."""
    load()
    if isinstance(target, torch._ops.OpOverload):
        for lowering in _table.get(target, ()) or _table.get(target.name(), ()):
            if lowering.device in (None, ort.device_type) and all(name in ort.contrib_ops for name in lowering.requires):
                yield lowering if lowering.target is target else dataclasses.replace(lowering, target=target)


def registered() -> dict[torch._ops.OpOverload, tuple[Lowering, ...]]:
    """Every registered lowering by operator."""
    load()
    return {target: tuple(lowerings) for target, lowerings in _table.items() if not isinstance(target, str)}


def registered_by_name() -> dict[str, tuple[Lowering, ...]]:
    """Every lowering of an operator that another package defines, by the operator's name."""
    load()
    return {target: tuple(lowerings) for target, lowerings in _table.items() if isinstance(target, str)}


def has_lowerings_of_users(*targets: torch._ops.OpOverload) -> bool:
    """Whether some lowering, of these operators or of any, was registered from outside this package."""
    tables = [_table.get(target, ()) for target in targets] if targets else _table.values()
    functions = (lowering.function for lowerings in tables for lowering in lowerings)
    return any(not str(getattr(function, "__module__", __name__)).startswith(("ort_backend.", "onnxscript.", "functools")) for function in functions)


_loaded = False


def load() -> None:
    """Imports every module of `ort_backend.lowering.ops`, which fills the table."""
    global _loaded
    if not _loaded:
        _loaded = True
        package = importlib.import_module("ort_backend.lowering.ops")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
