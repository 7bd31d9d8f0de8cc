"""`options={"verify": n}`: the first calls of a graph beside eager PyTorch, outputs, mutated inputs and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ort_backend import compiled_autograd
from ort_backend.errors import VerificationError
from ort_backend.runtime.random_state import random_state, set_random_state

_TOLERANCE = {
    torch.float64: (1e-7, 1e-8), torch.float32: (1e-3, 1e-4), torch.float16: (1e-2, 1e-2), torch.bfloat16: (3e-2, 3e-2),
    torch.complex128: (1e-7, 1e-8), torch.complex64: (1e-3, 1e-4),
}  # fmt: skip


def verified(compiled: Callable[..., Any], gm: fx.GraphModule, name: str, calls: int) -> Callable[..., Any]:
    """`compiled`, whose first `calls` calls are preceded by a comparison with `gm` on copies of the inputs.

    Gradients are compared for random tangents. PyTorch's random state is put back, so that the call itself sees what it would have seen.
    """
    if calls == 0:
        return compiled
    remaining = calls
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]

    def call(*args: Any) -> Any:
        nonlocal remaining
        if remaining > 0:
            remaining -= 1
            _compare(compiled, gm, args, names, name)
        return compiled(*args)

    return call


def _compare(compiled: Callable[..., Any], gm: fx.GraphModule, args: Sequence[Any], names: Sequence[str], graph: str) -> None:
    state = random_state()
    held = dict(itertools.chain(gm.named_parameters(), gm.named_buffers()))  # an optimizer's step holds what it changes
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    results, after = [], []
    try:
        with compiled_autograd.off():
            for function in (gm, compiled):
                set_random_state(state)
                try:
                    results.append(_run(function, *_copies(args)))
                finally:
                    after.append(_put_back(held, before))
    finally:
        set_random_state(state)
    (outputs, inputs, gradients), (own_outputs, own_inputs, own_gradients) = results
    for what, expected, actual, labels in (
        ("output", outputs, own_outputs, [str(i) for i in range(len(outputs))]),
        ("input after the call", inputs, own_inputs, names),
        ("gradient of", gradients, own_gradients, names),
        ("state after the call", *after, list(held)),
    ):
        for label, one, other in zip(labels, expected, actual, strict=True):
            _check(f"{what} {label}", one, other, graph)


def _put_back(held: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Gives tensors the values that they had. Returns those that they have."""
    after = []
    with torch.no_grad():
        for name, tensor in held.items():
            after.append(tensor.detach().clone())
            if not torch.equal(tensor, before[name]):
                tensor.copy_(before[name])
    return after


def _copies(args: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor | None]]:
    """Arguments over memory of their own, which autograd allows to change in place, and for each the leaf whose gradient is compared.

    Plain tensors of one dtype that share memory do so again: AOTAutograd has compiled the graph for that.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for arg in args:
        if _is_plain(arg):
            groups.setdefault(_memory(arg), []).append(arg)
    copied: dict[int, torch.Tensor] = {}  # by memory: the copy of what several arguments are views of, or of the memory itself
    copies = [_copy(arg, groups.get(_memory(arg), []) if _is_plain(arg) else [], copied) for arg in args]
    return [given for given, _ in copies], [leaf if leaf is not None and leaf.requires_grad else None for _, leaf in copies]


def _copy(arg: Any, group: Sequence[torch.Tensor], copied: dict[int, torch.Tensor]) -> tuple[Any, torch.Tensor | None]:
    """One argument's copy and the leaf that came with it; `group` are the arguments in its memory."""
    if not isinstance(arg, torch.Tensor):
        return arg, None
    if (base := _common_base(group)) is not None:
        leaf = None
        if (copy := copied.get(_memory(arg))) is None:
            leaf = base.detach().clone().requires_grad_(any(one.requires_grad for one in group))
            copied[_memory(arg)] = copy = leaf.clone() if leaf.requires_grad and torch.is_grad_enabled() else leaf
        view = copy if arg is base else copy.as_strided(arg.shape, arg.stride(), arg.storage_offset() - base.storage_offset())
        if view.requires_grad != arg.requires_grad:  # a view of it that requires none; or one that does, made while no gradients are recorded
            view = view.detach().requires_grad_(arg.requires_grad)
        return view, leaf
    if _is_apart(group):
        if (memory := copied.get(_memory(arg))) is None:
            copied[_memory(arg)] = memory = arg.new_empty(0).set_(arg.untyped_storage().clone())
        leaf = arg.new_empty(0).set_(memory.untyped_storage(), arg.storage_offset(), arg.shape, arg.stride()).requires_grad_(arg.requires_grad)
        return leaf, leaf
    leaf = arg.detach().clone().requires_grad_(arg.requires_grad)
    return leaf.clone() if leaf.requires_grad and torch.is_grad_enabled() else leaf, leaf


def _is_plain(arg: Any) -> bool:
    return type(arg) in (torch.Tensor, torch.nn.Parameter) and arg.layout == torch.strided


def _memory(tensor: torch.Tensor) -> int:
    """Equal for tensors in the same memory."""
    return tensor.untyped_storage()._cdata


def _alike(group: Sequence[torch.Tensor]) -> bool:
    """Whether there are several, and strides are all that tells how each of them lies in their memory."""
    return len(group) > 1 and len({one.dtype for one in group}) == 1 and not any(one.is_conj() or one.is_neg() for one in group)


def _common_base(group: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that autograd knows all of them as views of, or as itself."""
    base = next((one._base for one in group if one._base is not None), None)
    if base is None or len(group) < 2 or not _alike([*group, base]):
        return None
    inside = all((one is base or one._base is base) and one.storage_offset() >= base.storage_offset() for one in group)
    return base if inside else None


def _is_apart(group: Sequence[torch.Tensor]) -> bool:
    """Whether they share memory and autograd does not know: `x` and `x.detach()`."""
    return _alike(group) and all(one._base is None for one in group)


def _run(function: Callable[..., Any], inputs: list[Any], leaves: list[torch.Tensor | None]) -> tuple[list[Any], list[Any], list[Any]]:
    outputs = list(function(*inputs))
    differentiable = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    wanted = [leaf for leaf in leaves if leaf is not None]
    found: dict[int, Any] = {}
    if differentiable and wanted and torch.is_grad_enabled():
        tangents = [_tangent(out) for out in differentiable]
        found = dict(zip(map(id, wanted), torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True), strict=True))
    kept = [i.detach() if isinstance(i, torch.Tensor) else i for i in inputs]
    return [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs], kept, [found.get(id(leaf)) for leaf in leaves]


def _tangent(output: torch.Tensor) -> torch.Tensor:
    """The same numbers for eager and compiled, without touching the global generator; of the output's class, as AOTAutograd requires."""
    if is_traceable_wrapper_subclass(output):
        names, context = output.__tensor_flatten__()
        inner = {name: getattr(output, name) for name in names}
        tangents = {name: _tangent(one) if _has_gradient(one) else one for name, one in inner.items()}
        return type(output).__tensor_unflatten__(tangents, context, output.shape, output.stride())
    generator = torch.Generator(device=output.device).manual_seed(output.numel())
    return torch.randn(output.shape, dtype=output.dtype, device=output.device, generator=generator)


def _has_gradient(part: Any) -> bool:
    """Not offsets of rows, nor the mesh of a DTensor."""
    return isinstance(part, torch.Tensor) and (part.is_floating_point() or part.is_complex())


def _check(what: str, expected: Any, actual: Any, graph: str) -> None:
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        # Gradients that are zero in every element may be None.
        if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
            present = expected if isinstance(expected, torch.Tensor) else actual
            if not bool((present == 0).all()):
                raise VerificationError(f"{graph}: {what} differs from eager PyTorch: eager has {_kind(expected)}, ort_training has {_kind(actual)}")
        return
    if is_traceable_wrapper_subclass(expected) and type(expected) is type(actual):
        for name in expected.__tensor_flatten__()[0]:
            _check(f"{what}, {name} of its {type(expected).__name__},", getattr(expected, name), getattr(actual, name), graph)
        return
    if expected.layout != torch.strided and expected.layout == actual.layout:
        expected, actual = expected.to_dense(), actual.to_dense()
    rtol, atol = _TOLERANCE.get(expected.dtype, (0.0, 0.0))
    if atol and expected.numel():
        atol *= max(1.0, float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()))  # rounding grows with the numbers that were summed
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as difference:
        raise VerificationError(f"{graph}: {what} differs from eager PyTorch: {difference}") from None


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
