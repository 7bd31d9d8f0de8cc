"""Keys and values that are repeated for several heads of queries, handed to attention as they are: here by that of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ort_backend.lowering.passes import grouped_queries
from ort_backend.lowering.passes.grouped_queries import group_queries, takes_flash_attention

Q, K, V = torch.randn(2, 6, 5, 8, device="cpu"), torch.randn(2, 2, 7, 8, device="cpu"), torch.randn(2, 2, 7, 8, device="cpu")


def _by_transformers(x: Tensor) -> Tensor:
    n, heads, s, d = x.shape
    return x[:, :, None, :, :].expand(n, heads, 3, s, d).reshape(n, heads * 3, s, d)


def _by_methods(x: Tensor) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, 3, -1, -1).flatten(1, 2)


def _interleaved(x: Tensor) -> Tensor:
    return torch.repeat_interleave(x, 3, dim=1)


def _interleaved_by_a_method(x: Tensor) -> Tensor:
    return x.repeat_interleave(3, -3)


def _as_a_whole(x: Tensor) -> Tensor:
    return x.repeat(1, 3, 1, 1)


def _in_the_other_order(x: Tensor) -> Tensor:
    return x[:, None].expand(-1, 3, -1, -1, -1).reshape(2, 6, 7, 8)


def _of_what_is_written_to(x: Tensor) -> Tensor:
    x = x.clone()
    repeated = _by_methods(x)
    x.zero_()
    return repeated


def _written_to_behind(x: Tensor) -> Tensor:
    repeated = _interleaved(x)
    repeated[:, 0] = 0
    return repeated


def _compiled(function: Callable[..., Any], *args: Tensor, dynamic: bool | None = False) -> tuple[Any, list[fx.Node], int]:
    found: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(group_queries(gm, lambda query: True))
        found.append(gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention))
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic)(*args), found[1], found[0]


def _attention(repeat: Callable[[Tensor], Tensor], **options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, repeat(k), repeat(v), **options)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("repeat", [_by_transformers, _by_methods, _interleaved, _interleaved_by_a_method])
def test_repetitions_are_left_out(repeat: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    function = _attention(repeat, is_causal=True)
    heads = [torch.randn(one.shape) for one in (Q, K, V)]
    if dynamic:  # but for the number of heads
        for one in heads:
            torch._dynamo.mark_dynamic(one, 2)
    found, (node,), count = _compiled(function, *heads, dynamic=None)
    torch.testing.assert_close(found, function(*heads))
    assert count == 1 and node.kwargs["enable_gqa"] is True and node.kwargs["is_causal"] is True
    assert [one.meta["example_value"].shape[1] for one in node.args] == [6, 2, 2]


@pytest.mark.parametrize("repeat", [_as_a_whole, _in_the_other_order, _of_what_is_written_to, _written_to_behind, lambda x: _by_methods(x) + 0])
def test_others_stay(repeat: Callable[[Tensor], Tensor]) -> None:
    function = _attention(repeat)
    found, (node,), count = _compiled(function, Q, K, V)
    torch.testing.assert_close(found, function(Q, K, V))
    assert count == 0 and "enable_gqa" not in node.kwargs


def test_with_a_mask_they_stay() -> None:
    mask = torch.rand(5, 7, device="cpu") > 0.5
    assert _compiled(_attention(_by_methods, attn_mask=mask), Q, K, V)[2] == 0


def test_keys_alone_or_of_another_size_stay() -> None:
    wide = torch.randn(2, 6, 7, 8, device="cpu")
    assert _compiled(lambda q, k, v: F.scaled_dot_product_attention(q, _by_methods(k), v), Q, K, wide)[2] == 0
    values = torch.randn(2, 2, 7, 4, device="cpu")
    assert _compiled(_attention(_by_methods), Q, K, values)[2] == 0


def test_where_flash_attention_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Query:
        dtype, device, shape = torch.bfloat16, torch.device("cuda", 0), (2, 6, 5, 64)

        def dim(self) -> int:
            return len(self.shape)

    query: Any = Query()
    capability = [(9, 0)]
    monkeypatch.setattr(grouped_queries.torch.cuda, "get_device_capability", lambda device: capability[0])
    assert takes_flash_attention(query)
    query.dtype = torch.float32
    assert not takes_flash_attention(query)
    monkeypatch.setattr(grouped_queries.torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(grouped_queries.torch, "get_autocast_dtype", lambda device: torch.float16)
    assert takes_flash_attention(query)
    capability[0] = (7, 5)
    assert not takes_flash_attention(query)
    capability[0] = (8, 0)
    query.shape = (2, 6, 5, 192)
    assert not takes_flash_attention(query)
    assert not takes_flash_attention(Q)
