"""Recurrent layers as operators: all steps of one layer and direction at once, in front of them one matrix product for all inputs.

`steps` operators take the inputs' share of the gates, `gx` (T, B, gates * H), and return the hidden states `y` (T, B, H) beside what the
backward reads.
Their lowerings are ONNX Scans (`ops/recurrent.py`); here stand their shapes, their gradients, and what they do in eager PyTorch.
Gates are in PyTorch's order: i, f, g, o of an LSTM; r, z, n of a GRU. `reverse` walks from the last step to the first; results stay in place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ort_backend.lowering.tracing import second_derivatives

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("lstm_steps(Tensor gx, Tensor h0, Tensor c0, Tensor w_hh, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
_library.define(
    "lstm_steps_backward(Tensor dy, Tensor dc, Tensor c0, Tensor w_hh, Tensor cells, Tensor i, Tensor f, Tensor g, Tensor o, bool reverse)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("gru_steps(Tensor gx, Tensor h0, Tensor w_hh, Tensor? b_hh, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_library.define(
    "gru_steps_backward(Tensor dy, Tensor h0, Tensor w_hh, Tensor y, Tensor r, Tensor z, Tensor n, Tensor q, bool reverse)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("rnn_steps(Tensor gx, Tensor h0, Tensor w_hh, bool relu, bool reverse) -> Tensor")
_library.define("rnn_steps_backward(Tensor dy, Tensor w_hh, Tensor y, bool relu, bool reverse) -> (Tensor, Tensor)")

ops = torch.ops.ort_training
LSTM, LSTM_BACKWARD = ops.lstm_steps.default, ops.lstm_steps_backward.default
GRU, GRU_BACKWARD = ops.gru_steps.default, ops.gru_steps_backward.default
RNN, RNN_BACKWARD = ops.rnn_steps.default, ops.rnn_steps_backward.default

for _name in ("lstm", "gru", "rnn"):
    second_derivatives.refuse(f"{_name}_steps_backward", "a recurrent layer", _library)


def last(states: Tensor, reverse: bool) -> Tensor:
    """The state (B, H) behind the last step."""
    return states[0 if reverse else -1]


def previous(states: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    """(T, B, H): the state in front of each step."""
    front = initial.unsqueeze(0)
    return torch.cat([states[1:], front] if reverse else [front, states[:-1]])


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


def _weight_gradient(dgates: Tensor, before: Tensor) -> Tensor:
    """(gates * H, H): the gradient of the recurrent weight."""
    return dgates.flatten(0, 1).t() @ before.flatten(0, 1)


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """In the widest of their dtypes, as the lowerings compute: under autocast the gates' inputs come in half precision, states and weights do not."""
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in tensors]


# -- LSTM


@torch.library.register_fake("ort_training::lstm_steps", lib=_library)
def _(gx: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor, reverse: bool) -> tuple[Tensor, ...]:
    return tuple(gx.new_empty(gx.shape[0], *h0.shape) for _ in range(6))


@torch.library.register_fake("ort_training::lstm_steps_backward", lib=_library)
def _(dy: Tensor, dc: Tensor, c0: Tensor, w_hh: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    return dy.new_empty(*dy.shape[:2], w_hh.shape[0]), torch.empty_like(c0), torch.empty_like(c0)


@torch.library.impl(_library, "lstm_steps", "CompositeExplicitAutograd")
def _lstm(gx: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor, reverse: bool) -> tuple[Tensor, ...]:
    made = tuple(gx.new_empty(gx.shape[0], *h0.shape) for _ in range(6))
    gx, h, c, w_hh = _in_one_dtype(gx, h0, c0, w_hh)
    for t in _order(len(gx), reverse):
        i, f, g, o = (gx[t] + h @ w_hh.t()).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        for result, value in zip(made, (h, c, i, f, g, o)):
            result[t] = value
    return made


@torch.library.impl(_library, "lstm_steps_backward", "CompositeExplicitAutograd")
def _lstm_backward(
    dy: Tensor, dc: Tensor, c0: Tensor, w_hh: Tensor, cells: Tensor, i: Tensor, f: Tensor, g: Tensor, o: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dgates, state = dy.new_empty(*dy.shape[:2], w_hh.shape[0]), c0.dtype
    dy, dc, c0, w_hh, cells, i, f, g, o = _in_one_dtype(dy, dc, c0, w_hh, cells, i, f, g, o)
    before, bent = previous(cells, c0, reverse), cells.tanh()
    dh_next = torch.zeros_like(c0)
    for t in _order(len(dy), not reverse):
        dh = dh_next + dy[t]
        dc = dc + dh * o[t] * (1 - bent[t] ** 2)
        of_step = torch.cat(
            [
                dc * g[t] * i[t] * (1 - i[t]),
                dc * before[t] * f[t] * (1 - f[t]),
                dc * i[t] * (1 - g[t] ** 2),
                dh * bent[t] * o[t] * (1 - o[t]),
            ],
            -1,
        )
        dgates[t] = of_step
        dh_next, dc = of_step @ w_hh, dc * f[t]
    return dgates, dh_next.to(state), dc.to(state, copy=True)


def _save_lstm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h0, c0, w_hh, ctx.reverse = inputs
    ctx.save_for_backward(h0, c0, w_hh, *output)
    ctx.mark_non_differentiable(*output[2:])


def _lstm_gradients(ctx: Any, dy: Tensor, dcells: Tensor, *_: Any) -> tuple[Any, ...]:
    h0, c0, w_hh, y, cells, *gates = ctx.saved_tensors
    dgates, dh0, dc0 = LSTM_BACKWARD(dy, last(dcells, ctx.reverse), c0, w_hh, cells, *gates, ctx.reverse)
    return dgates, dh0, dc0, _weight_gradient(dgates, previous(y, h0, ctx.reverse)), None


torch.library.register_autograd("ort_training::lstm_steps", _lstm_gradients, setup_context=_save_lstm, lib=_library)


# -- GRU


@torch.library.register_fake("ort_training::gru_steps", lib=_library)
def _(gx: Tensor, h0: Tensor, w_hh: Tensor, b_hh: Tensor | None, reverse: bool) -> tuple[Tensor, ...]:
    return tuple(gx.new_empty(gx.shape[0], *h0.shape) for _ in range(5))


@torch.library.register_fake("ort_training::gru_steps_backward", lib=_library)
def _(dy: Tensor, h0: Tensor, w_hh: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    shape = (*dy.shape[:2], w_hh.shape[0])
    return dy.new_empty(shape), dy.new_empty(shape), torch.empty_like(h0)


@torch.library.impl(_library, "gru_steps", "CompositeExplicitAutograd")
def _gru(gx: Tensor, h0: Tensor, w_hh: Tensor, b_hh: Tensor | None, reverse: bool) -> tuple[Tensor, ...]:
    made = tuple(gx.new_empty(gx.shape[0], *h0.shape) for _ in range(5))
    gx, h, w_hh = _in_one_dtype(gx, h0, w_hh)
    b_hh = b_hh if b_hh is None else b_hh.to(w_hh.dtype)
    for t in _order(len(gx), reverse):
        xr, xz, xn = gx[t].chunk(3, -1)
        hr, hz, q = torch.nn.functional.linear(h, w_hh, b_hh).chunk(3, -1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * q).tanh()
        h = n + z * (h - n)
        for result, value in zip(made, (h, r, z, n, q)):
            result[t] = value
    return made


@torch.library.impl(_library, "gru_steps_backward", "CompositeExplicitAutograd")
def _gru_backward(
    dy: Tensor, h0: Tensor, w_hh: Tensor, y: Tensor, r: Tensor, z: Tensor, n: Tensor, q: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gates, state = dy.dtype, h0.dtype
    dy, h0, w_hh, y, r, z, n, q = _in_one_dtype(dy, h0, w_hh, y, r, z, n, q)
    new = (1 - z) * (1 - n * n)
    of_reset, of_update = new * q * r * (1 - r), (previous(y, h0, reverse) - n) * z * (1 - z)
    dh_all, dh_next = torch.empty_like(y), torch.zeros_like(h0)
    for t in _order(len(dy), not reverse):
        dh = dh_all[t] = dh_next + dy[t]
        dh_next = torch.cat([dh * of_reset[t], dh * of_update[t], dh * new[t] * r[t]], -1) @ w_hh + dh * z[t]
    reset, update, dn = dh_all * of_reset, dh_all * of_update, dh_all * new
    return torch.cat([reset, update, dn], -1).to(gates), torch.cat([reset, update, dn * r], -1).to(gates), dh_next.to(state)


def _save_gru(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h0, w_hh, b_hh, ctx.reverse = inputs
    ctx.has_bias = b_hh is not None
    ctx.save_for_backward(h0, w_hh, *output)
    ctx.mark_non_differentiable(*output[1:])


def _gru_gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    h0, w_hh, y, *gates = ctx.saved_tensors
    dgx, dgh, dh0 = GRU_BACKWARD(dy, h0, w_hh, y, *gates, ctx.reverse)
    return dgx, dh0, _weight_gradient(dgh, previous(y, h0, ctx.reverse)), dgh.sum([0, 1]) if ctx.has_bias else None, None


torch.library.register_autograd("ort_training::gru_steps", _gru_gradients, setup_context=_save_gru, lib=_library)


# -- RNN


@torch.library.register_fake("ort_training::rnn_steps", lib=_library)
def _(gx: Tensor, h0: Tensor, w_hh: Tensor, relu: bool, reverse: bool) -> Tensor:
    return gx.new_empty(gx.shape[0], *h0.shape)


@torch.library.register_fake("ort_training::rnn_steps_backward", lib=_library)
def _(dy: Tensor, w_hh: Tensor, y: Tensor, relu: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape[1:])


@torch.library.impl(_library, "rnn_steps", "CompositeExplicitAutograd")
def _rnn(gx: Tensor, h0: Tensor, w_hh: Tensor, relu: bool, reverse: bool) -> Tensor:
    y = gx.new_empty(gx.shape[0], *h0.shape)
    gx, h, w_hh = _in_one_dtype(gx, h0, w_hh)
    for t in _order(len(gx), reverse):
        sum_ = gx[t] + h @ w_hh.t()
        h = y[t] = sum_.relu() if relu else sum_.tanh()
    return y


@torch.library.impl(_library, "rnn_steps_backward", "CompositeExplicitAutograd")
def _rnn_backward(dy: Tensor, w_hh: Tensor, y: Tensor, relu: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    dgates = torch.empty_like(y)
    dy, w_hh, y = _in_one_dtype(dy, w_hh, y)
    slope = (y > 0).to(y.dtype) if relu else 1 - y * y
    dh_next = torch.zeros_like(y[0])
    for t in _order(len(dy), not reverse):
        dgates[t] = of_step = (dh_next + dy[t]) * slope[t]
        dh_next = of_step @ w_hh
    return dgates, dh_next.to(dgates.dtype)


def _save_rnn(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, h0, w_hh, ctx.relu, ctx.reverse = inputs
    ctx.save_for_backward(h0, w_hh, output)


def _rnn_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    h0, w_hh, y = ctx.saved_tensors
    dgates, dh0 = RNN_BACKWARD(dy, w_hh, y, ctx.relu, ctx.reverse)
    return dgates, dh0, _weight_gradient(dgates, previous(y, h0, ctx.reverse)), None, None


torch.library.register_autograd("ort_training::rnn_steps", _rnn_gradients, setup_context=_save_rnn, lib=_library)
