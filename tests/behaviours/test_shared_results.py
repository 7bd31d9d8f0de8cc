"""Results that are views of one tensor that is no result itself share its memory, as in eager; results that are constants may be resized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviours.check import compiled, on_ort, same_tree
from default_device import seeded
from torch.utils import _pytree as pytree

SHARED: dict[str, Any] = {
    "overlapping rows": lambda h: (h[:3], h[1:]),
    "another shape": lambda h: (h.view(-1)[:5], h[0]),
    "nested": lambda h: (h[1:][:, 1], h[1:].view(2, 2, -1)),
    "permuted": lambda h: (h.t()[:2], h.t().unsqueeze(0)),
    "parts of a part": lambda h: (h.chunk(2, 1)[0].t(), h.chunk(2, 1)[0][1:]),
    "behind a write": lambda h: (h[:2], h.add_(1)[1:]),
    "one of them read": lambda h: (h[:2], h[1:], h[1:] + 1),
}


def storages(results: Any) -> list[int]:
    return [one.untyped_storage().data_ptr() for one in pytree.tree_leaves(results)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", SHARED)
def test_views_of_one_tensor_share_its_memory(kind: str, dynamic: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        return SHARED[kind](x * 2)

    x = torch.randn(3, 4, generator=seeded(0))
    with on_ort(graphs=1):
        results, wanted = compiled(function, dynamic=dynamic)(x), function(x)
    assert [one == storages(results)[0] for one in storages(results)] == [one == storages(wanted)[0] for one in storages(wanted)]
    same_tree(results, wanted)
    for one in (results, wanted):
        one[1].view(-1)[:2].fill_(9.0) if one[1].is_contiguous() else one[1].select(0, 0).fill_(9.0)
    same_tree(results, wanted)


def test_a_write_behind_a_graph_break_is_seen_in_both_views() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        part = (x + 1)[0:1]
        item = part.squeeze()
        torch._dynamo.graph_break()
        part.mul_(3)
        return item

    x = torch.ones(3)
    with on_ort(graphs=2):
        assert compiled(function, fullgraph=False)(x) == function(x) == 6


def test_numbers_without_gradient_share_memory_beside_what_has_some() -> None:
    def function(x: torch.Tensor) -> Any:
        kept = (x * 3).int()
        return x.sin().sum(), kept[:2], kept[1:]

    x = torch.randn(3, 4, generator=seeded(0), requires_grad=True)
    with on_ort(graphs=1):
        total, one, other = compiled(function)(x)
        total.backward()
    one[1] = 7
    assert (other[0] == 7).all()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("train", [False, True])
def test_a_constant_result_may_be_resized(train: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        buffer, indices, number, ones = torch.empty(0), torch.empty(0, dtype=torch.int64), torch.tensor(3.0), torch.ones(2)
        y = x * ones[0]
        torch._dynamo.graph_break()
        torch.sort(y.detach(), out=(buffer, indices))
        return y.sum(), buffer, indices, number.resize_(2).fill_(1), ones + 1

    x = torch.randn(3, 4, generator=seeded(0), requires_grad=train)
    with on_ort(idle=True):
        got = compiled(function, fullgraph=False)
        for _ in range(2):  # memory of each call's own
            same_tree(got(x), function(x))


def test_a_constant_under_two_names_is_one_tensor() -> None:
    def function(x: torch.Tensor) -> Any:
        zeros, ones = torch.zeros(3), torch.ones(4)
        return zeros, x + 1, zeros, zeros.view(3, 1), ones[:2], ones[1:]

    with on_ort(graphs=1):
        results = compiled(function)(torch.ones(2))
    assert len(set(storages(results))) == 3
    results[0].add_(1)
    results[4].add_(1)
    same_tree(results[2:], (torch.ones(3), torch.ones(3, 1), torch.full((2,), 2.0), torch.tensor([2.0, 1.0, 1.0])))


UNSAFE: dict[str, Any] = {
    "split": lambda t: t.unsafe_split(1),
    "sizes": lambda t: t.unsafe_split_with_sizes((1, 1, 1)),
    "chunk": lambda t: t.unsafe_chunk(3),
}


@pytest.mark.parametrize("of_argument", [False, True])
@pytest.mark.parametrize("kind", UNSAFE)
def test_parts_that_may_be_written_to(kind: str, of_argument: bool) -> None:
    """To autograd they are no views, whatever memory they lie in."""

    def function(x: torch.Tensor) -> Any:
        return UNSAFE[kind](x if of_argument else x + x)

    found = []
    with on_ort(graphs=1):
        for side in (compiled(function), function):
            for _ in range(2):
                x = torch.arange(9.0).view(3, 3).requires_grad_()
                one, other, _ = side(x * 2)
                one.mul_(other)
                one.sum().backward()
                found.append((one.detach(), x.grad))
    same_tree(found[:2], found[2:])
