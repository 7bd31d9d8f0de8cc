"""The steps of recurrent layers (`recurrence`) as ONNX Scans: one matrix product and a few small nodes a step, forward and backward.

ONNX Runtime's own kernels are not used: `LSTMGrad` and `GRUGrad` (1.19.2) multiply one row at a time and are many times as slow,
`LSTMTraining` and `GRUTraining` are slower than a Scan from a hidden size of about 256.
What does not depend on the step before is computed for all steps at once.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ort_backend.lowering.axes import refuse_empty
from ort_backend.lowering.constants import int64s, scalar_like
from ort_backend.lowering.microsoft import typed
from ort_backend.lowering.registry import register
from ort_backend.lowering.scan import Body, scan
from ort_backend.lowering.tracing.recurrence import GRU, GRU_BACKWARD, LSTM, LSTM_BACKWARD, RNN, RNN_BACKWARD


def _zeros(op: Any, like: ir.Value) -> ir.Value:
    return typed(op.Mul(like, scalar_like(op, 0.0, like)), like.dtype, like.shape)


def _like(value: ir.Value, other: ir.Value) -> ir.Value:
    return typed(value, other.dtype, other.shape)


def _previous(op: Any, states: ir.Value, initial: ir.Value, reverse: bool) -> ir.Value:
    """The state in front of each step."""
    front = op.Unsqueeze(initial, int64s(op, [0]))
    start, end = ([1], [2**62]) if reverse else ([0], [-1])
    rest = op.Slice(states, int64s(op, start), int64s(op, end), int64s(op, [0]))
    return _like(op.Concat(*([rest, front] if reverse else [front, rest]), axis=0), states)


def _bent(op: Any, value: ir.Value) -> ir.Value:
    """The slope of a sigmoid, from its result."""
    return op.Mul(value, op.Sub(scalar_like(op, 1.0, value), value))


def _flat(op: Any, value: ir.Value) -> ir.Value:
    """The slope of a tanh, from its result."""
    return op.Sub(scalar_like(op, 1.0, value), op.Mul(value, value))


@register(LSTM)
def lstm_steps(op, gx, h0, c0, w_hh, reverse):
    """lstm_steps(Tensor gx, Tensor h0, Tensor c0, Tensor w_hh, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"""
    refuse_empty("recurrent layers", gx)

    def step(body: Body, states: list[ir.Value], rows: list[ir.Value], weights: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        h, c = states
        i, f, g, o = body("Split", body("Gemm", h, weights[0], rows[0], transB=1), outputs=4, axis=-1, num_outputs=4)
        i, f, g, o = body("Sigmoid", i), body("Sigmoid", f), body("Tanh", g), body("Sigmoid", o)
        c = body("Add", body("Mul", f, c), body("Mul", i, g))
        h = body("Mul", o, body("Tanh", c))
        return [h, c], [h, c, i, f, g, o]

    return scan(op, step, [h0, c0], [gx], [w_hh], ranks=[3] * 6, reverse=reverse)[2:]


@register(LSTM_BACKWARD)
def lstm_steps_backward(op, dy, dc, c0, w_hh, cells, i, f, g, o, reverse):
    """lstm_steps_backward(Tensor dy, Tensor dc, Tensor c0, Tensor w_hh, Tensor cells, Tensor i, Tensor f, Tensor g, Tensor o, bool reverse)
    -> (Tensor, Tensor, Tensor)
    """
    refuse_empty("recurrent layers", dy)
    bent = op.Tanh(cells)
    slopes = [
        op.Mul(o, _flat(op, bent)),
        op.Mul(g, _bent(op, i)),
        op.Mul(_previous(op, cells, c0, reverse), _bent(op, f)),
        op.Mul(i, _flat(op, g)),
        op.Mul(bent, _bent(op, o)),
    ]

    def step(body: Body, states: list[ir.Value], rows: list[ir.Value], weights: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        (dh, dc), (dy, forget, of_cell, *of_gates) = states, rows
        dh = body("Add", dh, dy)
        dc = body("Add", dc, body("Mul", dh, of_cell))
        parts = [body("Mul", by, slope) for by, slope in zip((dc, dc, dc, dh), of_gates)]
        dgates = body("Concat", *parts, axis=-1)
        return [body("MatMul", dgates, weights[0]), body("Mul", dc, forget)], [dgates]

    dh0, dc0, dgates = scan(
        op, step, [_zeros(op, c0), dc], [dy, f, *(_like(slope, cells) for slope in slopes)], [w_hh], ranks=[3], reverse=not reverse
    )
    return dgates, dh0, dc0


@register(GRU)
def gru_steps(op, gx, h0, w_hh, b_hh, reverse):
    """gru_steps(Tensor gx, Tensor h0, Tensor w_hh, Tensor? b_hh, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""
    refuse_empty("recurrent layers", gx)

    def step(body: Body, states: list[ir.Value], rows: list[ir.Value], weights: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        (h,) = states
        gh = body("Gemm", h, *(one for one in weights if one is not None), transB=1)
        xr, xz, xn = body("Split", rows[0], outputs=3, axis=-1, num_outputs=3)
        hr, hz, q = body("Split", gh, outputs=3, axis=-1, num_outputs=3)
        r, z = body("Sigmoid", body("Add", xr, hr)), body("Sigmoid", body("Add", xz, hz))
        n = body("Tanh", body("Add", xn, body("Mul", r, q)))
        h = body("Add", n, body("Mul", z, body("Sub", h, n)))
        return [h], [h, r, z, n, q]

    return scan(op, step, [h0], [gx], [w_hh, b_hh], ranks=[3] * 5, reverse=reverse)[1:]


@register(GRU_BACKWARD)
def gru_steps_backward(op, dy, h0, w_hh, y, r, z, n, q, reverse):
    """gru_steps_backward(Tensor dy, Tensor h0, Tensor w_hh, Tensor y, Tensor r, Tensor z, Tensor n, Tensor q, bool reverse)
    -> (Tensor, Tensor, Tensor)
    """
    refuse_empty("recurrent layers", dy)
    of_new = op.Mul(op.Sub(scalar_like(op, 1.0, z), z), _flat(op, n))
    of_reset = op.Mul(op.Mul(of_new, q), _bent(op, r))
    of_update = op.Mul(op.Sub(_previous(op, y, h0, reverse), n), _bent(op, z))
    by_gate = [_like(one, y) for one in (of_reset, of_update, op.Mul(of_new, r))]

    def step(body: Body, states: list[ir.Value], rows: list[ir.Value], weights: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        dy, update, *slopes = rows
        dh = body("Add", states[0], dy)
        dgh = body("Concat", *(body("Mul", dh, slope) for slope in slopes), axis=-1)
        return [body("Add", body("MatMul", dgh, weights[0]), body("Mul", dh, update))], [dh, dgh]

    dh0, dh, dgh = scan(op, step, [_zeros(op, h0)], [dy, z, *by_gate], [w_hh], ranks=[3] * 2, reverse=not reverse)
    dgx = op.Concat(op.Mul(dh, of_reset), op.Mul(dh, of_update), op.Mul(dh, of_new), axis=-1)
    return dgx, dgh, dh0


@register(RNN)
def rnn_steps(op, gx, h0, w_hh, relu, reverse):
    """rnn_steps(Tensor gx, Tensor h0, Tensor w_hh, bool relu, bool reverse) -> Tensor"""
    refuse_empty("recurrent layers", gx)

    def step(body: Body, states: list[ir.Value], rows: list[ir.Value], weights: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        h = body("Relu" if relu else "Tanh", body("Gemm", states[0], weights[0], rows[0], transB=1))
        return [h], [h]

    return scan(op, step, [h0], [gx], [w_hh], ranks=[3], reverse=reverse)[1]


@register(RNN_BACKWARD)
def rnn_steps_backward(op, dy, w_hh, y, relu, reverse):
    """rnn_steps_backward(Tensor dy, Tensor w_hh, Tensor y, bool relu, bool reverse) -> (Tensor, Tensor)"""
    refuse_empty("recurrent layers", dy)
    slope = op.Cast(op.Greater(y, scalar_like(op, 0.0, y)), to=y.dtype) if relu else _flat(op, y)
    first = op.Squeeze(op.Slice(y, int64s(op, [0]), int64s(op, [1]), int64s(op, [0])), int64s(op, [0]))
    nothing = _zeros(op, typed(first, y.dtype, y.shape[1:]))

    def step(body: Body, states: list[ir.Value], rows: list[ir.Value], weights: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        dgates = body("Mul", body("Add", states[0], rows[0]), rows[1])
        return [body("MatMul", dgates, weights[0])], [dgates]

    dh0, dgates = scan(op, step, [nothing], [dy, _like(slope, y)], [w_hh], ranks=[3], reverse=not reverse)
    return dgates, dh0
