"""Embedding bags in every mode, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ops.trained import check_training, needs_grad

MODES = ("sum", "mean", "max")
INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])
OFFSETS = torch.tensor([0, 4, 4])  # the second bag is empty
OTHER = (torch.tensor([0, 0, 4, 5, 4, 3, 2, 9, 1, 1, 1]), torch.tensor([0, 1, 5, 11]))  # so is the last


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, dynamic: bool) -> None:
    others = [(needs_grad(12, 5), *OTHER)] if dynamic else []
    check_training(lambda w, i, o: F.embedding_bag(i, w, o, mode=mode), needs_grad(10, 6), INDICES, OFFSETS, dynamic=dynamic, others=others)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_bags(mode: str) -> None:
    check_training(lambda w, i: F.embedding_bag(i, w, mode=mode), needs_grad(10, 3), torch.randint(0, 10, (4, 5)))


@pytest.mark.parametrize("padding_idx", [4, -1])
@pytest.mark.parametrize("mode", MODES)
def test_padding(mode: str, padding_idx: int) -> None:
    check_training(lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode=mode, padding_idx=padding_idx), needs_grad(10, 3))


@pytest.mark.parametrize("mode", MODES)
def test_a_bag_of_padding_only(mode: str) -> None:
    check_training(lambda w: F.embedding_bag(torch.tensor([4, 4, 1]), w, torch.tensor([0, 2]), mode=mode, padding_idx=4), needs_grad(10, 3))


@pytest.mark.parametrize("offsets", [torch.int64, torch.int32])
@pytest.mark.parametrize("mode", MODES)
def test_empty_bags_only(mode: str, offsets: torch.dtype) -> None:
    none, starts = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=offsets)
    check_training(lambda w: F.embedding_bag(none, w, starts, mode=mode), needs_grad(10, 3))
    check_training(lambda w: F.embedding_bag(none, w, starts, mode=mode, include_last_offset=True), needs_grad(10, 3))
    if mode == "sum":
        check_training(lambda w, s: F.embedding_bag(none, w, starts, mode=mode, per_sample_weights=s), needs_grad(10, 3), needs_grad(0))


@pytest.mark.parametrize("mode", MODES)
def test_last_offset_included(mode: str) -> None:
    check_training(lambda w: F.embedding_bag(INDICES, w, torch.tensor([0, 4, 4, 8]), mode=mode, include_last_offset=True), needs_grad(10, 3))


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_of_samples(dynamic: bool) -> None:
    function = lambda w, i, o, s: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s)  # noqa: E731
    others = [(needs_grad(12, 5), *OTHER, needs_grad(11))] if dynamic else []
    check_training(function, needs_grad(10, 6), INDICES, OFFSETS, needs_grad(8), dynamic=dynamic, others=others)
    check_training(
        lambda w, s: F.embedding_bag(INDICES, w, OFFSETS, mode="sum", per_sample_weights=s, padding_idx=4), needs_grad(10, 3), needs_grad(8)
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_by_frequency(mode: str) -> None:
    outside = ["aten::_embedding_bag_backward"]  # which divides by other counts than it should: eager's gradient, bugs included
    check_training(lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode=mode, scale_grad_by_freq=True), needs_grad(10, 3), outside=outside)


def test_gradients_of_an_embedding_by_frequency() -> None:
    check_training(lambda w: F.embedding(INDICES.view(2, 4), w, scale_grad_by_freq=True, padding_idx=2), needs_grad(10, 3))


@pytest.mark.parametrize("mode", MODES)
def test_ties_go_to_the_first(mode: str) -> None:
    check_training(lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode=mode), torch.ones(10, 3).requires_grad_())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("mode", MODES)
def test_dtypes(mode: str, dtype: torch.dtype, tolerance: float) -> None:
    function = lambda w: F.embedding_bag(INDICES.int(), w, OFFSETS.int(), mode=mode)  # noqa: E731
    check_training(function, needs_grad(10, 3, dtype=dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", range(3))
def test_every_result(mode: int) -> None:
    check_training(lambda w: torch.ops.aten._embedding_bag(w, INDICES, OFFSETS, False, mode), torch.randn(10, 3))
    check_training(lambda w: torch.ops.aten._embedding_bag(w, INDICES, OFFSETS, False, mode, padding_idx=4), torch.randn(10, 3))


def test_a_table_that_lies_column_by_column() -> None:
    """PyTorch's kernel numbers the samples of such a table alone, where the lowering has no number of a table's strides."""
    check_training(lambda w: F.embedding_bag(INDICES, w.mT, OFFSETS, mode="sum"), needs_grad(3, 10), outside=["aten::_embedding_bag"])
