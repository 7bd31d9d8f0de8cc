"""Runs a user's autograd.Function on memory that somebody else will write to: what it keeps must survive, what it returns must be its own.

ONNX Runtime may overwrite the inputs and outputs of a node once nothing in its graph reads them any more. What `ctx` keeps of them is
read by the backward's node (`Behaviour.kept_inputs`, `kept_outputs`) or copied; so is what else the user's code holds on to.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ort_backend.lowering.function_site import Behaviour, Context, Site, TensorResult, held_tensors, replace_held


class Pending(NamedTuple):
    """A forward that waits for its backward."""

    ctx: Context
    results: list[TensorResult | None]
    inputs: list[tuple[torch.Size, torch.dtype, torch.device]]


def forward(site: Site, tensors: list[torch.Tensor], ints: Sequence[Any], *, keep: bool) -> tuple[list[torch.Tensor], Pending | None]:
    """Runs the forward.

    Args:
        site: The call.
        tensors: Its tensors. Their memory may be overwritten after the forward, but for what `site.behaviour` says is kept.
        ints: Its symbolic integers.
        keep: Whether a backward follows.

    Returns:
        The tensors among its results and the new values of those that it wrote to, each contiguous in memory of its own; and what the
        backward needs.

    Raises:
        RuntimeError: it returned something else than it did when it was compiled.
    """
    known = site.behaviour
    for i in known.mutated:  # the graph is functional: what the user's code writes to is a copy, and what it makes of it goes out
        tensors[i] = tensors[i].clone()
    for i in site.requiring:
        tensors[i].requires_grad_()
    ctx, returned = site.forward(tensors, ints)
    held = held_tensors(ctx)
    outputs, own = _outputs(site, returned, tensors, held)
    for tensor in tensors:
        # References: the list, the loop's variable, the call's argument. One more, not from ctx, is the user's: it gets memory of its own.
        if sys.getrefcount(tensor) > 3 and sys.getrefcount(tensor) - 3 > sum(one is tensor for one in held):
            tensor.data = tensor.detach().clone()
    outputs.extend(tensors[i].detach().clone() for i in known.mutated)
    if not keep:
        return outputs, None
    if held:
        _protect(known, ctx, held, tensors, own)
    results: list[TensorResult | None] = []
    made = iter(outputs)
    for result in known.results:
        results.append(TensorResult.of(next(made)) if isinstance(result, TensorResult) else None)
    return outputs, Pending(ctx, results, [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])


def _outputs(site: Site, returned: Any, tensors: list[torch.Tensor], held: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """The tensors that were returned, and the memory that whoever runs the graph has of them."""
    results = returned if isinstance(returned, tuple) else (returned,)
    known = site.behaviour.results
    if len(results) != len(known):
        raise RuntimeError(f"{site.name}.forward returned {len(results)} results, but {len(known)} when it was compiled")
    taken = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    # References: the tuple or the caller's variable, this loop's variable, the call's argument; another one for a tuple made here.
    ours = 3 if results is returned else 4
    outputs, own = [], []
    for i, (result, expected) in enumerate(zip(results, known)):
        if not isinstance(expected, TensorResult):
            continue
        _check(site, i, result, expected)
        references = sys.getrefcount(result)
        foreign = references > ours and references - ours > sum(one is result for one in held)
        output = result.detach() if result.requires_grad else result
        if not output.is_contiguous():
            output = output.contiguous()
        memory = output.untyped_storage().data_ptr()
        if foreign or memory in taken:
            output = output.clone()
            memory = output.untyped_storage().data_ptr()
        taken.add(memory)
        outputs.append(output.resolve_neg() if output.is_neg() else output)
        own.append(memory)
    return outputs, own


def _check(site: Site, index: int, result: Any, expected: TensorResult) -> None:
    if not isinstance(result, torch.Tensor):
        raise RuntimeError(f"{site.name}.forward returned {type(result).__name__} as result {index}, but a tensor when it was compiled")
    shape = result.shape
    same = result.dtype == expected.dtype and len(shape) == len(expected.shape)
    if not same or any(type(known) is int and known != size for known, size in zip(expected.shape, shape)):
        raise RuntimeError(
            f"{site.name}.forward returned a tensor of shape {tuple(shape)} and {result.dtype} as result {index}, "
            f"but of shape {expected.shape} and {expected.dtype} when it was compiled. Pass what decides about it as an argument of apply()."
        )


def _protect(behaviour: Behaviour, ctx: Context, held: list[torch.Tensor], tensors: list[torch.Tensor], own: list[int]) -> None:
    """Copies what a ctx holds of memory that no node of the backward reads."""
    passing = {memory for i, memory in enumerate(own) if i not in behaviour.kept_outputs}
    passing.update(tensor.untyped_storage().data_ptr() for i, tensor in enumerate(tensors) if i not in (*behaviour.kept_inputs, *behaviour.mutated))
    passing.discard(0)
    kept = {own[i] for i in behaviour.kept_outputs} | {tensors[i].untyped_storage().data_ptr() for i in behaviour.kept_inputs}
    passing -= kept
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
    arriving: list[torch.Tensor | None] = []
    given = iter(gradients)
    for result in pending.results:
        gradient = next(given) if result is not None else None
        if gradient is None and result is not None and ctx.materialize_grads:
            gradient = torch.zeros(result.shape, dtype=result.dtype, device=result.device)
        arriving.append(gradient)
    made = site.backward(ctx, arriving)
    taken = {tensor.untyped_storage().data_ptr() for tensor in (*arriving, *held_tensors(ctx)) if tensor is not None}
    outputs = []
    for i, place in enumerate(site.differentiable):
        if place is None or not site.needs[place]:
            continue
        gradient = made[place]
        if not site.behaviour.gradients[i]:
            if gradient is not None:
                raise RuntimeError(f"{site.name}.backward returned a gradient for argument {place}, but None when it was compiled")
            continue
        shape, dtype, device = pending.inputs[i]
        if gradient is None:
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        foreign = sys.getrefcount(gradient) > 3  # the tuple, the variable, the call's argument
        gradient = _as_autograd_has_it(ctx, place, gradient, shape, dtype)
        memory = gradient.untyped_storage().data_ptr()
        if foreign or memory in taken:
            gradient = gradient.clone()
            memory = gradient.untyped_storage().data_ptr()
        taken.add(memory)
        outputs.append(gradient)
    return outputs


def _as_autograd_has_it(ctx: Context, place: int, gradient: Any, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The gradient in its input's shape and dtype, contiguous."""
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"expected Variable or None (got {type(gradient).__name__})")
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.shape != shape:
        try:
            gradient = gradient.sum_to_size(shape)
        except RuntimeError:
            raise RuntimeError(
                f"Function {type(ctx).__name__} returned an invalid gradient at index {place} - got {list(gradient.shape)} "
                f"but expected shape compatible with {list(shape)}"
            ) from None
    if gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    return gradient.contiguous().resolve_neg()
