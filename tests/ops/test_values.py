"""What PyTorch's operator samples do not have: NaN and infinity, ties, integers that wrap and divide, mixed dtypes, nothing at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ops.harness import check, lower, run, trace
from torch_version import LIMITS_DO_NOT_WRAP, TORCH

aten = torch.ops.aten
nan, inf = math.nan, math.inf


def words(text: str) -> list[str]:
    return text.split()


def odd() -> torch.Tensor:
    return torch.tensor([[1.0, nan, 2, -1], [nan, 1, 2, 3], [4, 5, 6, nan], [inf, -inf, 0, -0.0]])


def integers() -> torch.Tensor:
    return torch.tensor([[-5, -4, -3, -2], [-1, 0, 1, 2], [3, 4, 5, 6]])


def ties() -> torch.Tensor:
    return torch.tensor([3.0, 1, 3, 1, 2, nan, 3, 1] * 4)


_UNARY = words(
    "neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos "
    "atan sinh cosh asinh atanh floor ceil round trunc frac isnan isinf isfinite nan_to_num square logical_not signbit"
)
_BINARY = words(
    "add sub mul div maximum minimum fmax fmin atan2 remainder fmod floor_divide "
    "logaddexp xlogy pow eq ne lt le gt ge logical_and logical_or logical_xor copysign"
)


@pytest.mark.parametrize("name", _UNARY)
def test_nan_and_infinity(name: str) -> None:
    check(getattr(torch, name), odd())


@pytest.mark.parametrize("count", [5, 64, 1000])
@pytest.mark.parametrize("power", [False, True])
def test_square_roots_are_rounded_rightly(count: int, power: bool) -> None:
    x = torch.rand(count, generator=torch.Generator().manual_seed(0))
    x[:5] = torch.tensor([1e-5, 1e-8, 1e-40, torch.inf, 3e38])
    roots = torch.compile(lambda x: x**0.5 if power else x.sqrt(), backend="ort_training")(x)
    assert torch.equal(roots, torch.from_numpy(np.sqrt(x.numpy())))


def _logarithm(x: torch.Tensor) -> torch.Tensor:
    return torch.log(1 - x.tanh() ** 2 + 1e-7)


@pytest.mark.parametrize("count", [64, 100_000])
@pytest.mark.parametrize("function", [torch.tanh, torch.expm1, _logarithm])
def test_tanh_stays_within_its_bounds(function: Callable[[torch.Tensor], torch.Tensor], count: int) -> None:
    """Between 8.2 and 9 that of ONNX Runtime's CPU provider does not."""
    x = torch.cat([sign * torch.linspace(low, 2.3 * low, count) for sign in (-1, 1) for low in (8, 16)])[: 3 * count]
    x[:3] = torch.tensor([nan, inf, -inf])
    result = torch.compile(function, backend="ort_training")(x)
    expected = function(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6 if function is not _logarithm else 2, equal_nan=True)
    if function is not _logarithm:
        assert result.nan_to_num().min() >= -1 and (function is torch.expm1 or result.nan_to_num().max() <= 1)


@pytest.mark.parametrize("name", _BINARY)
def test_nan_and_infinity_of_two(name: str) -> None:
    a = odd()
    check(getattr(torch, name), a, a.flip(0).contiguous())


@pytest.mark.parametrize("name", [name for name in _UNARY if name != "frac"])
def test_integers(name: str) -> None:
    check(getattr(torch, name), integers())


@pytest.mark.parametrize(
    "name",
    words("add sub mul div maximum minimum eq ne lt le gt ge bitwise_and bitwise_or"),
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
def test_integers_of_two(name: str, dtype: torch.dtype) -> None:
    check(getattr(torch, name), integers().to(dtype), torch.tensor([-2, 3, -4, 2], dtype=dtype))


@pytest.mark.parametrize("name", words("add mul maximum minimum eq logical_and logical_or bitwise_xor lt"))
def test_booleans_of_two(name: str) -> None:
    a = torch.tensor([[True, False], [True, True]])
    check(getattr(torch, name), a, torch.tensor([True, False]))


@pytest.mark.parametrize("number", [2, 3, -2, 2.5, -1.5])
@pytest.mark.parametrize("name", words("add sub mul div remainder fmod floor_divide eq ne lt ge"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8], ids=str)
def test_tensor_and_number(name: str, number: float, dtype: torch.dtype) -> None:
    given = torch.tensor([0, 1, 2, 5, 7, 250], dtype=dtype)
    check(lambda t: getattr(torch, name)(t, number), given)


@pytest.mark.parametrize("number", [-1e9, -1e4, 0.1, 0.3, 257.0])
@pytest.mark.parametrize("name", words("eq ne lt ge remainder fmod floor_divide"))
def test_numbers_that_half_precision_has_not(name: str, number: float) -> None:
    """PyTorch rounds the number first."""
    given = torch.tensor([-1e9, -1e4, 0.1, 0.3, 257.0])
    check(lambda t: getattr(torch, name)(t.bfloat16(), number).float(), given)
    check(lambda t, n: getattr(torch, name)(t.bfloat16(), n).float(), given, torch.tensor(number))


def test_integers_are_rounded_to_half_precision() -> None:
    factors = torch.rand(39, generator=torch.Generator().manual_seed(0))
    check(lambda a, b: (a * b.bfloat16()).float(), torch.arange(0, 3000, 77), factors)


@pytest.mark.parametrize("number", [-1, 300, -300])
@pytest.mark.parametrize("name", words("eq ne lt ge clamp floor_divide remainder"))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_numbers_that_wrap(name: str, number: int, dtype: torch.dtype) -> None:
    if name == "clamp" and abs(number) > torch.iinfo(dtype).max:
        pytest.skip("an error of PyTorch's")
    if name == "clamp" and number < 0 and dtype is torch.uint8 and TORCH >= LIMITS_DO_NOT_WRAP:
        pytest.skip("wraps here, as under inductor")
    given = torch.tensor([0, 1, 100, -1]).to(dtype)
    if torch.tensor(number).to(dtype) == -1 and name in ("floor_divide", "remainder"):
        given = given[:3]
    check(lambda t: getattr(torch, name)(t, number), given)


_NARROWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.bool(), torch.all, torch.any, torch.logical_not, torch.count_nonzero, lambda t: torch.logical_and(t, t), lambda t: t.nonzero().sum(),
]  # fmt: skip


@pytest.mark.parametrize("function", _NARROWS)
def test_what_is_0_in_a_narrow_dtype_is_false(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check(lambda t: function(t + 1), torch.tensor([254, 255, 7], dtype=torch.uint8))
    check(lambda t: function(t * t), torch.tensor([1e-5, 1e-2, 1.0]).half())


@pytest.mark.parametrize("divisor", [7, -7, 1, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_large_integers_are_divided_exactly(dtype: torch.dtype, divisor: int) -> None:
    limits = torch.iinfo(dtype)
    given = torch.tensor([limits.min, limits.min + 1, -(2**30) - 1, -8, 0, 8, limits.max - 1, limits.max], dtype=dtype)
    for name in ("floor_divide", "remainder", "fmod"):
        check(lambda t, name=name: getattr(torch, name)(t, divisor), given)
    check(lambda t: torch.div(t, divisor, rounding_mode="trunc"), given[1:])  # PyTorch's own ends the process at the least by -1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x + n // 2) % n,
        lambda x, n: x // n,
        lambda x, n: torch.fmod(x - 7, n),
        lambda x, n: torch.div(x - 7, n + 3, rounding_mode="trunc"),
    ],
    ids=words("remainder floor_divide fmod trunc"),
)
def test_integers_divided_by_a_size(function: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """On ONNX Runtime, as a symbolic size is no less than 2."""
    torch._dynamo.mark_dynamic(rows := torch.randn(8, 4), 0)
    step = torch.compile(lambda x: function(torch.arange(12), x.shape[0]), backend="ort_training", options={"strict": True})
    assert torch.equal(step(rows), function(torch.arange(12), 8))
    assert torch.equal(step(torch.randn(5, 4)), function(torch.arange(12), 5))


def test_integers_divided_by_what_may_be_0() -> None:
    torch._dynamo.mark_dynamic(rows := torch.randn(8, 4), 0)
    step = torch.compile(lambda x: torch.arange(12) // (x.shape[0] - 5), backend="ort_training", options={"strict": True})
    with pytest.raises(Exception, match="integers that may be divided by 0"):
        step(rows)


def test_a_number_over_a_tensor() -> None:
    check(lambda t: 100 // t, torch.tensor([1.5, -2.0, 3.0, inf]))
    check(lambda t: 100 % t, torch.tensor([1.5, -2.0, 3.0, inf]))
    check(lambda t: torch.fmod(torch.tensor(100.0), t), torch.tensor([1.5, -2.0, 3.0]))


def test_division_by_infinity_is_rounded_down() -> None:
    check(lambda t: t // inf, torch.tensor([3.0, -3.0, 0.0]))
    check(torch.floor_divide, torch.tensor([3.0, -3.0, 0.0, 3.0]), torch.tensor([-inf, inf, inf, inf]))


@pytest.mark.parametrize("function", [torch.sign, torch.sgn])
def test_sign_of_nan_is_0(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check(function, odd())


def test_lerp_ends_at_the_end() -> None:
    start, end = torch.tensor([1e8, 1e30, 1.0]), torch.tensor([0.1, 1.0, 5.0])
    for weight in (0.0, 0.4, 0.9, 1.0, -2.0):
        check(lambda a, b, w=weight: torch.lerp(a, b, w), start, end)
        check(lambda a, b, w=weight: torch.lerp(a, b, torch.tensor(w)), start, end)


def test_softplus_vanishes_as_exp_does() -> None:
    far = torch.tensor([-80.0, -40, -20, -16.6, -10, -1, 0, 1, 30])
    for function in (lambda t: F.softplus(t).log(), lambda t: 1 / F.softplus(t, beta=2), lambda t: F.softplus(t.double()).log()):
        check(function, far)
    check(lambda t: aten.softplus_backward(torch.ones_like(t), t, 1, 20).log(), far)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 0.5, -0.5, -1, -2, 2.7])
def test_power(exponent: float) -> None:
    check(lambda t: torch.pow(t, exponent), torch.rand(3, 4) + 0.1)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 5, 27])
def test_integer_power_is_exact(exponent: int) -> None:
    check(lambda t: torch.pow(t, exponent), integers())


def test_digits_of_small_numbers() -> None:
    small = torch.tensor([1e-8, -1e-8, 1e-4, -1e-4, 3e-6, -0.9, 1e30, 80.0, -100.0])
    for function in (torch.log1p, torch.expm1):
        mine = check(function, small)
        assert mine.onnx_nodes <= 8
    relative = torch.log1p(small[:4]) / small[:4]
    assert (relative - 1).abs().max() < 1e-3


@pytest.mark.parametrize("rounding", ["trunc", "floor", None])
@pytest.mark.parametrize("divisor", [0.1, 0.3, -2, 7.0])
def test_division_that_rounds(rounding: str | None, divisor: float) -> None:
    check(lambda t: torch.div(t, divisor, rounding_mode=rounding), torch.tensor([1.0, -1.0, 0.6, 4.2, 0.3, 49.0, -49.0, 1e6]))
    check(lambda a, b: torch.div(a, b, rounding_mode=rounding), torch.tensor([1.0, 1.0, inf, 0.0, 5.0]), torch.tensor([0.1, 0.0, 2.0, 0.0, inf]))


def test_limits() -> None:
    check(lambda t: torch.clamp(t, -0.5, 0.5), odd())
    check(lambda t: torch.clamp(t, 2, 1), odd())
    check(lambda t: torch.clamp_min(t, 0.5), odd())
    check(lambda t: torch.clamp_max(t, 0.5), odd())
    check(torch.clamp, odd(), torch.randn(4), torch.randn(4, 1))
    check(lambda t: torch.clamp(t, -1.5), integers())
    check(lambda t: torch.threshold(t, 0.1, 20.0), odd())
    check(lambda t: torch.nan_to_num(t, 1.0, 2.0, 3.0), odd())
    check(torch.nan_to_num, odd().half())


def test_choices() -> None:
    mask = torch.tensor([[True, False], [False, True]])
    for yes, no in (
        (torch.randn(2, 2), torch.randn(2)),
        (mask, ~mask),
        (torch.ones(2, 2).long(), torch.randn(2)),
        (torch.ones(2).int(), torch.ones(2).byte()),
    ):
        check(torch.where, mask, yes, no)
    check(lambda m: torch.where(m, 1.0, 0.0), mask)
    check(lambda m: torch.where(m, 1, 0), mask)
    check(lambda m, t: torch.where(m, t, 1), mask, torch.randn(2, 2))
    check(lambda t, m: t.masked_fill(m, -inf), torch.randn(2, 2), mask)
    check(lambda t, m: t.masked_fill(m, True), ~mask, mask)


_DTYPES = [torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.uint8, torch.float64, torch.int32, torch.int8]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_conversions(dtype: torch.dtype) -> None:
    check(lambda t: t.to(dtype).float(), torch.tensor([0.0, 0.5, 1.9, 2.5, 100.3]))
    check(lambda t: t.to(dtype).float(), torch.tensor([0, 1, 2, 127]))


# -- reductions

_REDUCTIONS = words("sum mean prod amax amin argmax argmin max min var std logsumexp cumsum any all median")


@pytest.mark.parametrize("name", _REDUCTIONS)
def test_reduction_sees_nan(name: str) -> None:
    # Long rows: ONNX Runtime's vectorised kernels treat NaN in them in another way than in short ones.
    wide = odd().repeat(1, 20)
    check(lambda t: getattr(torch, name)(t, -1), odd())
    check(lambda t: getattr(torch, name)(t, -1), wide)
    check(lambda t: getattr(torch, name)(t, 0), wide.t().contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_that_vanish(dtype: torch.dtype) -> None:
    check(lambda t: torch.exp(t).log(), torch.tensor([-inf, -1000, -1e30, -80, 0, 80, 1000, inf, nan], dtype=dtype))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, -1, (0, 1)])
def test_the_logarithm_of_a_sum_of_exponentials_that_are_0_or_infinite(dim: int | tuple[int, int], keepdim: bool) -> None:
    rows = torch.tensor([[-inf, -inf, -inf], [inf, 1, -inf], [nan, -inf, -inf], [nan, inf, 0], [-inf, 1, 2], [1e30, 1e38, -1e38], [-200, -300, -400]])
    for given in (rows, rows[:1], rows[1:2], rows.double(), rows.t().contiguous()):
        check(lambda t: torch.logsumexp(t, dim, keepdim), given)


@pytest.mark.parametrize("name", words("sum prod amax amin argmax max min any all cumsum count_nonzero median"))
def test_reduction_of_integers(name: str) -> None:
    check(lambda t: getattr(torch, name)(t, 1), integers())


@pytest.mark.parametrize("name", words("sum mean any all prod"))
def test_reduction_of_nothing(name: str) -> None:
    check(lambda t: getattr(torch, name)(t, 1), torch.randn(3, 0))
    check(lambda t: getattr(torch, name)(t), torch.randn(3, 0))


@pytest.mark.parametrize("name", words("sum mean amax amin argmax logsumexp cumsum any all"))
def test_reduction_of_a_scalar(name: str) -> None:
    check(lambda t: getattr(torch, name)(t, dim=-1), torch.tensor(3.0))


@pytest.mark.parametrize("order", [2, 1, 0, inf, -inf, 3, 0.5])
def test_norms(order: float) -> None:
    check(lambda t: torch.linalg.vector_norm(t, order, dim=(0, 1)), torch.randn(3, 4, 5))
    check(lambda t: torch.linalg.vector_norm(t, order), torch.randn(3, 4, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
def test_equal_elements_have_no_deviation(dim: Any, dtype: torch.dtype) -> None:
    given = torch.full((37, 37), 0.1, dtype=dtype)
    lowered = lower(trace(lambda t: (torch.std(t, dim), *torch.var_mean(t, dim)), [given]))
    deviation, variance, mean = run(lowered, [given])
    assert not deviation.any() and not variance.any()
    torch.testing.assert_close(mean, torch.full_like(mean, 0.1))


def test_a_correction_that_follows_a_size() -> None:
    check(lambda t: torch.var(t, dim=1, correction=t.shape[1] // 2), torch.randn(3, 8), dynamic=True, other=[torch.randn(3, 10)])


def test_logarithms_of_probabilities_of_nan_and_infinity_in_double_precision() -> None:
    check(lambda t: torch.log_softmax(t, 1), odd().double())
    check(lambda t: torch.log_softmax(t, 0), torch.randn(5, 3).double() * 100)


def test_nan_is_larger_than_infinity() -> None:
    given = torch.tensor([[inf, nan, 1.0, nan, inf, 2.0], [nan, inf, inf, 3.0, nan, inf]])
    check(lambda t: torch.sort(t, stable=True).values, given)
    check(lambda t: torch.sort(t, stable=True, descending=True).values, given)
    check(lambda t: torch.topk(t, 2).values, given)
    check(lambda t: torch.topk(t, 4, largest=False).values, given)
    check(lambda t: torch.nanmedian(t, 1).values, given)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_scattered_extremes(reduce: str) -> None:
    index = torch.tensor([0, 0, 1, 1, 2])
    flags, start = torch.tensor([True, False, False, False, True]), torch.tensor([False, False, True])
    numbers, with_nan = torch.tensor([1.0, 2.0, nan, 0.0, 1.0]), torch.tensor([nan, 1.0, 2.0])
    check(lambda a, i, b: a.scatter_reduce(0, i, b, reduce), start, index, flags)
    check(lambda a, i, b: a.scatter_reduce(0, i, b, reduce), with_nan, index, numbers)
    check(lambda a, i, b: a.scatter_reduce(0, i, b, reduce, include_self=False), with_nan, index, numbers)


def test_nothing_is_rolled() -> None:
    check(lambda t: torch.roll(t, 1), torch.zeros(2, 0, 3))
    by = torch.compile(lambda t, count: t.roll(count, 1), backend="ort_training", dynamic=True)  # by a number of the graph
    assert by(torch.zeros(2, 0, 3), 2).shape == (2, 0, 3)


def test_variance_of_one() -> None:
    with pytest.warns(UserWarning, match="degrees of freedom"):
        check(lambda t: torch.var(t, 0), torch.randn(1, 3))


@pytest.mark.parametrize("descending", [True, False])
def test_order_of_equal_elements(descending: bool) -> None:
    check(lambda t: torch.sort(t, stable=True, descending=descending), ties())
    check(lambda t: torch.sort(t, stable=True, dim=0, descending=descending), integers().to(torch.int16))
    check(lambda t: t.topk(2, -1, descending), torch.tensor([[1.0, nan, 2], [3, 2, 1]]))


# -- indices


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(accumulate: bool) -> None:
    x, i, j = torch.randn(3, 4, 5), torch.tensor([1, -1, 0]), torch.tensor([[0], [2]])
    for indices, shape in (
        ([i], (3, 4, 5)),
        ([None, i], (3, 3, 5)),
        ([i, j], (2, 3, 5)),
        ([None, i, j], (3, 2, 3)),
        ([i, None, j], (2, 3, 4)),
        ([None, i, j], ()),
        ([None, i, j], (2, 1)),
    ):

        def put(t: torch.Tensor, values: torch.Tensor, *given: torch.Tensor, indices: list[Any] = indices) -> torch.Tensor:
            rest = iter(given)
            return aten.index_put(t, [None if index is None else next(rest) for index in indices], values, accumulate)

        check(put, x, torch.randn(shape), *(index for index in indices if index is not None))


@pytest.mark.parametrize(
    "take",
    [
        lambda t, i, j: t[i],
        lambda t, i, j: t[:, i],
        lambda t, i, j: t[i, j],
        lambda t, i, j: t[:, i, j],
        lambda t, i, j: t[i, :, j],
        lambda t, i, j: t[:, j, 2:4],
    ],
)
def test_index(take: Callable[..., torch.Tensor]) -> None:
    check(take, torch.randn(3, 4, 5), torch.tensor([1, -1, 0]), torch.tensor([[0], [2]]))


def test_masks() -> None:
    x, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    check(lambda t, m, v: aten.index_put(t, [m], v), x, mask, torch.tensor(2.0))
    check(lambda t, m, s: aten.masked_scatter(t, m, s), x, mask, torch.randn(12))
    check(lambda t, m, s: aten.masked_scatter(t, m, s), x, mask[:, :1].contiguous(), torch.randn(12))


@pytest.mark.parametrize("padding_idx", [-1, 3])
def test_embedding_gradient(padding_idx: int) -> None:
    indices = torch.randint(0, 10, (3, 5))
    check(lambda g, i: aten.embedding_dense_backward(g, i, 10, padding_idx, False), torch.randn(3, 5, 4), indices)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", words("sum mean prod amax amin"))
def test_scatter_reduce(reduce: str, include_self: bool) -> None:
    index = torch.randint(0, 4, (3, 4, 5))
    check(lambda t, i, s: t.scatter_reduce(1, i, s, reduce, include_self=include_self), torch.randn(3, 4, 5), index, torch.randn(3, 4, 5))


def test_places_in_a_sequence() -> None:
    for right in (False, True):
        check(lambda t, b, right=right: torch.bucketize(t, b, right=right), odd(), torch.tensor([-1.0, 0, 2, 3]))
        check(lambda t, b, right=right: torch.searchsorted(b, t, right=right), odd()[:2], torch.tensor([[-1.0, 0, 2], [1, 2, 3]]))


# -- shapes


def test_padding_cuts_after_it_extends() -> None:
    x = torch.randn(2, 3, 4)
    for mode in ("replicate", "reflect"):
        check(lambda t, mode=mode: F.pad(t, (-1, 2), mode=mode), x)
    for kind, padding in (("replication", [-3, 5]), ("replication", [2, 1]), ("reflection", [2, -1])):
        grad = torch.randn(2, 3, 4 + sum(padding))
        check(lambda g, t, kind=kind, padding=padding: getattr(aten, f"{kind}_pad1d_backward")(g, t, padding), grad, x)


@pytest.mark.parametrize("bounds", [(1, 5, 1), (-5, -1, 1), (2, 2**63 - 1, 2), (1, 2**63 - 1, 3), (0, 9, 1)])
def test_slice_gradient(bounds: tuple[int, int, int]) -> None:
    taken = torch.zeros(3, 9, 5)[:, slice(*bounds)]
    check(lambda g: aten.slice_backward(g, [3, 9, 5], 1, *bounds), torch.randn(taken.shape))
    check(lambda t, s: torch.slice_scatter(t, s, 1, *bounds), torch.randn(3, 9, 5), torch.randn(taken.shape))


@pytest.mark.parametrize("offset", [-2, 0, 1])
def test_diagonals(offset: int) -> None:
    x = torch.randn(3, 4, 5)
    diagonal = torch.diagonal(x, offset, 0, 2)
    check(lambda t: torch.diagonal(t, offset, 0, 2), x)
    check(lambda g: aten.diagonal_backward(g, [3, 4, 5], offset, 0, 2), torch.randn(diagonal.shape))
    check(lambda t, s: torch.diagonal_scatter(t, s, offset, 0, 2), x, torch.randn(diagonal.shape))
    check(lambda t: torch.diag_embed(t, offset), x)
    check(lambda t: t.tril(offset), x)
    check(lambda t: t.triu(offset), integers().int())


def test_cat_of_several_dtypes_and_nothing() -> None:
    check(lambda a, b: torch.cat([a, b]), torch.randn(3, 4), integers())
    check(lambda a, b: torch.cat([a, b], 1), torch.randn(0), torch.randn(3, 4))


def test_addresses() -> None:
    check(lambda t: torch.as_strided(t, (2, 3), (1, 2), 1), torch.randn(12))
    check(lambda t: torch.as_strided(t, (4, 3), (3, 1)), torch.randn(12))
    check(lambda t, s: torch.as_strided_scatter(t, s, (2, 3), (6, 2), 1), torch.randn(3, 4), torch.randn(2, 3))


def test_new_tensors() -> None:
    check(lambda t: (torch.arange(5), torch.arange(1, 7, 2), torch.arange(0, 1, 0.1), torch.arange(9000), torch.arange(5.0)), torch.zeros(1))
    check(lambda t: (torch.linspace(0, 1, 7), torch.eye(3), torch.eye(2, 4, dtype=torch.int64), torch.scalar_tensor(3.5)), torch.zeros(1))
    check(lambda t: (torch.zeros(3, dtype=torch.bfloat16).float(), torch.full((), 2, dtype=torch.bfloat16).float()), torch.zeros(1))
    check(lambda t: (torch.full((2, 3), 7), torch.full((2,), True), t.new_full((1,), 2.5)), torch.zeros(1))
    check(lambda t: (aten.copy(t, t[0]), aten.copy(t, t.long()), aten.fill(t, torch.tensor(2))), torch.randn(3, 4))


@pytest.mark.parametrize("count", [4, 5000])  # from 4096 on PyTorch's kernel takes the angles
def test_sums_of_negative_zeros_are_zeros(count: int) -> None:
    x = -torch.zeros(count, 3)
    for function in (torch.atan2, torch.copysign):
        angles = torch.compile(lambda x: function(torch.ones(count, 1), x.sum(1, keepdim=True)), backend="ort_training")(x)  # noqa: B023
        assert torch.equal(angles, function(torch.ones(count, 1), x.sum(1, keepdim=True)))
    assert not torch.compile(lambda x: x.mean(1).view(1, -1).signbit().any(), backend="ort_training")(x)
    assert not torch.compile(lambda x: x.cumsum(1)[:, :2].signbit().any(), backend="ort_training")(x)


def test_angles_of_infinities() -> None:
    ends = torch.tensor([inf, -inf, 1.0, -1.0, 0.0, -0.0, nan])
    y, x = torch.meshgrid(ends, ends, indexing="ij")
    check(torch.atan2, y, x)
    check(lambda x, y: torch.complex(x, y).angle(), x, y)
