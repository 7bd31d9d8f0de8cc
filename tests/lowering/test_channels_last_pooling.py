"""What pools and resizes pictures amid permutations runs with the channels last: eager's numbers and gradients, and no Transpose of a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from behaviours.check import compiled, on_ort, same_gradients, same_tree, single_session
from default_device import ON_CPU, seeded
from torch import Tensor

from ort_backend.lowering import simplify
from ort_backend.lowering.kernels.channels_last import to_first, to_last
from ort_backend.lowering.kernels.channels_last_pooling import WITH_CHANNELS_LAST
from ort_backend.lowering.passes import channels_last

pytestmark = single_session
aten = torch.ops.aten


@pytest.fixture(name="written")
def _written(counted: Callable[..., list[int]]) -> list[int]:
    """How many nodes each run of the pass wrote anew."""
    return counted("put_channels_last", channels_last.put_channels_last, simplify)


def _rows(x: Tensor) -> Tensor:
    """What a program with the channels last computes: here of the channels of each pixel."""
    return x * torch.softmax(x, -1)


def _of_picture(pool: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: _rows(pool(_rows(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


def _of_sequence(pool: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: _rows(pool(_rows(x).transpose(1, 2)).transpose(1, 2))


def _and_indices(x: Tensor) -> tuple[Tensor, Tensor]:
    pooled, indices = F.max_pool2d(_rows(x).permute(0, 3, 1, 2), 2, return_indices=True)
    return _rows(pooled.permute(0, 2, 3, 1)), indices.permute(0, 2, 3, 1) + 1


PICTURE, SEQUENCE = (3, 32, 28, 64), (8, 256, 72)
CASES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "max": (_of_picture(lambda x: F.max_pool2d(x, 3, 2, 1)), PICTURE),
    "max_and_indices": (_and_indices, PICTURE),
    "average": (_of_picture(lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)), PICTURE),
    "nearest": (_of_picture(lambda x: F.interpolate(x, scale_factor=2)), (3, 16, 14, 64)),
    "bilinear": (_of_picture(lambda x: F.interpolate(x, size=(25, 31), mode="bilinear")), PICTURE),
    "bilinear_corners": (_of_picture(lambda x: F.interpolate(x, size=(9, 31), mode="bilinear", align_corners=True)), PICTURE),
    "max_of_sequence": (_of_sequence(lambda x: F.max_pool1d(x, 3, 1, 1)), SEQUENCE),
    "average_of_sequence": (_of_sequence(lambda x: F.avg_pool1d(x, 2)), SEQUENCE),
}


def _both(function: Callable[..., Any], call: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = (torch.randn(shape, generator=seeded(0), dtype=dtype).requires_grad_() for _ in range(2))
    results = []
    for one, given in ((call, x), (function, y)):
        made = one(given)
        first = made[0] if isinstance(made, tuple) else made
        (first * torch.rand(first.shape, generator=seeded(1), dtype=dtype)).sum().backward()
        results.append(made)
    same_tree(*results)
    same_gradients([x], [y])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_there_and_back(written: list[int], name: str, dtype: torch.dtype) -> None:
    function, shape = CASES[name]
    graphs: list[ir.Model] = []
    options = {"onnx_passes": [lambda model: graphs.append(model) or model]}
    with on_ort(graphs=1):
        _both(function, torch.compile(function, backend="ort_training", options=options, fullgraph=True), shape, dtype)
    assert (sum(written) > 0) == ON_CPU
    if ON_CPU:
        assert not [node for model in graphs for node in model.graph if node.op_type == "Transpose"]


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_pictures(written: list[int], name: str) -> None:
    function, (_, *shape) = CASES[name]
    with on_ort(graphs=1):
        call = compiled(function, dynamic=True)
        for pictures in (8, 9, 11):
            _both(function, call, (pictures, *shape), torch.float32)
    assert (sum(written) > 0) == ON_CPU


@pytest.mark.parametrize(
    ("shape", "options"),
    [((8, 64, 64, 4), {}), ((1, 4, 4, 48), {}), (PICTURE, {"kernels": "onnxruntime"})],
    ids=["few channels", "few elements", "all on ONNX Runtime"],
)
@pytest.mark.parametrize("name", ["max", "bilinear"])
def test_others_stay(written: list[int], name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    function, _ = CASES[name]
    with on_ort(graphs=1):
        _both(function, torch.compile(function, backend="ort_training", options=options, fullgraph=True), shape, torch.float32)
    assert not sum(written)


def test_pictures_that_nothing_permutes_stay(written: list[int]) -> None:
    with on_ort(graphs=1):
        _both(pool := lambda x: F.avg_pool2d(x.sin(), 2).exp(), compiled(pool), (3, 64, 32, 28), torch.float32)
    assert not sum(written)


def test_a_gradient_lies_as_what_it_is_of(written: list[int]) -> None:
    """In the trace the gradient of a resized picture has the channels in front: autograd would copy it."""
    x = torch.randn(3, 16, 16, 96, requires_grad=True)
    resized = compiled(lambda x: _rows(F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2, mode="bilinear").permute(0, 2, 3, 1)))
    with on_ort(graphs=1):
        (gradient,) = torch.autograd.grad(resized(x).sum(), x)
    assert gradient.is_contiguous()
    assert (sum(written) > 0) == ON_CPU


@pytest.mark.parametrize("shape", [(2, 4, 16, 8, 16), (2, 4, 8, 256)], ids=["more dimensions", "as many"])
def test_a_large_gradient_that_is_a_reshape_lies_as_what_it_is_of(shape: tuple[int, ...]) -> None:
    """PyTorch reshapes large results, but the order of memory is one of the dimensions that the argument has."""
    found = []
    for function in (compiled(made := lambda x, y: x.reshape(shape) @ y), made):
        x, y = (torch.randn(*size, generator=seeded(0)) for size in ((2, 128, 4, 16), (shape[-1], 16)))
        x = x.transpose(1, 2).requires_grad_()
        function(x, y).pow(2).sum().backward()
        found.append(x)
    same_gradients(found[:1], found[1:], atol=1e-3)


@pytest.mark.parametrize("kernel", WITH_CHANNELS_LAST, ids=str)
def test_the_operators(kernel: Any) -> None:
    """What nodes call, and their fake values, beside PyTorch's operator on (N, C, H, W)."""
    picture, small = torch.randn(2, 16, 8, 6), torch.randn(2, 16, 4, 3)
    arguments: dict[Any, tuple[Any, ...]] = {
        aten.max_pool2d_with_indices.default: (picture, [2, 2], [2, 2]),
        aten.max_pool2d_with_indices_backward.default: (
            small, picture, [2, 2], [2, 2], [0, 0], [1, 1], False, aten.max_pool2d_with_indices(picture, [2, 2], [2, 2])[1],
        ),
        aten.avg_pool2d.default: (picture, [2, 2]),
        aten.avg_pool2d_backward.default: (small, picture, [2, 2], [], [0, 0], False, True, None),
        aten.upsample_nearest2d.default: (small, [8, 6]),
        aten.upsample_nearest2d_backward.default: (picture, [8, 6], [2, 16, 4, 3]),
        aten.upsample_bilinear2d.default: (small, [8, 6], False),
        aten.upsample_bilinear2d_backward.default: (picture, [8, 6], [2, 16, 4, 3], False),
    }  # fmt: skip
    given = arguments[kernel]
    last = [one.permute(to_last(4)).contiguous() if isinstance(one, Tensor) else one for one in given]
    made, expected = WITH_CHANNELS_LAST[kernel](*last), kernel(*given)
    same_tree(torch.utils._pytree.tree_map(lambda one: one.permute(to_first(4)), made), expected)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fakes = WITH_CHANNELS_LAST[kernel](*last)
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (fakes, made)), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
