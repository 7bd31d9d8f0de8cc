"""Permutations that move more than one dimension are made in two steps, each of which moves one; those of size 1 stay where they are."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx
import pytest
import torch
from behaviours.check import call, same_as_eager
from ops.harness import check, lower, trace
from torch import nn

SHAPES = [(4, 3, 14, 16, 14, 16), (8, 4, 64, 32, 2), (64, 64, 16), (2, 1, 512, 3, 32)]
PERMUTATIONS = {6: [(0, 1, 4, 2, 5, 3), (0, 2, 4, 3, 5, 1), (5, 3, 1, 0, 2, 4)], 5: [(0, 2, 1, 4, 3), (4, 3, 2, 1, 0)], 3: [(2, 1, 0)]}


def _transposes(*inputs: torch.Tensor, permutation: tuple[int, ...]) -> list[list[int]]:
    graph = lower(trace(lambda x: x.permute(permutation) + 1, inputs)).model.graph
    return [list(node.attributes["perm"].as_ints()) for node in graph if node.op_type == "Transpose"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_permutation_equals_eager(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    permutations = list(itertools.permutations(range(len(shape))))
    for permutation in permutations[:: max(1, len(permutations) // 40)] + PERMUTATIONS[len(shape)]:
        check(lambda x, permutation=permutation: x.permute(permutation) * 2, x)


@pytest.mark.parametrize(
    "shape, permutation, count",
    [
        ((4, 8, 2, 2, 48, 48), (0, 1, 4, 2, 5, 3), 2),  # pixel shuffle
        ((4, 3, 14, 16, 14, 16), (0, 2, 4, 3, 5, 1), 2),  # patches
        ((8, 128, 4, 64), (0, 2, 1, 3), 1),  # heads
        ((8, 32, 64, 64), (0, 2, 3, 1), 1),  # channels last
        ((4, 8, 7, 8, 7, 96), (0, 1, 3, 2, 4, 5), 1),  # windows
        ((8, 3, 128, 4, 64), (1, 0, 3, 2, 4), 1),  # whole rows
        ((2, 2, 2, 2, 4, 4), (0, 1, 4, 2, 5, 3), 1),  # few elements
    ],
)
def test_which_are_split(shape: tuple[int, ...], permutation: tuple[int, ...], count: int) -> None:
    assert len(_transposes(torch.randn(shape), permutation=permutation)) == count


@pytest.mark.parametrize(
    "shape, permutation, written",
    [
        ((4, 8, 64, 1, 64), (1, 0, 2, 4, 3), (1, 0, 2)),  # einsum
        ((64, 1, 512), (2, 1, 0), (1, 0)),
        ((8, 1, 64, 64), (0, 3, 1, 2), (0, 3, 1, 2)),  # one that moves in any case
        ((64, 1, 512), (1, 0, 2), (1, 0, 2)),  # none but the 1
        ((8, 64, 1, 7, 96), (1, 3, 2, 0, 4), (1, 3, 2, 0, 4)),  # whole rows
    ],
    ids=str,
)
def test_a_dimension_of_size_1_is_not_moved(shape: tuple[int, ...], permutation: tuple[int, ...], written: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert _transposes(x, permutation=permutation)[0] == list(written)
    check(lambda x: x.permute(permutation) * 2, x)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_onnx_runtime_leaves_a_dimension_of_size_1_alone(dynamic: bool | None, tmp_path: Path) -> None:
    x = torch.randn(4, 8, 64, 1, 64)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(lambda x: (x * 2).permute(1, 0, 2, 4, 3).contiguous() * 2, backend="ort_training", options={"dump_dir": str(tmp_path)})
    assert torch.equal(compiled(x), x.permute(1, 0, 2, 4, 3) * 4)
    optimized = [node for path in tmp_path.rglob("*.optimized.onnx") for node in onnx.load(path).graph.node]
    assert [list(node.attribute[0].ints) for node in optimized if node.op_type == "Transpose"] == [[1, 0, 2]]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "shape, permutation",
    [((4, 8, 2, 2, 48, 48), (0, 1, 4, 2, 5, 3)), ((4, 64, 3, 4, 32), (2, 0, 3, 4, 1)), ((3, 4, 4, 32, 64), (1, 4, 0, 2, 3))],
    ids=["pixel shuffle", "channels of heads", "their gradient"],
)
def test_onnx_runtime_leaves_both_steps_apart(shape: tuple[int, ...], permutation: tuple[int, ...], dynamic: bool | None, tmp_path: Path) -> None:
    x = torch.randn(shape)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(lambda x: (x * 2).permute(permutation).contiguous() * 2, backend="ort_training", options={"dump_dir": str(tmp_path)})
    assert torch.equal(compiled(x), x.permute(permutation) * 4)
    optimized = [node.op_type for path in tmp_path.rglob("*.optimized.onnx") for node in onnx.load(path).graph.node]
    assert optimized.count("Transpose") == 2


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_a_training_step_that_shuffles_pixels(dynamic: bool | None) -> None:
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(8, 3, 3, padding=1), nn.PixelUnshuffle(2))
    calls = [call(torch.randn(size, 3, 32, 32)) for size in (2, 3)]
    same_as_eager(net, *calls, graphs=1 if dynamic else 2, rtol=1e-3, atol=1e-4, dynamic=dynamic)
