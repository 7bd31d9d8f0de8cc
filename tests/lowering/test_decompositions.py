"""The decomposition table: what is in it, and the gradients through what it changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import randn
from torch.nn import functional as F

from ort_backend.lowering import registry
from ort_backend.lowering.tracing import decompositions, older_torch, result_layouts

aten = torch.ops.aten


def test_what_has_a_lowering_stays_whole() -> None:
    in_both = registry.registered().keys() & decompositions.table().keys()
    in_part = older_torch.decompositions().keys() | result_layouts.decompositions({}).keys() | {aten.index_put.default}  # these leave the rest whole
    assert in_both <= in_part


def test_nothing_random_is_decomposed() -> None:
    random = (aten.native_dropout, aten.bernoulli, aten.exponential, aten.uniform, aten.normal_functional, aten.rrelu_with_noise_functional)
    table = decompositions.table().keys() - result_layouts.decompositions({}).keys()  # these only lay out what is drawn for
    assert not [op for op in table if torch.Tag.nondeterministic_seeded in op.tags]
    assert not [op for packet in random for op in (getattr(packet, name) for name in packet.overloads()) if op in table]


def test_nothing_in_it_mutates() -> None:
    assert not [op for op in decompositions.table() if op._schema.is_mutable]


def test_attention_and_detach_are_never_decomposed() -> None:
    table = decompositions.table()
    assert aten._scaled_dot_product_flash_attention_for_cpu.default not in table
    assert aten.detach.default not in table


def test_literals_and_detached_values(check: Callable) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(lambda x: x * x.detach() + torch.tensor(2.0), x)
        return out, *pull(out)

    check(function, randn(3, 4), also=(randn(2, 4),))


def test_gradients_through_added_decompositions(check: Callable) -> None:
    check(lambda g, x, noise: aten.rrelu_with_noise_backward(g, x, noise, 0.1, 0.3, True, False), randn(4, 5), randn(4, 5), torch.rand(4, 5))

    def group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(lambda x, w, b: F.group_norm(x, 2, w, b), x, w, b)
        return out, *pull(out.cos())

    check(group_norm, randn(3, 4, 5), randn(4), randn(4), also=(randn(2, 4, 6), randn(4), randn(4)))

    def huber(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(lambda x: F.huber_loss(x, y, delta=0.7), x)
        return out, *pull(out.cos())

    check(huber, randn(4, 5), randn(4, 5), also=(randn(3, 5), randn(3, 5)))
