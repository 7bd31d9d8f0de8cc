"""Permutations of dimensions, of which two that follow each other are written as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir


def permuted(op: Any, value: ir.Value, order: Sequence[int]) -> ir.Value:
    """`value` with its dimensions in another order; what a Transpose has been made of, where the two cancel out."""
    order = list(order)
    kind, shape = value.type, _in_order(value.shape, order)
    if (first := permutation_of(value)) is not None:
        source = value.producer().inputs[0]  # type: ignore[union-attr]
        assert source is not None
        if source.type is None or source.shape is None:
            source.type, source.shape = kind, _in_order(value.shape, inverse(first))
        value, order = source, [first[d] for d in order]
    if order == list(range(len(order))):
        return value
    made = op.Transpose(value, perm=order)
    made.type, made.shape = kind, shape
    return made


def permutation_of(value: ir.Value) -> tuple[int, ...] | None:
    """The permutation that has made `value`; None where no Transpose has."""
    producer = value.producer()
    if producer is None or producer.op_type != "Transpose" or "perm" not in producer.attributes:
        return None
    return tuple(producer.attributes["perm"].as_ints())


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `order`."""
    return tuple(order.index(d) for d in range(len(order)))


def _in_order(shape: ir.Shape | None, order: Sequence[int]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([shape[d] for d in order])
