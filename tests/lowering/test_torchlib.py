"""The lowerings of torch_lib that are used, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import randn

from ort_backend.errors import LoweringError
from ort_backend.lowering import registry, torchlib

aten = torch.ops.aten


def test_each_is_there_and_none_hides_behind_a_lowering_of_ours() -> None:
    assert all(torchlib.find(target) is not None for target in torchlib._USED)
    assert registry.registered().keys().isdisjoint(torchlib._USED)


def test_what_is_wrong_in_torch_lib_is_not_found() -> None:
    assert torchlib.find(aten.native_dropout.default) is None
    assert torchlib.find(aten._embedding_bag.default) is None
    assert torchlib.find(torch.ops.higher_order.cond) is None


def test_histogram(check: Callable) -> None:
    check(lambda x: aten.histc(x, 7, -2, 2), randn(4, 5))


def test_arguments_that_it_refuses(lower: Callable) -> None:
    with pytest.raises(LoweringError, match="torch_lib: NotImplementedError"):
        lower(lambda x: aten.histc(x, 7), (randn(4, 5),))
