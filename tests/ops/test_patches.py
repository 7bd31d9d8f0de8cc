"""unfold and fold, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.trained import check_training, needs_grad

_PATCHES: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "padding": {"kernel_size": 3, "padding": 1},
    "side by side": {"kernel_size": 2, "stride": 2},
    "apart": {"kernel_size": (2, 1), "stride": (3, 2)},
    "dilation": {"kernel_size": (2, 3), "dilation": (2, 1), "padding": (0, 2), "stride": (1, 2)},
}
SIZE = (9, 8)


@pytest.mark.parametrize("name", _PATCHES)
def test_unfold_and_fold(name: str) -> None:
    options = _PATCHES[name]
    check_training(lambda x: F.unfold(x, **options), needs_grad(2, 3, *SIZE))
    check_training(lambda x: F.unfold(x, **options), needs_grad(3, *SIZE))
    columns = F.unfold(torch.randn(2, 3, *SIZE), **options)
    check_training(lambda x: F.fold(x, SIZE, **options), columns.requires_grad_())
    check_training(lambda x: F.fold(x, SIZE, **options), columns.detach()[0].requires_grad_())


def test_dynamic_sizes() -> None:
    check_training(lambda x: F.unfold(x, 3, padding=1, stride=2), torch.randn(4, 3, 9, 8), dynamic=True, others=[(torch.randn(5, 6, 11, 7),)])
    outside = ["aten::col2im"]
    check_training(lambda x: F.unfold(x, 3, padding=1), needs_grad(4, 3, 9, 8), dynamic=True, outside=outside)


@pytest.mark.parametrize(("dtype", "outside"), [(torch.bfloat16, []), (torch.float64, ["aten::col2im"])])
def test_dtypes(dtype: torch.dtype, outside: list[str]) -> None:
    check_training(lambda x: F.unfold(x, 3, padding=1), needs_grad(2, 3, *SIZE, dtype=dtype), outside=outside, rtol=3e-2, atol=3e-2)
