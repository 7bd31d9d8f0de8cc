"""Masks of attention that are known when Dynamo's graph is, left out for a CUDA device: here that of the tests is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from default_device import DEVICE
from torch import Tensor, fx
from torch.nn import functional as F

from ort_backend.lowering.passes.traced_masks import drop_traced_masks

L = 6
Q = torch.randn(2, 4, L, 8)


def _written_by_transformers(x: Tensor) -> Tensor:
    """As its `sdpa_mask` of 5.17 writes the mask of an encoder without padding."""
    numbers = torch.arange(x.shape[2], device=x.device) + 0
    return (numbers[None, None, :, None] >= 0).expand(x.shape[0], -1, x.shape[2], x.shape[2])


def _causal(x: Tensor) -> Tensor:
    numbers = torch.arange(x.shape[2], device=x.device)
    return numbers[None, :] <= numbers[:, None]


def _of_a_decoder(x: Tensor) -> Tensor:
    """As transformers 5.17 writes the mask of a decoder: causal, within each of the sequences that are packed into a row, as their positions tell."""
    positions = (torch.arange(x.shape[2], device=x.device) + 0)[None]
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(1, device=x.device)[:, None, None, None]
    numbers = torch.arange(x.shape[2], device=x.device)
    queries, keys = numbers[None, None, :, None], numbers[None, None, None, :]
    mask = queries.new_ones((), dtype=torch.bool) & (packed[batch, queries] == packed[batch, keys]) & (keys <= queries)
    return mask.expand(x.shape[0], -1, x.shape[2], x.shape[2])


def _causal_to_add(x: Tensor) -> Tensor:
    return torch.zeros(L, L).masked_fill(torch.ones(L, L).tril().logical_not(), float("-inf"))


def _shifted(x: Tensor) -> Tensor:
    numbers = torch.arange(L)
    return numbers[None, :] <= numbers[:, None] + 1


def _distances(x: Tensor) -> Tensor:
    return (torch.arange(L)[None, :] - torch.arange(L)[:, None]) * 0.5


def _compiled(function: Callable[..., Any], *args: Tensor, device: str = DEVICE, dynamic: bool | None = None) -> tuple[Any, list[fx.Node], int]:
    found: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(drop_traced_masks(gm, device))
        found.append(gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention))
        return gm.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return result, found[1], found[0]


@pytest.mark.parametrize(
    ("mask", "causal"),
    [(_written_by_transformers, False), (_causal, True), (_of_a_decoder, True), (_causal_to_add, True), (lambda x: torch.zeros(L, L), False)],
)
def test_masks_are_left_out(mask: Callable[[Tensor], Tensor], causal: bool) -> None:
    for call in (
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=mask(x), scale=0.3),
        lambda x: F.scaled_dot_product_attention(x, x, x, mask(x), 0.0, False),
    ):
        result, (node,), dropped = _compiled(call, Q)
        given = {**dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False)), **node.kwargs}
        assert dropped == 1 and given["attn_mask"] is None and given["is_causal"] is causal
        torch.testing.assert_close(result, call(Q))


@pytest.mark.parametrize("mask", [_shifted, _distances, lambda x: x[0, 0, :, :L] > 0, lambda x: torch.rand(L, L) > 0])
def test_others_stay(mask: Callable[[Tensor], Tensor]) -> None:
    assert _compiled(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=mask(x)), Q)[2] == 0


def _element(mask: Tensor, x: Tensor) -> Tensor:
    mask[0, 3] = True
    return mask


def _through_view(mask: Tensor, x: Tensor) -> Tensor:
    row = mask[0]
    row[3] = True
    return mask


def _view_before(mask: Tensor, x: Tensor) -> Tensor:
    part = mask[:, :]
    mask.logical_or_(x[0, 0, 0, :L] > 0)
    return part


def _to_result(mask: Tensor, x: Tensor) -> Tensor:
    torch.logical_or(mask, x[0, 0, 0, :1] > 0, out=mask)
    return mask


def _through_data(mask: Tensor, x: Tensor) -> Tensor:
    mask.data[0, 3] = True
    return mask


@pytest.mark.parametrize("write", [_element, _through_view, _view_before, _to_result, _through_data])
def test_what_is_written_to_stays(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    def attention(x: Tensor) -> Tensor:
        mask = write(torch.ones(L, L, dtype=torch.bool, device=x.device).tril(), x)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    result, _, dropped = _compiled(attention, Q)
    assert dropped == 0
    torch.testing.assert_close(result, attention(Q))


def test_only_what_is_fixed_and_on_the_device() -> None:
    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=_written_by_transformers(x))

    assert _compiled(attention, Q, device="meta")[2] == 0
    assert _compiled(attention, Q, dynamic=True)[2] == 0
    assert _compiled(lambda x: F.scaled_dot_product_attention(x, x, x), Q)[2] == 0


def test_layers_share_a_mask() -> None:
    def layers(x: Tensor) -> Tensor:
        mask = _causal(x)
        for _ in range(3):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return x

    result, nodes, dropped = _compiled(layers, Q)
    assert dropped == len(nodes) == 3
    torch.testing.assert_close(result, layers(Q))
