"""What a user's autograd.Function returns, keeps and gives gradients for, found out without its data.

The user may say it (`register_fake`, or a static method `infer_shape`). Else the Function runs on fake tensors, which touch no data, with PyTorch's
formulas in Python (`enable_python_dispatcher`), as Dynamo's own do: those in C++ take the hint of a symbolic size for it, or fail. Where
its Python leaves the world of tensors (numpy, `.item()`), it runs on zeros of the sizes at hand, on ones, and once more for each symbolic size with
that one enlarged, to see which sizes of the results follow it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ort_backend.errors import OrtBackendError
from ort_backend.lowering.functions import object_state, trial
from ort_backend.lowering.functions.function_site import Behaviour, Context, Reference, Site, Slot, TensorResult, kept_of, stands_for
from ort_backend.lowering.functions.original_tensors import Original, originals, put_in

_fakes: weakref.WeakKeyDictionary[type, Callable[..., Any]] = weakref.WeakKeyDictionary()
# Per compile (each has a fake mode of its own): the same call with the same kinds of arguments behaves the same.
_known: weakref.WeakKeyDictionary[FakeTensorMode, dict[Any, Behaviour]] = weakref.WeakKeyDictionary()

_ENLARGED_BY = 8


class _DataDependent(Exception):
    """A size of a result, or a number among them, depends on the data."""


class UnknownBehaviour(Exception):
    """What a Function does cannot be found out; says what its author can write."""


def register_fake(function: type[torch.autograd.Function]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that tells which tensors an autograd.Function returns, so that it never runs while it is compiled.

    The decorated function gets what `Fn.apply` gets, with fake tensors; it returns what `forward` returns: tensors of the right shape,
    dtype and device (`torch.empty_like(x)`), which hold nothing.

        @ort_backend.register_fake(MyFunction)
        def _(x, weight):
            return x.new_empty(x.shape[0], weight.shape[1])

    Raises:
        TypeError: `function` is no class of autograd.Functions, or what is decorated cannot be called.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise TypeError(f"register_fake takes a subclass of torch.autograd.Function, not {function!r}; operators have torch.library.register_fake")

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(fake):
            raise TypeError(f"register_fake({function.__name__}) decorates a function of what `apply` gets, not {fake!r}")
        _fakes[function] = fake
        return fake

    return register


def behaviour_of(site: Site, tensors: Sequence[torch.Tensor], ints: Sequence[Any], mode: FakeTensorMode) -> Behaviour:
    """What the call does with fake `tensors`.

    Raises:
        UnknownBehaviour: it cannot be found out.
        OrtBackendError: what its author says of it (`register_fake`, `infer_shape`) raises, or says nothing that a forward returns.
    """
    key = (site.cls, _key(site.template), site.needs, site.autocast, _signature(tensors), tuple(map(str, ints)), tuple(site.repeated.items()))
    known = _known.setdefault(mode, {})
    with_tensors = (*key, *map(id, site.originals))
    found = known.get(key) or known.get(with_tensors)
    if found is None:
        found = _find_out(site, tensors, ints, mode)
        found = dataclasses.replace(found, written=tuple(TensorResult.of(tensors[i]) for i in found.mutated))
        known[with_tensors if found.goes_by_tensors else key] = found
    has_attributes = any(object_state.attributes_of(tensor) for tensor in site.callers_own())
    return dataclasses.replace(found, goes_by_tensors=True) if has_attributes else found


def _find_out(site: Site, tensors: Sequence[torch.Tensor], ints: Sequence[Any], mode: FakeTensorMode) -> Behaviour:
    given, infer_shape = _fakes.get(site.cls), getattr(site.cls, "infer_shape", None)
    if given is not None:
        with _naming(site, "register_fake"), mode, enable_python_dispatcher(), torch.no_grad():
            return _told(site, given(*site.arguments([tensor.detach() for tensor in tensors], ints)), "register_fake")
    if infer_shape is not None:
        with _naming(site, "infer_shape"):
            shapes, dtypes = infer_shape(None, [list(tensor.shape) for tensor in tensors], [tensor.dtype for tensor in tensors])
            with mode:
                results = tuple(torch.empty(tuple(s), dtype=d, device=tensors[0].device) for s, d in zip(shapes, dtypes, strict=True))
            return _told(site, results[0] if len(results) == 1 else results, "infer_shape")
    try:
        return _on_fakes(site, tensors, ints, mode)
    except UnknownBehaviour:
        raise
    except _DataDependent as error:
        raise UnknownBehaviour(_advice(site, "it cannot be known while it is compiled", error)) from error
    except Exception as error:  # noqa: BLE001 - the user's code, which does not expect fake tensors, raises what it likes
        return _on_zeros(site, tensors, ints, mode, error)


@contextlib.contextmanager
def _naming(site: Site, source: str) -> Iterator[None]:
    """What goes wrong in what the author says of a Function is an error that names it."""
    try:
        yield
    except Exception as error:
        raise OrtBackendError(f"the {source} of autograd.Function {site.name} failed: {type(error).__name__}: {error}") from error


def _told(site: Site, returned: Any, source: str) -> Behaviour:
    """From what the author says `forward` returns; everything else is assumed."""
    results, single = _results(returned)
    tensors = [result for result in results if isinstance(result, TensorResult)]
    if results and all(isinstance(result, (int, torch.SymInt)) for result in results):
        raise TypeError(f"it returned {returned!r}, and not a tensor of such a shape")
    return Behaviour(
        results=results,
        single=single,
        kept_inputs=tuple(range(site.tensor_count)),
        kept_outputs=tuple(range(len(tensors))),
        non_differentiable=frozenset(i for i, result in enumerate(tensors) if not _may_differentiate(result.dtype)),
        gradients=tuple(site.needs_gradient(i) for i in range(site.tensor_count)),
        told_by=source,
    )


# -- runs


@dataclasses.dataclass
class _Ran:
    """One run of a Function on tensors that hold nothing of interest."""

    inputs: list[torch.Tensor]
    versions: list[int]
    ctx: Context
    returned: Any
    gradients: tuple[Any, ...] | None
    is_random: bool
    originals: Sequence[Original]
    goes_by_tensors: bool


def _objects(site: Site) -> list[Any]:
    """What the Function gets besides tensors and sizes."""
    leaves = pytree.tree_leaves(site.template, is_leaf=stands_for)
    return [leaf.value() if isinstance(leaf, Reference) else leaf for leaf in leaves if not isinstance(leaf, Slot)]


def _run(site: Site, inputs: list[torch.Tensor], ints: Sequence[Any], *, backward: bool, value: int = 0) -> _Ran:
    for i, tensor in enumerate(inputs):
        if site.needs_gradient(i):
            tensor.requires_grad_()
    versions = [tensor._version for tensor in inputs]
    watch, gradients, same = trial.Watch(inputs), None, []
    asked: Mapping[int, Any] = {}
    own = site.callers_own()
    for tensor, one in zip(inputs, site.originals):
        if one is not None and (original := one()) is not None:
            vars(tensor).update(object_state.attributes_of(original))
    given, had = ([object_state.attributes_of(tensor) for tensor in some] for some in (inputs, own))
    try:
        with watch, trial.casts_not_kept(), object_state.put_back([*_objects(site), *own]):
            ctx, returned = site.forward(inputs, ints)
            if _have_changed(inputs, given):
                raise UnknownBehaviour(
                    f"autograd.Function {site.name} is left to eager PyTorch: its forward sets attributes of tensors that it gets."
                )
            is_random = watch.is_random
            if backward and any(site.needs):
                results = returned if isinstance(returned, tuple) else (returned,)
                marked = {id(tensor) for tensor in ctx.non_differentiable}
                arriving = [_gradient(result, ctx, marked, value) for result in results]
                put_in(ctx, same := originals(ctx, zip(inputs, (one and one() for one in site.originals))))
                with contextlib.suppress(Exception), trial.gradients_put_back() as asked:  # the forward's results are known all the same
                    gradients = site.backward(ctx, arriving)
            writes = _have_changed(own, had)
    finally:
        watch.put_back()
    return _Ran(inputs, versions, ctx, returned, gradients, is_random, same, writes or bool(asked) or gradients is None)


def _have_changed(tensors: Sequence[torch.Tensor], attributes: Sequence[dict[str, Any]]) -> bool:
    return not all(object_state.same(object_state.attributes_of(tensor), before) for tensor, before in zip(tensors, attributes))


def _with_repeated(site: Site, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors; those in containers that are arguments as well are one tensor with them: what marks the one as dirty has marked the other."""
    return [inputs[site.argument_of(i)] for i in range(len(inputs))]


def _gradient(result: Any, ctx: Context, marked: set[int], value: int) -> torch.Tensor | None:
    if not isinstance(result, torch.Tensor):
        return None
    if id(result) in marked or not _may_differentiate(result.dtype):
        return torch.zeros_like(result) if ctx.materialize_grads else None
    return torch.full_like(result, value)


def _on_fakes(site: Site, tensors: Sequence[torch.Tensor], ints: Sequence[Any], mode: FakeTensorMode) -> Behaviour:
    with trial.own_random_state(), mode, enable_python_dispatcher(), _allow_real_tensors(mode), _unknown_numbers(mode):
        inputs = _with_repeated(site, [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors])
        ran = _run(site, inputs, ints, backward=True)
    found = _described(site, ran)
    numbers = [number for result in found.results for number in (result.shape if isinstance(result, TensorResult) else (result,))]
    if any(isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(number) for number in numbers):
        raise _DataDependent("what its forward returns has a size or a number that depends on the data")
    if ran.gradients is None and any(site.needs):
        return dataclasses.replace(found, gradients=_gradients_on_numbers(site, tensors, ints) or found.gradients)
    return dataclasses.replace(found, goes_by_tensors=ran.goes_by_tensors)


def _described(site: Site, ran: _Ran) -> Behaviour:
    """The behaviour that a run shows."""
    results, single = _results(ran.returned)
    given = [result for result in (ran.returned if isinstance(ran.returned, tuple) else (ran.returned,)) if isinstance(result, torch.Tensor)]
    marked, dirty = {id(tensor) for tensor in ran.ctx.non_differentiable}, {id(tensor) for tensor in ran.ctx.dirty_tensors}
    has_gradient = [
        site.needs_gradient(i) and (ran.gradients is None or ran.gradients[site.differentiable[i]] is not None)  # type: ignore[index]
        for i in range(site.tensor_count)
    ]
    mutated = tuple(i for i, tensor in enumerate(ran.inputs) if id(tensor) in dirty or tensor._version != ran.versions[i])
    same = {id(ran.inputs[i]): site.argument_of(i) for i in mutated}
    argument = {id(tensor) for tensor in ran.inputs} - dirty  # that is returned as it came is a new tensor at each place
    last = {id(tensor): i for i, tensor in enumerate(given) if id(tensor) not in argument}
    stand_ins = [one.stand_in for one in ran.originals]
    return Behaviour(
        results=results,
        single=single,
        kept_inputs=tuple(i for i in kept_of(ran.ctx, ran.inputs, given, stand_ins) if i not in mutated),
        kept_outputs=kept_of(ran.ctx, given, ran.inputs, stand_ins),
        non_differentiable=frozenset(i for i, tensor in enumerate(given) if id(tensor) in marked or not _may_differentiate(tensor.dtype)),
        gradients=tuple(has_gradient),
        is_random=ran.is_random,
        mutated=mutated,
        dirty=tuple(i for i in mutated if id(ran.inputs[i]) in dirty and site.argument_of(i) == i),
        returned=tuple(same.get(id(tensor)) for tensor in given),
        last=tuple(last.get(id(tensor), i) for i, tensor in enumerate(given)),
    )


def _on_zeros(site: Site, tensors: Sequence[torch.Tensor], ints: Sequence[Any], mode: FakeTensorMode, why: Exception) -> Behaviour:
    if _has_other_processes():
        raise UnknownBehaviour(
            _advice(site, "its forward does not run on fake tensors, and must not run on others while processes wait", why)
        ) from why
    symbols = _symbols([size for tensor in tensors for size in tensor.shape] + list(ints))
    try:
        base = _zeros_run(site, tensors, ints, {}, backward=True)
        found = _described(site, base)
        shapes = [list(result.shape) for result in found.tensors]
        for name, symbol in symbols.items():
            other = [result.shape for result in _described(site, _zeros_run(site, tensors, ints, {name: _ENLARGED_BY}, backward=False)).tensors]
            for shape, before, after in zip(shapes, found.tensors, other, strict=True):
                _follow(shape, before.shape, after, symbol)
        if (ones := _on_ones(site, tensors, ints)) is not None:
            if [result.shape for result in ones.tensors] != [result.shape for result in found.tensors]:
                raise _DataDependent("what its forward returns has another shape for zeros than for ones")
            found = _either(found, ones)
    except UnknownBehaviour:
        raise
    except Exception as error:
        raise UnknownBehaviour(_advice(site, "its forward runs neither on fake tensors nor on zeros", error)) from error
    if any(not isinstance(result, (TensorResult, str, type(None))) for result in found.results):
        raise UnknownBehaviour(_advice(site, "its forward does not run on fake tensors, and returns a number that may depend on the data", why))
    followed = iter(shapes)
    results = [dataclasses.replace(r, shape=tuple(next(followed))) if isinstance(r, TensorResult) else r for r in found.results]
    return dataclasses.replace(found, results=tuple(results))


def _on_ones(site: Site, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> Behaviour | None:
    """What it does with other data; None if it does not run on these."""
    with contextlib.suppress(Exception):
        return _described(site, _zeros_run(site, tensors, ints, {}, backward=True, value=1))
    return None


def _either(one: Behaviour, other: Behaviour) -> Behaviour:
    """The first, with what either run gives and keeps: a backward may return None for gradients that are all zero."""
    return dataclasses.replace(
        one,
        gradients=tuple(map(operator.or_, one.gradients, other.gradients)),
        kept_inputs=tuple(sorted({*one.kept_inputs, *other.kept_inputs})),
        kept_outputs=tuple(sorted({*one.kept_outputs, *other.kept_outputs})),
    )


def _gradients_on_numbers(site: Site, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> tuple[bool, ...] | None:
    """For each tensor whether a backward that takes no fake tensors gives a gradient; None if that cannot be found out."""
    if len(site.requiring) < 2 or _has_other_processes():  # it is for one of several that a backward has None
        return None
    with contextlib.suppress(Exception):
        zeros = _described(site, _zeros_run(site, tensors, ints, {}, backward=True))
        return _either(zeros, _on_ones(site, tensors, ints) or zeros).gradients
    return None


def _has_other_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _follow(shape: list[Any], before: Sequence[int], after: Sequence[int], symbol: torch.SymInt) -> None:
    """Makes those sizes symbolic that changed with the symbol."""
    for d, (small, large) in enumerate(zip(before, after, strict=True)):
        slope, rest = divmod(large - small, _ENLARGED_BY)
        if rest:
            raise ValueError(f"size {d} of a result went from {small} to {large} where a size of an argument grew by {_ENLARGED_BY}")
        if slope:
            shape[d] = shape[d] + slope * (symbol - symbol.node.hint)


def _zeros_run(site: Site, tensors: Sequence[torch.Tensor], ints: Sequence[Any], enlarged: dict[str, int], *, backward: bool, value: int = 0) -> _Ran:
    sizes = [[_size(size, enlarged) for size in tensor.shape] for tensor in tensors]
    with unset_fake_temporarily(), trial.own_random_state(), torch.random.fork_rng():
        inputs = _with_repeated(site, [torch.full(size, value, dtype=tensor.dtype, device=tensor.device) for size, tensor in zip(sizes, tensors)])
        return _run(site, inputs, [_size(number, enlarged) for number in ints], backward=backward, value=value)


def _size(size: Any, enlarged: dict[str, int]) -> int:
    """A size's value at hand, with symbols enlarged."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression, environment = size.node.expr, size.node.shape_env
    values = {symbol: _hint(environment, symbol) + enlarged.get(str(symbol), 0) for symbol in expression.free_symbols}
    return int(expression.xreplace(values))


def _symbols(sizes: Sequence[Any]) -> dict[str, torch.SymInt]:
    found: dict[str, torch.SymInt] = {}
    for size in sizes:
        if isinstance(size, torch.SymInt):
            environment = size.node.shape_env
            for symbol in size.node.expr.free_symbols:
                found.setdefault(str(symbol), environment.create_symintnode(symbol, hint=_hint(environment, symbol)))
    return found


def _hint(environment: Any, symbol: Any) -> int:
    return int(environment.create_symintnode(symbol, hint=None).node.hint)


@contextlib.contextmanager
def _allow_real_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """Lets the user's code use real tensors of its own, such as a module's parameters, beside the fake ones (read in torch 2.13)."""
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def _unknown_numbers(mode: FakeTensorMode) -> contextlib.AbstractContextManager[Any]:
    """Lets the user's code ask for numbers that depend on data: the symbols that stand for them are nobody else's (read in torch 2.13)."""
    return mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env is not None else contextlib.nullcontext()


def _results(returned: Any) -> tuple[tuple[Any, ...], bool]:
    single = not isinstance(returned, tuple)
    results = (returned,) if single else returned
    if single and not isinstance(returned, (torch.Tensor, torch.SymInt, bool, int, float, str, type(None))):
        raise TypeError(f"it returned {type(returned).__name__}, not a tensor or a tuple")
    return tuple(TensorResult.of(result) if isinstance(result, torch.Tensor) else result for result in results), single


def _may_differentiate(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _signature(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(map(str, tensor.shape)), tensor.dtype, tensor.device) for tensor in tensors)


def _key(template: Any) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(template, is_leaf=stands_for)
    leaves = [leaf.target if isinstance(leaf, Reference) else leaf for leaf in leaves]  # Python makes one weak reference for each object
    plain = (bool, int, float, str, type(None), Slot, torch.dtype, torch.device)
    return (str(spec), *((type(leaf), leaf if isinstance(leaf, plain) else id(leaf)) for leaf in leaves))


def _advice(site: Site, what: str, error: Exception) -> str:
    said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return (
        f"autograd.Function {site.name} is left to eager PyTorch: {what} ({said}). To have it in the graph, say what it returns: "
        f"`@ort_backend.register_fake({site.cls.__name__})` over a function that gets what `apply` gets and returns empty tensors, "
        "or a static method `infer_shape(node, shapes, dtypes)` that returns shapes and dtypes."
    )


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """The mode that fake tensors among `values` belong to."""
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
