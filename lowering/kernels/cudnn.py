"""cuDNN's recurrent layers on a CUDA device, as PyTorch has them: one layer and direction, forward and backward.

What cuDNN reserves for the backward, and the weights as it packs them, have sizes that are its secret: in the graph they count as empty.
States are (1, B, H), as the kernels take and give them. Of a layer that has no cells, or no biases, what stands for these is empty, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ort_backend.lowering.tracing import second_derivatives

aten = torch.ops.aten

# cuDNN's numbers of the kinds (ATen/native/cudnn/RNN.cpp).
RELU, TANH, LSTM, GRU = range(4)

_library = torch.library.Library("ort_training", "FRAGMENT")
_GIVEN = "Tensor x, Tensor h0, Tensor? c0, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh"
_library.define(f"cudnn_layer({_GIVEN}, int mode, bool reverse, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"cudnn_layer_backward(Tensor dy, Tensor dhn, Tensor? dcn, {_GIVEN}, Tensor y, Tensor reserve, Tensor packed, int mode, bool reverse)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
CUDNN_LAYER = torch.ops.ort_training.cudnn_layer.default
CUDNN_LAYER_BACKWARD = torch.ops.ort_training.cudnn_layer_backward.default


def is_for(*tensors: Tensor) -> bool:
    """Whether cuDNN takes a layer with these tensors: those of eager PyTorch's `cudnn_is_acceptable`."""
    dtypes = {tensor.dtype for tensor in tensors}
    return all(tensor.is_cuda for tensor in tensors) and len(dtypes) == 1 and torch.backends.cudnn.is_acceptable(tensors[0])


def layer(mode: int, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Sequence[Tensor]]:
    """A layer in one direction.

    Args:
        mode: `RELU`, `TANH`, `LSTM` or `GRU`.
        x: (T, B, I)
        states: The initial ones, (1, B, H) each.
        weights: (gates * H, I), (gates * H, H) and, if it has any, both biases.
        reverse: Whether it walks from the last step to the first.

    Returns:
        The hidden states (T, B, H), and the final states.
    """
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, states, weights = x.to(dtype), [one.to(dtype) for one in states], [one.to(dtype) for one in weights]
    keep = torch.is_grad_enabled() and any(one.requires_grad for one in (x, *states, *weights))
    cells = states[1] if len(states) > 1 else None
    y, hn, cn, *_ = CUDNN_LAYER(x, states[0], cells, *weights[:2], *(weights[2:] or (None, None)), mode, reverse, keep)
    return y, [hn, cn][: len(states)]


@torch.library.register_fake("ort_training::cudnn_layer", lib=_library)
def _(x: Tensor, h0: Tensor, c0: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    cn = x.new_empty(0) if c0 is None else torch.empty_like(c0)
    return x.new_empty(x.shape[0], *h0.shape[1:]), torch.empty_like(h0), cn, x.new_empty(0, dtype=torch.uint8), x.new_empty(0)


@torch.library.impl(_library, "cudnn_layer", "CompositeExplicitAutograd")
def _forward(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    mode: int,
    reverse: bool,
    keep: bool,
) -> tuple[Tensor, ...]:
    weights = [one for one in (w_ih, w_hh, b_ih, b_hh) if one is not None]
    cells = None if c0 is None else c0.contiguous()
    x = x.flip(0) if reverse else x.contiguous()
    made = aten._cudnn_rnn.default(x, weights, len(weights), None, h0.contiguous(), cells, *_shape(mode, h0, keep))
    y, hn, cn, reserve, packed = made
    return y.flip(0) if reverse else y, hn, x.new_empty(0) if c0 is None else cn, reserve, packed


def _shape(mode: int, h0: Tensor, keep: bool) -> tuple[Any, ...]:
    """Mode, width, width of projections, layers, whether batches come first, dropout, training, both directions, lengths, dropout's state."""
    return mode, h0.shape[-1], 0, 1, False, 0.0, keep, False, [], None


@torch.library.register_fake("ort_training::cudnn_layer_backward", lib=_library)
def _(dy: Tensor, dhn: Tensor, dcn: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(dy.new_empty(0) if one is None else one.new_empty(one.shape) for one in rest[:7])


@torch.library.impl(_library, "cudnn_layer_backward", "CompositeExplicitAutograd")
def _backward(
    dy: Tensor,
    dhn: Tensor,
    dcn: Tensor | None,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    y: Tensor,
    reserve: Tensor,
    packed: Tensor,
    mode: int,
    reverse: bool,
) -> tuple[Tensor, ...]:
    weights = [one for one in (w_ih, w_hh, b_ih, b_hh) if one is not None]
    x, y, dy = (one.flip(0) if reverse else one.contiguous() for one in (x, y, dy))
    states = [None if one is None else one.contiguous() for one in (h0, c0)]
    finals = dhn.contiguous(), None if dcn is None or c0 is None else dcn.contiguous()
    wanted = [True, True, c0 is not None, True]  # it refuses to be asked for the gradient of cells that there are not
    dx, dh0, dc0, of_weights = aten._cudnn_rnn_backward.default(
        x, weights, len(weights), packed, *states, y, dy, *finals, *_shape(mode, h0, True), reserve.clone(), wanted
    )
    absent = x.new_empty(0)
    of_biases = of_weights[2:] if b_ih is not None else (absent, absent)
    return dx.flip(0) if reverse else dx, dh0, absent if c0 is None else dc0, *of_weights[:2], *of_biases


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.mode, ctx.reverse, _ = inputs
    y, _, _, reserve, packed = output
    ctx.save_for_backward(*tensors, y, reserve, packed)
    ctx.mark_non_differentiable(reserve, packed)


def _gradients(ctx: Any, dy: Tensor, dhn: Tensor, dcn: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    found = CUDNN_LAYER_BACKWARD(dy, dhn, None if saved[2] is None else dcn, *saved, ctx.mode, ctx.reverse)
    return (*(None if one is None else gradient for one, gradient in zip(saved, found)), None, None, None)


torch.library.register_autograd("ort_training::cudnn_layer", _gradients, setup_context=_save, lib=_library)
second_derivatives.refuse("cudnn_layer_backward", "a recurrent layer", _library)

# What a node calls: without PyTorch's dispatcher, whose layers in Python take as long as a small kernel.
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {CUDNN_LAYER: _forward, CUDNN_LAYER_BACKWARD: _backward}
