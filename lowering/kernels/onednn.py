"""oneDNN's kernels of an LSTM in float32 or bfloat16 on the CPU, as PyTorch has them: one layer and direction, forward and backward.

The size of an LSTM's workspace is oneDNN's secret, so that it does not travel through the graph: a handle does, whose memory, once given back, frees
it. States are (1, B, H), as the kernels take and give them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ort_backend.lowering.tracing import second_derivatives

aten = torch.ops.aten

_library = torch.library.Library("ort_training", "FRAGMENT")
_WEIGHTS = "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh"
_library.define(f"onednn_lstm(Tensor x, Tensor h0, Tensor c0, {_WEIGHTS}, bool reverse, bool keep) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"onednn_lstm_backward(Tensor dy, Tensor dhn, Tensor dcn, Tensor x, Tensor h0, Tensor c0, {_WEIGHTS}, Tensor y, Tensor hn, Tensor cn,"
    " Tensor handle, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
ONEDNN_LSTM = torch.ops.ort_training.onednn_lstm.default
ONEDNN_LSTM_BACKWARD = torch.ops.ort_training.onednn_lstm_backward.default

_LSTM_KIND = 2  # ideep::rnn_kind::LSTM (third_party/ideep/include/ideep/abstract_types.hpp)
_numbers = itertools.count()
_workspaces: dict[int, tuple[Tensor, weakref.ref[np.ndarray]]] = {}


def _biases(w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> tuple[Tensor, Tensor]:
    """The biases, or what ATen's kernels take in their place."""
    return torch.zeros_like(w_ih) if b_ih is None else b_ih, torch.zeros_like(w_hh) if b_hh is None else b_hh


@torch.library.register_fake("ort_training::onednn_lstm", lib=_library)
def _(x: Tensor, h0: Tensor, c0: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape[0], *h0.shape[1:]), h0.new_empty(h0.shape), c0.new_empty(c0.shape), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.impl(_library, "onednn_lstm", "CompositeExplicitAutograd")
def _forward(
    x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, reverse: bool, keep: bool
) -> tuple[Tensor, ...]:
    biases = _biases(w_ih, w_hh, b_ih, b_hh)
    states = h0.contiguous(), c0.contiguous()
    shape: tuple[Any, ...] = ([], _LSTM_KIND, h0.shape[-1], 1, b_ih is not None, False, False, keep)
    with torch.set_grad_enabled(keep):  # without, there is no workspace, whatever `train` says (seen in torch 2.13)
        y, hn, cn, workspace = aten.mkldnn_rnn_layer.default(x.contiguous(), w_ih, w_hh, *biases, *states, reverse, *shape)
    key = next(_numbers)
    memory = np.array(key)
    if keep:
        _workspaces[key] = workspace, weakref.ref(memory, lambda _: _workspaces.pop(key, None))
    return y, hn, cn, torch.from_numpy(memory)


@torch.library.register_fake("ort_training::onednn_lstm_backward", lib=_library)
def _(dy: Tensor, dhn: Tensor, dcn: Tensor, x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return (*(one.new_empty(one.shape) for one in (x, h0, c0, w_ih, w_hh)), w_hh.new_empty(w_hh.shape[0]))


@torch.library.impl(_library, "onednn_lstm_backward", "CompositeExplicitAutograd")
def _backward(
    dy: Tensor,
    dhn: Tensor,
    dcn: Tensor,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    y: Tensor,
    hn: Tensor,
    cn: Tensor,
    handle: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    biases = _biases(w_ih, w_hh, b_ih, b_hh)
    states = [one.contiguous() for one in (h0, c0, y, hn, cn, dy, dhn, dcn)]
    shape: tuple[Any, ...] = (_LSTM_KIND, h0.shape[-1], 1, b_ih is not None, True, False, [], False)
    if handle.item() not in _workspaces:  # hooks on saved tensors have copied the handle, and freed what it was for
        *_, handle = _forward(x, h0, c0, w_ih, w_hh, b_ih, b_hh, reverse, True)
    workspace, _ = _workspaces[handle.item()]  # type: ignore[index]
    dx, dw_ih, dw_hh, db, _, dh0, dc0 = aten.mkldnn_rnn_layer_backward.default(
        x.contiguous(), w_ih, w_hh, *biases, *states, reverse, *shape, workspace
    )
    results = dx, dh0, dc0, dw_ih, dw_hh, db.flatten()[: w_hh.shape[0]]
    return tuple(one.to(x.dtype) for one in results)  # they are float32, also of bfloat16, where autograd makes that of them in eager PyTorch


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.reverse, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[3])


def _gradients(ctx: Any, dy: Tensor, dhn: Tensor, dcn: Tensor, _: Any) -> tuple[Any, ...]:
    dx, dh0, dc0, dw_ih, dw_hh, db = ONEDNN_LSTM_BACKWARD(dy, dhn, dcn, *ctx.saved_tensors, ctx.reverse)
    db = db if ctx.saved_tensors[5] is not None else None
    return dx, dh0, dc0, dw_ih, dw_hh, db, db, None, None


torch.library.register_autograd("ort_training::onednn_lstm", _gradients, setup_context=_save, lib=_library)
second_derivatives.refuse("onednn_lstm_backward", "a recurrent layer", _library)


def is_on() -> bool:
    """Whether this PyTorch has oneDNN's kernels, and they are not turned off (`torch.backends.mkldnn.flags`)."""
    return torch.backends.mkldnn.is_available() and bool(torch._C._get_mkldnn_enabled())


# What a node calls: without PyTorch's dispatcher, whose layers in Python take as long as a small kernel.
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {ONEDNN_LSTM: _forward, ONEDNN_LSTM_BACKWARD: _backward}
