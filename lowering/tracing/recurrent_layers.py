"""`aten::lstm`, `gru`, `rnn_tanh` and `rnn_relu`, traced as one operator for each layer and direction, and cells, traced as plain operators.

The walk over layers and directions is eager PyTorch's, and dropout is drawn between the layers as eager draws it, which PyTorch's own Python
decomposition forgets (torch 2.13). Packed sequences (`lstm.data`, ...) and LSTMs with projections keep that decomposition, as does all that may be
differentiated twice.

On CUDA the layers are cuDNN's where it takes them, as in eager PyTorch. There, PyTorch takes a cell apart into operators that only CUDA has, of which
a GRU's has no shape function (torch 2.13).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch.nn.functional import linear

from ort_backend.lowering.kernels import cudnn, dense_products, kernel_choice
from ort_backend.lowering.kernels.onednn import ONEDNN_LSTM
from ort_backend.lowering.symbolic import hint
from ort_backend.lowering.tracing import second_derivatives
from ort_backend.lowering.tracing.composites import replaced_kernel
from ort_backend.lowering.tracing.recurrence import GRU, LSTM, RNN, last

aten = torch.ops.aten

_ABOVE_TRACER = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)

# (inputs (T, B, I), initial states (1, B, H), weights, reverse) -> hidden states (T, B, H), final states (1, B, H)
Layer = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], bool], tuple[Tensor, Sequence[Tensor]]]


@contextlib.contextmanager
def whole_recurrent_layers(*, onednn: bool) -> Iterator[None]:
    """While AOTAutograd traces: recurrent layers are one operator each.

    Args:
        onednn: Whether LSTMs on the CPU run by oneDNN's kernels, as in eager PyTorch.
    """
    layers = {} if second_derivatives.are_asked_for() else _kernels(onednn=onednn)
    with contextlib.ExitStack() as stack:
        for target, kernel in layers.items():
            for key in _ABOVE_TRACER:
                stack.enter_context(replaced_kernel(target, key, kernel))
        for target, kernel in _CELLS.items():
            stack.enter_context(replaced_kernel(target, DispatchKey.CompositeImplicitAutograd, kernel))
        yield


def keep_whole_in_dynamo(is_our_compile: Callable[[], bool]) -> None:
    """Makes Dynamo, while it traces for us, learn the shapes of a recurrent layer from the whole layer, and those of a cell from its operators.

    PyTorch's decomposition of a layer walks over the steps, so that a symbolic length becomes a number there (read in torch 2.13).
    """
    composite = DispatchKey.CompositeImplicitAutograd

    def is_whole() -> bool:
        return is_our_compile() and not second_derivatives.are_asked_for()

    layers = _kernels(onednn=False).items()
    found = [(target, key, is_whole, kernel, target.py_kernels.get(key)) for target, kernel in layers for key in _ABOVE_TRACER]
    found += [(target, composite, is_our_compile, kernel, functools.partial(target._op_dk, composite)) for target, kernel in _CELLS.items()]
    for target, key, are_ours, kernel, before in found:
        if before is not None:
            target.py_kernels[key] = functools.partial(_either, are_ours, kernel, before)
            target._dispatch_cache.clear()


def _either(are_ours: Callable[[], bool], ours: Callable[..., Any], theirs: Any, *args: Any, **kwargs: Any) -> Any:
    return (ours if are_ours() else theirs)(*args, **kwargs)


def _kernels(*, onednn: bool) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    return {
        aten.lstm.input: functools.partial(_lstm, onednn),
        aten.gru.input: _gru,
        aten.rnn_tanh.input: _rnn(relu=False),
        aten.rnn_relu.input: _rnn(relu=True),
    }


def _lstm(onednn: bool, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, *rest: Any) -> tuple[Tensor, ...]:
    if hx[0].size(2) != hx[1].size(2) or input.numel() == 0:  # projections
        return decomposition_table[aten.lstm.input](input, hx, params, has_biases, *rest)
    tensors = (input, *hx, *params)
    length, batch = input.shape[1::-1] if rest[-1] else input.shape[:2]
    sizes = [hint(size) for size in (length, batch, hx[0].size(2))]
    if cudnn.is_for(*tensors):
        y, finals = _layers(functools.partial(cudnn.layer, cudnn.LSTM), input, hx, params, has_biases, *rest)
        return (y, *finals)
    dtype = _onednn_dtype(tensors) if onednn else None
    if dtype is None or not kernel_choice.lstm_by_onednn(*sizes, trains=dtype is torch.float32 and _has_gradient(tensors)):
        y, finals = _layers(_lstm_layer, input, hx, params, has_biases, *rest)
    else:
        states, weights = [one.to(dtype) for one in hx], [one.to(dtype) for one in params]
        y, finals = _layers(_onednn_layer, input.to(dtype), states, weights, has_biases, *rest)
    return (y, *finals)


def _onednn_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype in which oneDNN's kernels compute a layer, as in eager PyTorch: under autocast that one's; None where they do not run, or slowly."""
    dtypes = {one.dtype for one in tensors}
    if torch.is_autocast_enabled("cpu") and dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        dtypes = {torch.get_autocast_dtype("cpu")}
    if len(dtypes) > 1 or any(one.device.type != "cpu" for one in tensors):
        return None
    (dtype,) = dtypes
    return dtype if dtype is torch.float32 or (dtype is torch.bfloat16 and dense_products.processor_multiplies_bfloat16()) else None


def _gru(input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, *rest: Any) -> tuple[Tensor, ...]:
    layer = functools.partial(cudnn.layer, cudnn.GRU) if cudnn.is_for(input, hx, *params) else _gru_layer
    y, finals = _layers(layer, input, [hx], params, has_biases, *rest)
    return (y, *finals)


def _rnn(relu: bool) -> Callable[..., tuple[Tensor, ...]]:
    def layer(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Sequence[Tensor]]:
        w_ih, w_hh, *biases = weights
        y = RNN(linear(x, w_ih, _sum(biases)), states[0].squeeze(0), w_hh, relu, reverse)
        return y, _finals(reverse, y)

    def whole(input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, *rest: Any) -> tuple[Tensor, ...]:
        fast = functools.partial(cudnn.layer, cudnn.RELU if relu else cudnn.TANH)
        y, finals = _layers(fast if cudnn.is_for(input, hx, *params) else layer, input, [hx], params, has_biases, *rest)
        return (y, *finals)

    return whole


def _layers(
    layer: Layer,
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of the last layer, and each kind of final state, (layers * directions, B, H), in memory of their own as in eager PyTorch."""
    x = input.transpose(0, 1) if batch_first else input
    initial = list(zip(*(states.split(1) if states.size(0) > 1 else [states] for states in hx)))
    size, finals = 4 if has_biases else 2, []
    weights = [params[i : i + size] for i in range(0, len(params), size)]
    for number in range(num_layers):
        ways = []
        for direction in range(1 + bidirectional):
            at = number * (1 + bidirectional) + direction
            y, final = layer(x, initial[at], weights[at], bool(direction))
            ways.append(y)
            finals.append(final)
        x = torch.cat(ways, -1) if bidirectional else ways[0]
        if dropout != 0 and train and number < num_layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return x.transpose(0, 1) if batch_first else x, [torch.cat(kind) for kind in zip(*finals)]


def _lstm_layer(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Sequence[Tensor]]:
    w_ih, w_hh, *biases = weights
    y, cells, *_ = LSTM(linear(x, w_ih, _sum(biases)), *(one.squeeze(0) for one in states), w_hh, reverse)
    return y, _finals(reverse, y, cells)


def _onednn_layer(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Sequence[Tensor]]:
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)
    y, *finals, _ = ONEDNN_LSTM(x, *states, w_ih, w_hh, b_ih, b_hh, reverse, _has_gradient((x, *states, *weights)))
    return y, finals


def _has_gradient(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


def _gru_layer(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Sequence[Tensor]]:
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)
    gates, state = linear(x, w_ih, b_ih), states[0].squeeze(0)
    gates = gates.to(torch.promote_types(gates.dtype, state.dtype))  # under autocast states stay wide in eager PyTorch, which adds to the one before
    y, *_ = GRU(gates, state, w_hh, b_hh, reverse)
    return y, _finals(reverse, y)


def _finals(reverse: bool, *states: Tensor) -> list[Tensor]:
    return [last(one, reverse).unsqueeze(0) for one in states]


def _sum(biases: Sequence[Tensor]) -> Tensor | None:
    return biases[0] + biases[1] if biases else None


# Cells: (B, I) and states (B, H) -> states, in the order of operations of PyTorch's kernels for the CPU.


def _lstm_cell(
    input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    hidden, cell = hx
    i, f, g, o = (linear(hidden, w_hh, b_hh) + linear(input, w_ih, b_ih)).chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru_cell(input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Tensor:
    r, z, n = linear(input, w_ih, b_ih).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = linear(hx, w_hh, b_hh).chunk(3, 1)
    new = (n + hidden_n * (hidden_r + r).sigmoid()).tanh()
    return (hx - new) * (hidden_z + z).sigmoid() + new


_CELLS: dict[torch._ops.OpOverload, Callable[..., Any]] = {aten.lstm_cell.default: _lstm_cell, aten.gru_cell.default: _gru_cell}
