"""The gradient of Dirichlet samples by their concentrations: four approximations, each for a part of the arguments.

The formulas and their coefficients are those of PyTorch's `ATen/native/Distributions.h` (`dirichlet_grad_one`, BSD licence, read in torch 2.13).
All four are computed, in float64 as PyTorch computes two of them, and the one is taken that PyTorch takes: the choice is made in the tensors' dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import scalar_like
from ort_backend.lowering.ops.gamma import digamma
from ort_backend.lowering.registry import register

aten = torch.ops.aten

# Coefficients of u^i a^j b^k in the numerator and in the denominator of the correction.
_CORRECTION = (
    (
        (
            (1.003668233, -0.01061107488, -0.0657888334, 0.01201642863),
            (0.6336835991, -0.3557432599, 0.05486251648, -0.001465281033),
            (-0.03276231906, 0.004474107445, 0.002429354597, -0.0001557569013),
        ),
        (
            (0.221950385, -0.3187676331, 0.01799915743, 0.01074823814),
            (-0.2951249643, 0.06219954479, 0.01535556598, 0.001550077057),
            (0.02155310298, 0.004170831599, 0.001292462449, 6.976601077e-05),
        ),
        (
            (-0.05980841433, 0.008441916499, 0.01085618172, 0.002319392565),
            (0.02911413504, 0.01400243777, -0.002721828457, 0.000751041181),
            (0.005900514878, -0.001936558688, -9.495446725e-06, 5.385558597e-05),
        ),
    ),
    (
        (
            (1, -0.02924021934, -0.04438342661, 0.007285809825),
            (0.6357567472, -0.3473456711, 0.05454656494, -0.002407477521),
            (-0.03301322327, 0.004845219414, 0.00231480583, -0.0002307248149),
        ),
        (
            (0.5925320577, -0.1757678135, 0.01505928619, 0.000564515273),
            (0.1014815858, -0.06589186703, 0.01272886114, -0.0007316646956),
            (-0.007258481865, 0.001096195486, 0.0003934994223, -4.12701925e-05),
        ),
        (
            (0.06469649321, -0.0236701437, 0.002902096474, -5.896963079e-05),
            (0.001925008108, -0.002869809258, 0.0008000589141, -6.063713228e-05),
            (-0.0003477407336, 6.959756487e-05, 1.097287507e-05, -1.650964693e-06),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class _Number:
    """A tensor of the graph under Python's arithmetic."""

    op: Any
    value: ir.Value

    def _of(self, other: _Number | float) -> ir.Value:
        return other.value if isinstance(other, _Number) else scalar_like(self.op, float(other), self.value)

    def __add__(self, other: _Number | float) -> _Number:
        return _Number(self.op, self.op.Add(self.value, self._of(other)))

    def __sub__(self, other: _Number | float) -> _Number:
        return _Number(self.op, self.op.Sub(self.value, self._of(other)))

    def __mul__(self, other: _Number | float) -> _Number:
        return _Number(self.op, self.op.Mul(self.value, self._of(other)))

    def __truediv__(self, other: _Number | float) -> _Number:
        return _Number(self.op, self.op.Div(self.value, self._of(other)))

    def __rsub__(self, other: float) -> _Number:
        return _Number(self.op, self.op.Sub(self._of(other), self.value))

    def __rtruediv__(self, other: float) -> _Number:
        return _Number(self.op, self.op.Div(self._of(other), self.value))

    def __pow__(self, other: _Number | float) -> _Number:
        return _Number(self.op, self.op.Pow(self.value, self._of(other)))

    def __neg__(self) -> _Number:
        return _Number(self.op, self.op.Neg(self.value))

    __radd__, __rmul__ = __add__, __mul__

    def log(self) -> _Number:
        return _Number(self.op, self.op.Log(self.value))

    def sqrt(self) -> _Number:
        return _Number(self.op, self.op.Sqrt(self.value))

    def where(self, condition: ir.Value, other: _Number | float) -> _Number:
        """This where `condition` is true, elsewhere `other`."""
        return _Number(self.op, self.op.Where(condition, self.value, self._of(other)))

    def or_zero(self) -> _Number:
        """Zero instead of NaN."""
        return self.where(self.op.Not(self.op.IsNaN(self.value)), 0.0)


@register(aten._dirichlet_grad.default, promote="output")
def _dirichlet_grad(op: Any, x: ir.Value, alpha: ir.Value, total: ir.Value) -> ir.Value:
    """_dirichlet_grad(Tensor x, Tensor alpha, Tensor total) -> Tensor"""
    half, six = scalar_like(op, 0.5, x), scalar_like(op, 6.0, x)
    boundary = op.Mul(op.Mul(total, x), op.Sub(scalar_like(op, 1.0, x), x))
    near_zero = op.And(op.LessOrEqual(x, half), op.Less(boundary, scalar_like(op, 2.5, x)))
    near_one = op.And(op.GreaterOrEqual(x, half), op.Less(boundary, scalar_like(op, 0.75, x)))
    both_large = op.And(op.Greater(alpha, six), op.Greater(op.Sub(total, alpha), six))

    wide = [one if one.dtype == ir.DataType.DOUBLE else op.Cast(one, to=ir.DataType.DOUBLE) for one in (x, alpha, total)]
    u, a, t = (_Number(op, one) for one in wide)
    factor = _Number(op, digamma(op, t.value)) - _Number(op, digamma(op, a.value))
    result = _large(u, a, t - a).where(both_large, _corrected(u, a, t, factor))
    result = (-_small_by_beta(1 - u, t - a, a, factor)).where(near_one, result)
    return _small_by_alpha(u, a, t - a, factor).where(near_zero, result).value


def _small_by_alpha(x: _Number, alpha: _Number, beta: _Number, factor: _Number) -> _Number:
    """Taylor series for a small x, of the derivative by alpha. `factor`: digamma(alpha + beta) - digamma(alpha)."""
    factor = -factor - x.log()
    series, numerator = (factor + 1 / alpha) / alpha, _one(x)
    for i in range(1, 11):
        numerator = numerator * ((i - beta) * x / i)
        denominator = alpha + i
        series = series + numerator / denominator * (factor + 1 / denominator)
    return (x * (1 - x) ** -beta * series).or_zero()


def _small_by_beta(x: _Number, alpha: _Number, beta: _Number, factor: _Number) -> _Number:
    """Taylor series for a small x, of the derivative by beta. `factor`: digamma(alpha + beta) - digamma(beta)."""
    series, numerator = factor / alpha, _one(x)
    product, slope = _one(x), _one(x) - 1  # of beta - 1, beta - 2, ..., and its derivative
    for i in range(1, 9):
        numerator = numerator * (-x / i)
        product, slope = product * (beta - i), slope * (beta - i) + product
        series = series + numerator / (alpha + i) * (slope + factor * product)
    return (-((1 - x) ** (1 - beta)) * series).or_zero()


def _one(like: _Number) -> _Number:
    return _Number(like.op, scalar_like(like.op, 1.0, like.value))


def _large(x: _Number, alpha: _Number, beta: _Number) -> _Number:
    """Rice's saddle point expansion for a large alpha and beta, and a polynomial where that is singular, near the mean."""
    op, total = x.op, alpha + beta
    mean = alpha / total
    deviation = (alpha * beta / (total + 1)).sqrt() / total
    behind = op.GreaterOrEqual(x.value, (mean - 0.1 * deviation).value)
    is_near = op.And(behind, op.LessOrEqual(x.value, (mean + 0.1 * deviation).value))

    square = beta * beta
    inner = (453 + 1620 * beta * (1 - x) - 455 * x) * beta + alpha * (8 * (1 - x) * (135 * beta - 11))
    inner = 3 * (59 + 180 * beta - 90 * x) * square + alpha * inner
    inner = (43 + 20 * (16 + 27 * beta) * x) * square * beta + alpha * inner
    polynomial = 47 * x * square * square + alpha * inner
    numerator = (1 + 12 * alpha) * (1 + 12 * beta) / (total * total)
    near = numerator / (1 - x) * polynomial / (12960 * alpha * alpha * alpha * square * (1 + 12 * total))

    stirling = _stirling(alpha) * _stirling(beta) / _stirling(total)
    distance = alpha * (x - 1) + beta * x
    first = 2 * alpha * alpha * (x - 1) + alpha * beta * (x - 1) - x * square
    first = first / ((2 * alpha / beta).sqrt() * total**1.5 * distance * distance)
    of_alpha, of_beta = (alpha / (total * x)).log(), (beta / (total * (1 - x))).log()
    power = (beta * of_beta + alpha * of_alpha) ** -1.5
    power = power.where(op.Less(x.value, mean.value), -power)
    rest = 0.5 * of_alpha * ((8 * alpha * beta / total).sqrt() / distance + power)
    far = -stirling * x / (2 * alpha * beta / total).sqrt() * (first + rest)
    return near.where(is_near, far)


def _stirling(number: _Number) -> _Number:
    return 1 + 1 / (12 * number) + 1 / (288 * number * number)


def _corrected(x: _Number, alpha: _Number, total: _Number, factor: _Number) -> _Number:
    """A rational correction to an analytic approximation."""
    u = x.log()
    a = alpha.log() - u
    b = total.log() - a
    over, under = (_polynomial(u, [_polynomial(a, [_polynomial(b, row) for row in rows]) for rows in table]) for table in _CORRECTION)
    return over / under * (x * factor / (total - alpha))


def _polynomial(x: _Number, coefficients: Any) -> Any:
    """By Horner's rule, from the constant on."""
    *others, result = coefficients
    for one in reversed(others):
        result = x * result + one
    return result
