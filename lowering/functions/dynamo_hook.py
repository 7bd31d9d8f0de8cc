"""Where Dynamo meets `Fn.apply(...)` in a compile of ours, the Function becomes one opaque call, whatever its Python does.

Everything that reaches into Dynamo for that is in this file (run with torch 2.11.0, 2.12.0, 2.13.0 and 2.15.0, the same in all unless a
line says otherwise): `AutogradFunctionVariable.call_apply` is replaced by a function that acts for our backend only and hands every
other compile, and every call that it cannot take, to the original.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ort_backend.lowering.functions.autograd_function import call
from ort_backend.lowering.functions.function_behaviour import UnknownBehaviour, behaviour_of
from ort_backend.lowering.functions.function_site import Reference, Site, Slot, TensorResult

log = logging.getLogger(__name__)

_original: list[Any] = []


# Frame -> object's source -> the object of its last compile, and how many were freed before that.
_objects: weakref.WeakKeyDictionary[types.CodeType, dict[Any, tuple[Any, int]]] = weakref.WeakKeyDictionary()
# So many compiles for objects that were freed: half of those after which Dynamo would leave the whole frame to eager PyTorch.
_MANY = 4


class _Unresolved(Exception):
    """An argument that is neither computed by the graph nor known while it is traced."""


class _Fleeting(Exception):
    """An argument that is a new object at every call."""


def install(is_ours: Callable[[Any], bool], default: Callable[[Any], str]) -> bool:
    """Puts the hook in place, once.

    Args:
        is_ours: Whether a backend's innermost function is ours.
        default: The value of `autograd_functions` in the options of a compile.

    Returns:
        Whether this torch has the place for it.
    """
    try:
        from torch._dynamo.variables.misc import AutogradFunctionVariable
    except ImportError:
        return False
    if not hasattr(AutogradFunctionVariable, "call_apply"):
        return False
    if _original:
        return True
    original = AutogradFunctionVariable.call_apply
    _original.append(original)

    @functools.wraps(original)
    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        backend, options = innermost(getattr(tx.output, "compiler_fn", None))
        if not is_ours(backend):
            return original(self, tx, args, kwargs)
        made = _opaque(self, tx, args, kwargs) if default(options) == "opaque" else None
        if made is not None:
            return made
        made = original(self, tx, args, kwargs)
        _count_inlined()
        return made

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]
    return True


def is_compiling(is_ours: Callable[[Any], bool]) -> bool:
    """Whether Dynamo is tracing, right now, for a backend of ours."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:  # it is not tracing
        return False
    return is_ours(innermost(getattr(tx.output, "compiler_fn", None))[0])


def uninstall() -> None:
    """Gives Dynamo its own method back."""
    if _original:
        from torch._dynamo.variables.misc import AutogradFunctionVariable

        AutogradFunctionVariable.call_apply = _original.pop()  # type: ignore[method-assign]


def inlined() -> int | None:
    """How many Functions were traced into operators, in the graph that Dynamo is compiling; None where nobody counted."""
    context = torch._guards.TracingContext.try_get()
    return getattr(context, "ort_inlined_functions", None) if _original else None


def _count_inlined() -> None:
    # The context lives as long as one attempt to trace a graph: what an attempt that is given up has counted goes with it.
    context: Any = torch._guards.TracingContext.try_get()
    if context is not None:
        context.ort_inlined_functions = getattr(context, "ort_inlined_functions", 0) + 1


def innermost(backend: Any) -> tuple[Any, Any]:
    """The function behind the wrappers of `torch.compile`, `functools.partial` and Dynamo, and the options that they hand it."""
    options = None
    for _ in range(20):
        keywords = getattr(backend, "kwargs", None) or getattr(backend, "keywords", None)
        if isinstance(keywords, dict):
            options = keywords.get("options", options)
        backend = getattr(backend, "__self__", backend) if isinstance(backend, types.MethodType) else backend  # a method of DDP's splitter
        inner = next((getattr(backend, name) for name in _INNER if getattr(backend, name, None) is not None), None)
        if inner is None:
            return backend, options
        backend = inner
    return backend, options


# Attributes under which a wrapper has what it wraps.
_INNER = ("_torchdynamo_orig_backend", "compiler_fn", "_torchdynamo_orig_callable", "func", "backend_compile_fn", "backend", "__wrapped__")


def _opaque(variable: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The results of an opaque call as Dynamo's variables; None where the original is to take over."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # PyTorch runs no Function there but by its rules for `vmap` and `jvp`
        return _left_inline(variable, "a transform of torch.func surrounds it")
    if kwargs:
        resolved = _positional(variable, args, kwargs)
        if resolved is None:
            return None
        args = resolved
    arguments = _Arguments(tx)
    try:
        template = tuple(map(arguments.template, args))
    except _Unresolved as reason:
        return _left_inline(variable, f"{reason} is not known while it is traced")
    except _Fleeting as reason:
        name = f"{variable.fn_cls.__module__}.{variable.fn_cls.__qualname__}"
        hint = "Keep the object, and use it again; or pass what it holds."
        _break(name, f"autograd.Function {name} gets {reason} that is a new object at every call: it runs in eager PyTorch. {hint}", hint)
    tensors, ints = [_example(proxy) for proxy in arguments.tensors], [_example(proxy) for proxy in arguments.ints]
    if not arguments.tensors:
        return _left_inline(variable, "it takes no tensor")
    needs = tuple(isinstance(arg, Slot) and arg.kind == "tensor" and bool(tensors[arg.index].requires_grad) for arg in template)
    site = Site(variable.fn_cls, template, needs, _autocast())
    site.inputs = tuple((tensor.dim(), tensor.dtype, tensor.device) for tensor in tensors)
    site.signature = tuple(str(size) for tensor in tensors for size in tensor.shape)
    site.repeated = _repeated([proxy.node for proxy in arguments.tensors])
    site.originals = tuple(map(_callers_own, arguments.tensors))
    try:
        site.behaviour = behaviour_of(site, tensors, ints, tx.fake_mode)
    except UnknownBehaviour as unknown:
        _break(site.name, str(unknown), "Write `infer_shape` or `ort_backend.register_fake`, as said above.")
    if not all(isinstance(result, (TensorResult, *_CONSTANTS)) for result in site.behaviour.results):
        return _left_inline(variable, "it returns an object that a graph cannot")
    return _emit(tx, site, arguments)


def _repeated(nodes: Sequence[torch.fx.Node]) -> dict[int, tuple[int, ...]]:
    """For each place of a node that stands at others too, these."""
    places = {i: tuple(j for j, other in enumerate(nodes) if other is node and j != i) for i, node in enumerate(nodes)}
    return {i: others for i, others in places.items() if others}


def _positional(variable: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """All arguments by position, None where Dynamo does not say."""
    resolve = getattr(variable, "_resolve_kwargs", None)  # there since 2.13: before, `apply` takes no keywords
    if resolve is None:
        return None
    if "is_setup_ctx_defined" not in inspect.signature(resolve).parameters:  # 2.13
        return resolve(args, kwargs)
    inherited = torch.autograd.function._SingleLevelFunction.setup_context
    return resolve(args, kwargs, variable.fn_cls.setup_context is not inherited)


_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.SymInt)


def _left_inline(variable: Any, reason: str) -> None:
    log.info("autograd.Function %s is left to Dynamo: %s", variable.fn_cls.__qualname__, reason)
    return None


def _break(name: str, reason: str, hint: str) -> None:
    """Ends the graph in front of the call, which then runs in eager PyTorch."""
    from torch._dynamo import exc

    warnings.warn(reason, stacklevel=2)
    exc.unimplemented(
        gb_type="autograd.Function that cannot be in a graph",
        context=name,
        explanation=reason,
        hints=[hint],
    )


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))


def _example(proxy: Any) -> Any:
    return proxy.node.meta["example_value"]


def _callers_own(proxy: Any) -> weakref.ref[torch.Tensor] | None:
    """The caller's tensor that an input of the graph is; None for what the graph computes."""
    while (outer := getattr(proxy.tracer, "parent", None)) is not None and proxy.node.op == "placeholder":  # of a checkpoint, a branch
        lifted = [one for one, inner in proxy.tracer.lifted_freevars.items() if getattr(inner, "node", None) is proxy.node]
        if not lifted or lifted[0].tracer is not outer:
            return None
        proxy = lifted[0]
    argument = proxy.node.meta.get("grapharg")
    example = None if argument is None else argument.example
    return weakref.ref(example) if isinstance(example, torch.Tensor) and not isinstance(example, FakeTensor) else None


def _emit(tx: Any, site: Site, arguments: _Arguments) -> Any:
    """Puts the call into Dynamo's graph."""
    from torch._dynamo.variables import ConstantVariable, TupleVariable
    from torch._dynamo.variables.builder import wrap_fx_proxy

    proxy = tx.output.create_proxy("call_function", call(site), (*arguments.tensors, *arguments.ints), {})
    made: Any = wrap_fx_proxy(tx, proxy)
    tensors = iter(made.items if site.behaviour.tensors else [])
    items = []
    for result in site.behaviour.results:
        if isinstance(result, TensorResult):
            items.append(next(tensors))
        else:
            items.append(ConstantVariable.create(int(result) if isinstance(result, torch.SymInt) else result))
    return items[0] if site.behaviour.single else TupleVariable(items)


class _Arguments:
    """Sorts the arguments of one call: what the graph computes, and constants."""

    def __init__(self, tx: Any) -> None:
        self.tx = tx
        self.tensors: list[Any] = []
        self.ints: list[Any] = []

    def template(self, variable: Any) -> Any:
        """The argument as a value, with a `Slot` for what the graph computes."""
        from torch._dynamo import variables as v

        variable = variable.realize()
        if isinstance(variable, v.SymNodeVariable):
            return self._number(variable)
        if isinstance(variable, getattr(v, "UnspecializedPythonVariable", ())):
            return variable.unspec_value() if hasattr(variable, "unspec_value") else self._object(variable)
        if isinstance(variable, v.TensorVariable):
            if type(variable.proxy.node.meta["example_value"]).__name__ not in ("FakeTensor", "Parameter"):
                raise _Unresolved(f"a tensor of type {variable.python_type().__name__}")
            self.tensors.append(variable.as_proxy())
            return Slot("tensor", len(self.tensors) - 1)
        if isinstance(variable, v.ConstantVariable):
            return variable.value
        if isinstance(variable, (v.ListVariable, v.TupleVariable)):
            items = [self.template(item) for item in variable.items]
            return self._sequence(variable, items)
        if isinstance(variable, v.ConstDictVariable) and variable.python_type() is dict:
            return {key.vt.as_python_constant(): self.template(value) for key, value in variable.items.items()}
        return self._object(variable)

    def _sequence(self, variable: Any, items: list[Any]) -> Any:
        kind = variable.python_type()
        if kind in (list, tuple):
            return kind(items)
        if kind is torch.Size:
            return torch.Size(items) if all(isinstance(item, int) for item in items) else tuple(items)
        if hasattr(kind, "_fields"):
            return kind(*items)
        raise _Unresolved(f"a {kind.__name__}")

    def _number(self, variable: Any) -> Any:
        example = _example(variable.as_proxy())
        if isinstance(example, torch.SymInt):
            self.ints.append(variable.as_proxy())
            return Slot("int", len(self.ints) - 1)
        if isinstance(example, torch.SymFloat):
            # Dynamo takes a float that changes between calls as a 0-d tensor, and asks it for its number.
            node = variable.as_proxy().node
            if node.op == "call_method" and node.target == "item":
                self.tensors.append(torch.fx.Proxy(node.args[0], variable.as_proxy().tracer))
                return Slot("float", len(self.tensors) - 1)
        return variable.evaluate_expr(self.tx.output)

    def _object(self, variable: Any) -> Any:
        """Any other object, by reference; a guard sees to it that it stays this one."""
        try:
            value = variable.as_python_constant()
        except Exception as error:
            value = getattr(variable, "value", None)
            if value is None and hasattr(variable, "module_key"):
                value = self.tx.output.get_submodule(variable.module_key)
            if value is None:
                raise _Unresolved(f"a {type(variable).__name__}") from error
        if self.tx.output.side_effects.is_modified(variable) if hasattr(variable, "mutation_type") and variable.mutation_type else False:
            raise _Unresolved("an object that the traced code has changed")
        if variable.source is not None:
            if self._is_fleeting(variable.source, value):
                raise _Fleeting(f"a {type(value).__name__}")
            _guard(variable.source, value)
            return Reference.to(value)
        return value

    def _is_fleeting(self, source: Any, value: Any) -> bool:
        """Whether the frame is compiled again and again because this object is another one, and those before are gone."""
        compile_id = torch._guards.CompileContext.current_compile_id()
        if compile_id is None or not isinstance(made := Reference.to(value), Reference):
            return False
        known = _objects.setdefault(self.tx.output.root_tx.f_code, {})
        before, freed = known.get(source, (made, 0))
        if compile_id.frame_compile_id == 0:  # the first compile since Dynamo was reset
            freed = 0
        elif before.target() is None:
            freed += 1
        known[source] = made, freed
        return freed >= _MANY


def _guard(source: Any, value: Any) -> None:
    """Sees to it that the object stays this one: of a method, which is made anew whenever it is asked for, what it is made of."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    sources = [AttrSource(source, "__self__"), AttrSource(source, "__func__")] if isinstance(value, types.MethodType) else [source]
    install_guard(*(one.make_guard(GuardBuilder.ID_MATCH) for one in sources))
