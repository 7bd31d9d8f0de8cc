"""Runs a user's autograd.Function on memory that somebody else will write to: what it keeps must survive, what it returns must be its own.

ONNX Runtime may overwrite the inputs and outputs of a node once nothing in its graph reads them any more. What `ctx` keeps of them is
read by the backward's node (`Behaviour.kept_inputs`, `kept_outputs`) or copied; so is what else the user's code holds on to.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ort_backend.lowering.functions.function_site import Behaviour, Context, Site, TensorResult, held_tensors, replace_held
from ort_backend.lowering.functions.object_state import attributes_of
from ort_backend.lowering.functions.original_tensors import Original, originals, put_in


class Pending(NamedTuple):
    """A forward that waits for its backward: its `ctx`, the shapes of the tensors among its results, those of its tensors, the caller's own."""

    ctx: Context
    results: list[torch.Size]
    inputs: list[torch.Size]
    originals: Sequence[Original]


def _references(values: list[Any]) -> list[int]:
    """How many references each value has, beside the one of a list."""
    return [sys.getrefcount(value) - _OWN_REFERENCES for value in values]


_OWN_REFERENCES = 0
_OWN_REFERENCES = _references([object()])[0]


def forward(
    site: Site, tensors: list[torch.Tensor], ints: Sequence[Any], *, keep: bool, given: Mapping[int, Any] | None = None
) -> tuple[list[torch.Tensor], Pending | None]:
    """Runs the forward.

    Args:
        site: The call.
        tensors: Its tensors. Their memory may be overwritten after the forward, but for what `site.behaviour` says is kept.
        ints: Its symbolic integers.
        keep: Whether a backward follows.
        given: The caller's own tensors in the places of those that have their memory.

    Returns:
        The tensors among its results and the new values of those that it wrote to, each contiguous in memory of its own; and what the
        backward needs.

    Raises:
        RuntimeError: it returned something else than it did when it was compiled, or than its author says.
    """
    known = site.behaviour
    copied: set[int] = set()
    for i in known.mutated:  # the graph is functional: what the user's code writes to is a copy, and what it makes of it goes out
        if i not in copied:
            tensors[i] = tensors[i].clone()
            for j in site.repeated.get(i, ()):
                tensors[j] = tensors[i].detach()
                copied.add(j)
    for i in site.requiring:
        tensors[i].requires_grad_()
    for i, tensor in (given or {}).items():
        vars(tensors[i]).update(attributes_of(tensor))
    ctx, returned = site.forward(tensors, ints)
    results = returned if isinstance(returned, tuple) else (returned,)
    del returned
    held = held_tensors(ctx)
    made = _tensors_of(site, results)
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    outputs: list[torch.Tensor] = []
    own: list[int] = []
    for result, references in zip(made, _references(made)):
        # The tuple of results refers to it; the ctx may, and `held` does then. Whoever else does keeps its memory.
        is_foreign = references > 1 and references - 1 > 2 * sum(one is result for one in held)
        _add(result, outputs, own, memory, is_foreign)
    for i, references in enumerate(_references(tensors)):
        if references and references > 2 * sum(one is tensors[i] for one in held):
            tensors[i].data = tensors[i].detach().clone()  # the user's code holds it: it gets memory that nobody overwrites
    outputs.extend(tensors[i].detach().clone() for i in known.mutated)
    if not keep:
        return outputs, None
    if held:
        _protect(known, ctx, held, memory, own)
    same = originals(ctx, [(tensors[i], tensor) for i, tensor in given.items() if i not in known.mutated]) if given else ()
    return outputs, Pending(ctx, [output.shape for output in made], [tensor.shape for tensor in tensors], same)


def _add(tensor: torch.Tensor, outputs: list[torch.Tensor], own: list[int], taken: Sequence[int], is_foreign: bool) -> None:
    """Adds a tensor to the outputs: contiguous, without history, in memory of its own."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.numel():  # which PyTorch calls contiguous whatever its strides, and ONNX Runtime does not
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    elif not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    address = tensor.untyped_storage().data_ptr()
    if is_foreign or address in taken or address in own:
        tensor = tensor.clone()
        address = tensor.untyped_storage().data_ptr()
    outputs.append(tensor)
    own.append(address)


def _tensors_of(site: Site, results: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among the results, which must be as they were when the call was compiled."""
    expected, told_by = site.behaviour.results, site.behaviour.told_by
    said = f"as its {told_by} says" if told_by else "when it was compiled"
    if len(results) != len(expected):
        raise RuntimeError(f"{site.name}.forward returned {len(results)} results, but {len(expected)} {said}")
    given = []
    for i, known in enumerate(expected):
        if type(known) is TensorResult:
            result = results[i]
            if not isinstance(result, torch.Tensor):
                raise RuntimeError(f"{site.name}.forward returned {type(result).__name__} as result {i}, but a tensor {said}")
            if result.dtype is not known.dtype or not known.fits(result.shape):
                advice = "" if told_by else ". Pass what decides about it as an argument of apply()."
                raise RuntimeError(
                    f"{site.name}.forward returned a tensor of shape {tuple(result.shape)} and {result.dtype} as result {i}, but of shape "
                    f"{known.shape} and {known.dtype} {said}{advice}"
                )
            given.append(result)
    return given


def _protect(behaviour: Behaviour, ctx: Context, held: list[torch.Tensor], memory: list[int], own: list[int]) -> None:
    """Copies what a ctx holds of memory that no node of the backward reads."""
    passing = {address for i, address in enumerate(own) if i not in behaviour.kept_outputs}
    passing.update(address for i, address in enumerate(memory) if i not in behaviour.kept_inputs and i not in behaviour.mutated)
    passing.discard(0)
    passing.difference_update([own[i] for i in behaviour.kept_outputs])
    passing.difference_update([memory[i] for i in behaviour.kept_inputs])
    if passing and any(tensor.untyped_storage().data_ptr() in passing for tensor in held):
        replace_held(ctx, lambda tensor: tensor.clone() if tensor.untyped_storage().data_ptr() in passing else tensor)


def backward(site: Site, pending: Pending, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Runs the backward.

    Args:
        site: The call.
        pending: Its forward.
        gradients: One for each tensor that the forward returned; None where there is none.

    Returns:
        The gradients that `site.behaviour` announces, each contiguous in memory of its own.

    Raises:
        RuntimeError: the backward returned what autograd does not accept, or a gradient where it returned None when it was compiled.
    """
    ctx = pending.ctx
    if pending.originals:
        put_in(ctx, pending.originals)
    arriving = list(gradients)
    if len(arriving) != len(site.behaviour.results) or any(one is None for one in arriving):
        arriving = _for_every_result(site, pending, gradients)
    made = site.backward(ctx, arriving)
    for one, references in zip(arriving, _references(arriving)):
        # The caller's list refers to it, and what was returned may. Whoever else does gets memory that nobody overwrites.
        if references > 1 and one is not None and references - 1 > sum(gradient is one for gradient in made):
            one.data = one.clone()
    taken = [one.untyped_storage().data_ptr() for one in (*arriving, *held_tensors(ctx)) if one is not None]
    outputs: list[torch.Tensor] = []
    own: list[int] = []
    for i in site.requiring:
        place: Any = site.differentiable[i]
        references = _references([made[place]])[0]
        gradient = made[place]
        if not site.behaviour.gradients[i]:
            if gradient is not None:
                raise RuntimeError(f"{site.name}.backward returned a gradient for argument {place}, but None when it was compiled")
            continue
        _, dtype, device = site.inputs[i]
        shape = pending.inputs[i]
        if gradient is None:
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        elif not isinstance(gradient, torch.Tensor) or gradient.shape != shape or gradient.dtype is not dtype:
            gradient = _as_autograd_has_it(ctx, place, gradient, shape, dtype)
        _add(gradient, outputs, own, taken, references > 1)  # the tuple refers to it
    return outputs


def unreached(site: Site, pending: Pending) -> list[torch.Tensor]:
    """What stands for gradients that there are none of: autograd does not run the backward of a Function that no gradient reaches."""
    return [
        torch.zeros(pending.inputs[i], dtype=dtype, device=device)
        for i, (_, dtype, device) in enumerate(site.inputs)
        if site.needs_gradient(i) and site.behaviour.gradients[i]
    ]


def _for_every_result(site: Site, pending: Pending, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """What autograd hands to a backward: None for what is no tensor, zeros for what has no gradient (unless the ctx wants None)."""
    given = iter(zip(gradients, pending.results))
    arriving: list[torch.Tensor | None] = []
    for known in site.behaviour.results:
        gradient = None
        if isinstance(known, TensorResult):
            gradient, shape = next(given)
            if gradient is None and pending.ctx.materialize_grads:
                gradient = torch.zeros(shape, dtype=known.dtype, device=known.device)
        arriving.append(gradient)
    return arriving


def _as_autograd_has_it(ctx: Context, place: Any, gradient: Any, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The gradient in its input's shape and dtype."""
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"expected Variable or None (got {type(gradient).__name__})")
    if gradient.shape != shape:
        try:
            gradient = gradient.sum_to_size(shape)
        except RuntimeError:
            raise RuntimeError(
                f"Function {type(ctx).__name__} returned an invalid gradient at index {place} - got {list(gradient.shape)} "
                f"but expected shape compatible with {list(shape)}"
            ) from None
    return gradient.to(dtype)
