"""Windows along an axis, forward and backward: eager's numbers, by blocks of neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.trained import check_training, needs_grad

aten = torch.ops.aten

# Sizes, axis, length and distance of the windows.
WINDOWS: dict[str, tuple[tuple[int, ...], int, int, int]] = {
    "to_the_end": ((3, 20), 1, 8, 4),
    "some_are_left": ((3, 23), 1, 8, 4),
    "with_gaps": ((3, 23), 1, 4, 8),
    "of_rows": ((22, 3), 0, 6, 4),
    "in_the_middle": ((2, 21, 3, 2), 1, 6, 3),
    "of_a_vector": ((20,), 0, 6, 4),
    "one": ((2, 9), 1, 8, 8),
    "side_by_side": ((2, 16), 1, 8, 8),
    "of_elements": ((3, 20), 1, 3, 2),
    "one_apart": ((2, 3, 70), 2, 3, 1),
    "long_ones_one_apart": ((2, 3, 70), 2, 30, 1),
    "long_ones_of_a_vector": ((50,), 0, 20, 1),
    "few_one_apart": ((3, 50), 1, 40, 1),
    "one_apart_in_the_middle": ((2, 50, 3), 1, 20, 1),
    "of_nothing": ((0, 20), 1, 8, 4),
    "of_nothing_one_apart": ((0, 50), 1, 20, 1),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_and_their_gradients(kind: str) -> None:
    size, axis, length, step = WINDOWS[kind]
    check_training(lambda x: x.unfold(axis, length, step) * 2, needs_grad(*size))
    check_training(lambda x: x.unfold(axis, length, step), torch.arange(torch.Size(size).numel()).view(size))


@pytest.mark.parametrize("axis", [0, 1])
def test_other_sizes_are_symbolic(axis: int) -> None:
    check_training(lambda x: x.unfold(axis, 8, 4) * 2, needs_grad(24, 26), dynamic=True, others=[(needs_grad(29, 23),)])


def test_one_row_of_windows_for_all() -> None:
    def joined(z: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        return torch.istft(z, 16, 4, window=window)

    check_training(joined, needs_grad(2, 9, 20, dtype=torch.complex64), torch.hann_window(16))


def test_as_few_indices_as_there_are_blocks(lower: Callable[..., Any]) -> None:
    x = torch.randn(2, 1000)

    def both(x: torch.Tensor) -> Any:
        windows = aten.unfold(x, 1, 64, 16)
        return windows, aten.unfold_backward(windows, [2, 1000], 1, 64, 16)

    lowered = lower(both, (x,))
    torch.testing.assert_close(lowered(x), [*both(x)], check_device=False)
    of_indices = [tuple(node.inputs[1].shape) for node in lowered.model.graph if node.op_type in ("Gather", "ScatterND")]
    assert of_indices == [(59, 4), (59 * 4, 1)]


def test_windows_one_apart_are_shifted_rows(lower: Callable[..., Any]) -> None:
    x = torch.randn(4, 1, 258)
    lowered = lower(lambda x: aten.unfold(x, 2, 3, 1), (x,))
    assert lowered.op_types.count("Slice") == 3 and "Gather" not in lowered.op_types
    assert torch.equal(lowered(x)[0], x.unfold(2, 3, 1).cpu())


def test_long_windows_one_apart_need_no_indices(lower: Callable[..., Any]) -> None:
    x = torch.randn(2, 1000)

    def both(x: torch.Tensor) -> Any:
        windows = aten.unfold(x, 1, 100, 1)
        return windows, aten.unfold_backward(windows, [2, 1000], 1, 100, 1)

    lowered = lower(both, (x,))
    torch.testing.assert_close(lowered(x), [*both(x)], rtol=1e-5, atol=1e-5, check_device=False)
    assert not [node for node in lowered.model.graph if node.op_type in ("Gather", "ScatterND")]


def test_long_windows_of_other_batches() -> None:
    def windows(x: torch.Tensor) -> torch.Tensor:
        return x.unfold(1, 20, 1) * 2

    check_training(windows, needs_grad(4, 50), others=[(needs_grad(7, 50),)])
