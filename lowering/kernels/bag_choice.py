"""Embedding bags whose kernels are PyTorch's: many numbers to add up, maxima whose places a gradient goes to, gradients of large tables.

ONNX Runtime gathers the rows that bags are made of, numbers the bag of each, and adds them up one row after the other; PyTorch's kernel reads a row
once. Microseconds that PyTorch's forward saved, of 64 to 51,200 rows of 16 to 128 numbers (onnxruntime-training 1.19.2, torch 2.13; AMD EPYC of
family 25, model 17): 0.0004 to 0.0007 for a number, 0.02 to 0.025 for a row, less 60. A backward on ONNX Runtime numbers the bags as well, so that
the rows count where that is PyTorch's, or there is none.

A gradient of the table is made of zeros, copied, and added to by ONNX Runtime: 0.25 to 0.9 ns for a number of the table more than PyTorch's kernel
takes, which for a row takes 0.03 to 0.07 microseconds more. Of maxima the places take most of the time: for 655,360 numbers 3.0 ms with them, 0.4
without, by PyTorch 1.4 either way.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of
from ort_backend.lowering.symbolic import hint

aten = torch.ops.aten

_MAX = 2  # ATen's number for that mode
_LARGE_MAXIMA = 65536  # numbers of rows from which on maxima whose places are read are PyTorch's

# Microseconds.
_CALL = 30.0  # beyond what a caller's margin has
_ROW, _NUMBER = 0.02, 0.0004  # forward: of ONNX Runtime's
_SCATTERED_ROW, _NUMBER_OF_TABLE = 0.07, 0.00025  # backward: of PyTorch's, and of ONNX Runtime's


def is_faster_in_pytorch(node: fx.Node, margin: float) -> bool:
    """Whether a node is an embedding bag in float32, or its gradient, for which PyTorch takes less time, by more than `margin` microseconds.

    A symbolic size counts as its example.
    """
    if node.target is aten._embedding_bag_backward.default:
        return _scatters_into_much(node, margin)
    if node.target not in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
        return False
    given = arguments_of(node)
    table, indices = given["weight"].meta["val"], given["indices"].meta["val"]
    if table.dtype is not torch.float32:
        return False
    rows = hint(indices.shape[0])
    numbers = rows * hint(table.shape[1])
    if given["mode"] == _MAX:
        return _reads(node, 3) and numbers >= _LARGE_MAXIMA
    numbered_once = _reads(node, 1) and not given["sparse"]
    return numbers * _NUMBER + (0 if numbered_once else rows * _ROW) > _CALL + margin


def _reads(node: fx.Node, result: int) -> bool:
    return any(user.target is operator.getitem and user.args[1] == result and user.users for user in node.users)


def _scatters_into_much(node: fx.Node, margin: float) -> bool:
    given: dict[str, Any] = arguments_of(node)
    gradient: torch.Tensor = node.meta["val"]
    if given["sparse"] or given["mode"] == _MAX or gradient.dtype is not torch.float32:
        return False
    rows = hint(given["indices"].meta["val"].shape[0])
    return hint(gradient.shape[0]) * hint(gradient.shape[1]) * _NUMBER_OF_TABLE > rows * _SCATTERED_ROW + _CALL + margin
