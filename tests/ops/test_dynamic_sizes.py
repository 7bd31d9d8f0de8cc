"""One graph for every size: traced with symbolic sizes, run with those of the trace and with others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.harness import check

aten = torch.ops.aten
R = torch.randn


def I(bound: int, *size: int) -> torch.Tensor:  # noqa: E743
    return torch.randint(0, bound, size)


_OF_ONE = {
    "add": lambda t: t + t.shape[1],
    "mul f": lambda t: t * (t.shape[1] ** -0.5),
    "view": lambda t: t.view(t.shape[0], -1),
    "view2": lambda t: t.view(t.shape[0] * t.shape[1], t.shape[2]),
    "view3": lambda t: t.reshape(t.shape[0], 1, t.shape[1] * t.shape[2]),
    "view4": lambda t: t.reshape(-1).view(t.shape),
    "transpose and merge": lambda t: t.transpose(1, 2).reshape(t.shape[0], t.shape[1] * t.shape[2]),
    "expand": lambda t: t[:, :1].expand(-1, t.shape[1], -1),
    "expand2": lambda t: t[0].expand(t.shape[0], *t.shape[1:]),
    "expand3": lambda t: t.sum().expand(t.shape),
    "slice": lambda t: t[:, : t.shape[1] - 2],
    "slice2": lambda t: t[:, -2:],
    "slice3": lambda t: t[:, t.shape[0] :],
    "slice4": lambda t: t[:, ::2],
    "select": lambda t: t[:, -1],
    "split with sizes": lambda t: t.split([2, t.shape[1] - 2], 1),
    "cat": lambda t: torch.cat([t, t[:, :2]], 1),
    "stack": lambda t: torch.stack([t, t], 1),
    "flip": lambda t: t.flip(1),
    "roll": lambda t: t.roll((1, -2), (1, 2)),
    "roll2": lambda t: t.roll(t.shape[0], 1),
    "roll3": lambda t: t.roll(3),
    "repeat": lambda t: t.repeat(1, t.shape[0], 2),
    "pad": lambda t: F.pad(t, (1, t.shape[0])),
    "pad2": lambda t: F.pad(t, (0, 10 - t.shape[2])),
    "tril": lambda t: t.tril(),
    "causal mask of ones": lambda t: torch.ones(t.shape[1], t.shape[1]).tril(t.shape[0]),
    "mean": lambda t: t.mean((0, 1)),
    "mean of all": lambda t: t.mean(),
    "var": lambda t: t.var(1),
    "var of all": lambda t: t.var(),
    "sum": lambda t: t.sum(-1),
    "amax": lambda t: t.amax(-1),
    "argmax": lambda t: t.argmax(),
    "max": lambda t: t.max(1),
    "any": lambda t: (t > 0).any(1),
    "cumsum": lambda t: t.cumsum(1),
    "norm": lambda t: t.norm(dim=1),
    "clamp": lambda t: (5 * t).clamp(1, t.shape[1] - 2) + (9 * t).clamp(-t.shape[0], t.shape[1]),
    "clamp at a higher minimum": lambda t: t.clamp(t.shape[1], 1),
    "zeros": lambda t: torch.zeros(t.shape),
    "like": lambda t: (torch.zeros_like(t), t.new_ones(t.shape[0], 4), torch.full_like(t, 3)),
    "full": lambda t: torch.full((t.shape[0],), t.shape[1]),
    "arange": lambda t: (
        torch.arange(t.shape[1]),
        torch.arange(2, t.shape[1]),
        torch.arange(t.shape[1], dtype=torch.float32),
        torch.arange(0, t.shape[1], 2),
    ),
    "eye": lambda t: torch.eye(t.shape[1]),
    "scalar_tensor": lambda t: torch.scalar_tensor(t.shape[1]),
    "where": lambda t: torch.where(t > 0, t, t.shape[0]),
    "causal": lambda t: torch.where(torch.arange(t.shape[1])[:, None] >= torch.arange(t.shape[1]), 0.0, -float("inf")),
    "masked_fill": lambda t: t.masked_fill(t > 0, 1.0),
    "copy": lambda t: aten.copy(t, t[0]),
    "mean by numel": lambda t: t.sum() / t.numel(),
    "sort": lambda t: t.sort(1),
    "topk": lambda t: t.topk(t.shape[0], 1),
    "squeeze": lambda t: t[:, None].squeeze(1),
    "squeeze all": lambda t: t[:, None].squeeze(),
    "count": lambda t: (t > 0).long().sum(),
    "slice_scatter": lambda t: torch.slice_scatter(t, t[:, 1:3] * 2, 1, 1, 3),
    "slice_scatter to the end": lambda t: torch.slice_scatter(t, t[:, 2:] * 2, 1, 2),
    "select_scatter": lambda t: torch.select_scatter(t, t[:, 0] * 2, 1, -1),
    "select_scatter dynamic": lambda t: torch.select_scatter(t, t[:, 0] * 2, 1, t.shape[0]),
    "unfold": lambda t: t.unfold(1, 2, 1),
    "logsumexp": lambda t: t.logsumexp(1),
    "less than a size": lambda t: torch.arange(t.shape[1]) < t.shape[0],
    "pow": lambda t: t.abs() ** (1 / t.shape[1]),
    "rounded up": lambda t: F.pad(t, (0, 0, 0, -t.shape[1] % 4)).view(t.shape[0], -(-t.shape[1] // 4), -1),
    "negative numbers divided": lambda t: (torch.full((2,), (3 - t.shape[1]) // 4), torch.full((2,), t.shape[1] // (1 - t.shape[0]))),
    "remainders of negative numbers": lambda t: (torch.full((2,), (3 - t.shape[1]) % 4), torch.full((2,), t.shape[1] % -4)),
    "fractions divided": lambda t: (torch.full((2,), (3.5 - t.shape[1]) // 2), torch.full((2,), (3.5 - t.shape[1]) % 2)),
    "negative fractions cut off": lambda t: [torch.full((2,), cut((3.5 - t.shape[1]) / 2)) for cut in (math.trunc, math.floor, math.ceil)],
    "rounded to even, and to digits": lambda t: [
        torch.full((2,), one) for one in (round(t.shape[1] / 2), round(t.shape[2] / 2), round(t.shape[1] / 7, 2))
    ],
    "absolute": lambda t: (torch.full((2,), abs(4 - t.shape[1])), torch.full((2,), abs(4.5 - t.shape[1] / 2))),
    "bits": lambda t: [torch.full((2,), one) for one in (t.shape[1] & 6, t.shape[1] | 8, t.shape[1] ^ 3)],
}


@pytest.mark.parametrize("name", _OF_ONE)
def test_one_tensor(name: str) -> None:
    check(_OF_ONE[name], R(3, 5, 6), dynamic=True, other=(R(4, 7, 8),))


@pytest.mark.parametrize("name", ["sqrt", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh"])
def test_functions_of_sizes(name: str) -> None:
    function = getattr(torch, f"_sym_{name}")
    check(lambda t: torch.full((2,), function(t.shape[1] / 7), dtype=torch.float64), R(3, 5), dynamic=True, other=(R(4, 9),))


@pytest.mark.parametrize("rows", [8, 9, 2**9, 2**9 + 1])
def test_the_next_power_of_two(rows: int) -> None:
    # The quotient of logarithms is a step above 29, in float64, for 2**29.
    check(lambda t: torch.full((2,), 2 ** math.ceil(torch._sym_log2(t.shape[0] * 2.0**20))), R(5), dynamic=True, other=(R(rows),))


# Function, arguments of the trace, other arguments.
_OF_SEVERAL: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {
    "slice_backward": (
        lambda g, t: aten.slice_backward(g, t.shape, 1, 1, 9223372036854775807, 1),
        (R(3, 4, 6), R(3, 5, 6)),
        (R(4, 6, 8), R(4, 7, 8)),
    ),
    "slice_backward from the end": (
        lambda g, t: aten.slice_backward(g, t.shape, 1, -2, 9223372036854775807, 1),
        (R(3, 2, 6), R(3, 5, 6)),
        (R(4, 2, 8), R(4, 7, 8)),
    ),
    "slice_backward to a size": (
        lambda g, t: aten.slice_backward(g, t.shape, 1, 0, t.shape[1] - 2, 1),
        (R(3, 3, 6), R(3, 5, 6)),
        (R(4, 5, 8), R(4, 7, 8)),
    ),
    "select_backward last": (lambda g, t: aten.select_backward(g, t.shape, 1, -1), (R(3, 6), R(3, 5, 6)), (R(4, 8), R(4, 7, 8))),
    "select_backward first": (lambda g, t: aten.select_backward(g, t.shape, 1, 0), (R(3, 6), R(3, 5, 6)), (R(4, 8), R(4, 7, 8))),
    "embedding": (lambda w, i: F.embedding(i, w), (R(10, 4), I(10, 3, 5)), (R(10, 4), I(10, 4, 7))),
    "embedding_dense_backward": (
        lambda g, i: aten.embedding_dense_backward(g, i, 10, 1, False),
        (R(3, 5, 4), I(10, 3, 5)),
        (R(4, 7, 4), I(10, 4, 7)),
    ),
    "gather": (lambda t, i: t.gather(1, i), (R(3, 5, 6), I(5, 3, 2, 6)), (R(4, 7, 8), I(7, 4, 3, 8))),
    "scatter_add": (lambda t, i, s: t.scatter_add(1, i, s), (R(3, 5, 6), I(5, 3, 2, 6), R(3, 2, 6)), (R(4, 7, 8), I(7, 4, 3, 8), R(4, 3, 8))),
    "scatter_add2": (lambda t, i, s: t.scatter_add(1, i, s), (R(3, 5, 6), I(5, 3, 2, 6), R(3, 4, 6)), (R(4, 7, 8), I(7, 4, 3, 8), R(4, 5, 8))),
    "scatter.value": (lambda t, i: t.scatter(1, i, 1.0), (R(3, 5, 6), I(5, 3, 2, 6)), (R(4, 7, 8), I(7, 4, 3, 8))),
    "index": (lambda t, i, j: t[i, j], (R(3, 5, 6), I(3, 4), I(5, 4)), (R(4, 7, 8), I(3, 9), I(5, 9))),
    "index2": (lambda t, i, j: t[:, i, j], (R(3, 5, 6), I(3, 4, 1), I(5, 4)), (R(4, 7, 8), I(3, 9, 1), I(5, 9))),
    "index ar": (lambda t, i: t[torch.arange(t.shape[0]), i], (R(3, 5, 6), I(5, 3)), (R(4, 7, 8), I(5, 4))),
    "masked index_put": (lambda t, m: aten.index_put(t, [m], torch.tensor(1.0)), (R(3, 5, 6), R(3, 5, 6) > 0), (R(4, 7, 8), R(4, 7, 8) > 0)),
    "index_add": (lambda t, i, s: t.index_add(1, i, s), (R(3, 5, 6), I(5, 4), R(3, 4, 6)), (R(4, 7, 8), I(7, 6), R(4, 6, 8))),
    "index_select": (lambda t, i: t.index_select(1, i), (R(3, 5, 6), I(5, 4)), (R(4, 7, 8), I(7, 6))),
    "bucketize": (lambda t, b: torch.bucketize(t, b), (R(3, 5, 6), R(4).sort()[0]), (R(4, 7, 8), R(5).sort()[0])),
    "reflection_pad": (lambda t: F.pad(t, (1, 2), mode="reflect"), (R(3, 5, 6),), (R(4, 7, 8),)),
    "pixel_shuffle": (lambda t: F.pixel_shuffle(t, 2), (R(2, 8, 3, 4),), (R(3, 8, 4, 5),)),
    "slice_scatter with a step": (
        lambda t, s: aten.slice_scatter(t, s, 1, 1, 2**63 - 1, 2),
        (R(3, 5, 6), R(3, 2, 6)),
        (R(4, 7, 8), R(4, 3, 8)),
    ),
    "strides and offsets": (lambda t: t * t.stride(0) + t[1:].storage_offset(), (R(3, 5, 6),), (R(4, 7, 8),)),
    "slice_backward with a step": (
        lambda g, t: aten.slice_backward(g, t.shape, 1, 1, 2**63 - 1, 2),
        (R(3, 3, 6), R(3, 6, 6)),
        (R(4, 3, 8), R(4, 7, 8)),
    ),
    "index_put": (
        lambda t, i, v: aten.index_put(t, [None, i], v, False),
        (R(3, 5, 6), torch.randperm(5)[:4], R(3, 4, 6)),
        (R(4, 7, 8), torch.randperm(7)[:5], R(4, 5, 8)),
    ),
    "index_put accumulate": (
        lambda t, i, v: aten.index_put(t, [None, i], v, True),
        (R(3, 5, 6), I(5, 4), R(3, 4, 6)),
        (R(4, 7, 8), I(7, 5), R(4, 5, 8)),
    ),
}


@pytest.mark.parametrize("name", _OF_SEVERAL)
def test_several_tensors(name: str) -> None:
    function, inputs, other = _OF_SEVERAL[name]
    check(function, *inputs, dynamic=True, other=other)
