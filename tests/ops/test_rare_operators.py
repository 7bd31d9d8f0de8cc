"""Operators that few trainings need, with the values at their edges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from ops.trained import check_training, needs_grad
from torch_version import NARROW_COPIES_TRAIN

T = torch.tensor
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _sizes_of_data() -> Iterator[None]:
    from torch._dynamo import config

    with config.patch(capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("repeats", [[1, 0, 2, 3], [0, 0, 0, 5], [200, 1, 0, 300]])
def test_repeat_interleave(repeats: list[int], dtype: torch.dtype) -> None:
    check_training(lambda x, r: x.repeat_interleave(r, 0), needs_grad(4, 6), T(repeats, dtype=dtype))
    check_training(lambda x, r: x.repeat_interleave(r, 0, output_size=sum(repeats)), needs_grad(4, 6), T(repeats, dtype=dtype))


def test_repeat_interleave_of_dynamic_sizes() -> None:
    others = [(needs_grad(3, 7), T([5, 0, 1]))]
    check_training(lambda x, r: x.repeat_interleave(r, 0), needs_grad(4, 6), T([1, 0, 2, 3]), dynamic=True, others=others)


# What every lowering that moves elements takes; 8-bit floats stay with PyTorch.
MOVED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@NARROW_COPIES_TRAIN
@pytest.mark.parametrize("dtype", [*MOVED, torch.complex64, torch.complex128], ids=str)
def test_copies_of_parts(dtype: torch.dtype) -> None:
    x = torch.randn(5, 4).to(dtype).requires_grad_(dtype.is_floating_point or dtype.is_complex)
    for dim, start, length in ((0, 0, 5), (1, 1, 2), (-1, -3, 2), (0, 5, 0)):
        check_training(lambda x, d=dim, s=start, n=length: x.narrow_copy(d, s, n), x)
    for start, length in ((-2, 2), (-5, 5)):  # PyTorch's formula for the gradient takes no part that is counted from the end and ends there
        check_training(lambda x, s=start, n=length: x.narrow_copy(0, s, n), x.detach())
    check_training(lambda x: (*torch.unbind_copy(x), *torch.unbind_copy(x, -1)), x)


@NARROW_COPIES_TRAIN
def test_copies_of_parts_of_dynamic_sizes() -> None:
    others = [(needs_grad(7, 4), needs_grad(4))]
    check_training(lambda x, y: x.narrow_copy(0, y.shape[0] - 1, 2), needs_grad(5, 4), needs_grad(3), dynamic=True, others=others)
    for function in (lambda x, y: x.detach().narrow_copy(0, -y.shape[0], y.shape[0]) * y[0], lambda x, y: x.detach().narrow_copy(0, -2, 2) * y[0]):
        check_training(function, needs_grad(5, 4), needs_grad(3), dynamic=True, others=others)
    check_training(lambda x, y: torch.unbind_copy(x, 1)[1] * y[0], needs_grad(5, 4), needs_grad(3), dynamic=True, others=others)


@pytest.mark.parametrize("numbers", [[1, 3, 3, 0, 7], [0], []])
def test_bincount(numbers: list[int]) -> None:
    given = T(numbers, dtype=torch.int64)
    check_training(lambda x: (x.bincount(), x.bincount(minlength=5), x.int().bincount(minlength=20)), given)
    if numbers:  # of no numbers with weights, eager gives integers and its fake kernel fractions
        check_training(lambda x, w: (x.bincount(w, minlength=5), x.bincount(w.double())), given, torch.randn(len(numbers)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_index_reduce(reduce: str, include_self: bool, dtype: torch.dtype) -> None:
    function = lambda x, s: x.index_reduce(-1, T([0, 2, 2, 5]), s, reduce, include_self=include_self)  # noqa: E731
    if dtype.is_floating_point:
        check_training(function, needs_grad(3, 6), needs_grad(3, 4))
        check_training(function, needs_grad(3, 6), needs_grad(3, 4), dynamic=True)
        check_training(function, T([math.nan, 1, 2, 3, 4, math.inf]), T([1, math.nan, 3, -math.inf]))
    else:
        check_training(function, torch.randint(-9, 9, (3, 6)), torch.randint(-9, 9, (3, 4)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_shifts(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    values = T([0, 1, 5, limits.max, limits.min, max(limits.min, -7)], dtype=dtype)[:, None]
    counts = T([0, 1, limits.bits - 2, limits.bits - 1], dtype=dtype)
    check_training(lambda a, b: (a << b, a >> b, a << 3, a >> 2, 5 << b, torch.bitwise_right_shift(a, b)), values, counts)


def test_sums_of_bools() -> None:
    mask, index, values = T([True, False, False, True]), T([1, 1, 3]), T([True, False, False])
    check_training(lambda x, i, v: (x.index_put((i,), v, accumulate=True), x.put(i, v, accumulate=True)), mask, index, values)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_distances(p: float) -> None:
    first, second = torch.randn(2, 5, 4), torch.randn(2, 6, 4)
    second[0, 0] = first[0, 0]  # a distance of zero
    second[1, 1, :2] = first[1, 1, :2]
    outside = ["aten::_cdist_backward"] if p == 0 else []
    check_training(lambda x, y: torch.cdist(x, y, p), first.requires_grad_(), second.requires_grad_(), outside=outside)


def test_distances_of_many_rows_run_in_pytorch() -> None:
    check_training(lambda x, y: torch.cdist(x, y, 1.0), torch.randn(300, 20), torch.randn(300, 20), outside=["aten::_cdist_forward"])


@pytest.mark.parametrize("dynamic", [False, True])
def test_bilinear_forms(dynamic: bool) -> None:
    check_training(lambda x, y, w, b: F.bilinear(x, y, w, b), needs_grad(4, 6), needs_grad(4, 5), needs_grad(3, 6, 5), needs_grad(3), dynamic=dynamic)


@pytest.mark.parametrize("activation", [lambda x: F.elu_(x, -2.0), lambda x: F.celu_(x, -2.0), lambda x: F.leaky_relu_(x, -0.2)])
def test_in_place_activation_that_loses_the_sign(activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return activation(x.clone())

    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    result = torch.compile(function, backend="ort_training", fullgraph=True)(x)
    torch.testing.assert_close(result, function(x))
    with pytest.raises(RuntimeError, match="call out-of-place version"):
        result.sum().backward()
    torch._dynamo.reset()
    check_training(lambda x: F.elu_(x.clone(), 2.0) + F.leaky_relu_(x.clone(), 0.2), needs_grad(4, 6))


def test_lazy_clones_of_what_a_session_computed() -> None:
    check_training(lambda x: (x.exp() + 1)._lazy_clone().mul(2), needs_grad(3, 4))
    check_training(lambda x: (x.exp() + 1)._lazy_clone().mul(2), torch.randn(3, 4, dtype=torch.complex64))
