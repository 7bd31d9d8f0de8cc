"""The logarithm of the gamma function and its derivatives.

Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964): the asymptotic series 6.1.41, 6.3.18, 6.4.12, after as many steps of the
recurrences 6.1.15, 6.3.5, 6.4.6 as make them precise, and the reflections 6.1.17, 6.3.7, 6.4.7 on the left of 1/2.

The steps from x to x + s come in pairs, (x + k) (x + s - 1 - k) = y + c with y = x (x + s - 1) and c = k (s - 1 - k).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import scalar_like
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten

# Steps, and terms of each series, for the dtype's precision.
_STEPS = {ir.DataType.FLOAT: 4, ir.DataType.DOUBLE: 8}
_TERMS = {ir.DataType.FLOAT: 3, ir.DataType.DOUBLE: 7}
# Of the Bernoulli numbers B2, B4, ... the series are made: B / (2n (2n - 1)), -B / 2n, B.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)


@register(aten.lgamma.default, promote="output")
def lgamma(op: Any, self: ir.Value) -> ir.Value:
    """lgamma(Tensor self) -> Tensor"""
    write = _Gamma(op, self)
    reflected = op.Sub(op.Log(op.Div(write.number(math.pi), op.Abs(write.sine()))), write.logarithm())
    infinity = write.number(math.inf)
    result = op.Where(write.is_left, reflected, write.logarithm())
    return op.Where(op.Equal(op.Abs(self), infinity), infinity, result)


@register(aten.digamma.default, promote="output")
def digamma(op: Any, self: ir.Value) -> ir.Value:
    """digamma(Tensor self) -> Tensor: -inf at zero (inf at -0.0), NaN at the other poles, as PyTorch has them."""
    write = _Gamma(op, self)
    cotangent = op.Div(op.Mul(write.number(math.pi), write.cosine()), write.sine())
    result = op.Where(write.is_left, op.Sub(write.derivative(), cotangent), write.derivative())
    is_pole = op.And(op.Less(self, write.number(0.0)), op.Equal(self, op.Floor(self)))
    result = op.Where(is_pole, write.number(math.nan), result)
    return op.Where(op.Equal(self, write.number(0.0)), op.Neg(op.Reciprocal(self)), result)


@register(aten.polygamma.default, promote="output", keep=("n",))
def polygamma(op: Any, n: int, self: ir.Value) -> ir.Value:
    """polygamma(int n, Tensor self) -> Tensor: large at the negative poles, not infinite, as PyTorch's sine of pi x is not zero there."""
    if n == 0:
        return digamma(op, self)
    if n != 1:
        raise Unsupported("a derivative of digamma beyond the first")
    write = _Gamma(op, self)
    ratio = op.Div(write.number(math.pi), op.Sin(op.Mul(self, write.number(math.pi))))
    return op.Where(write.is_left, op.Sub(op.Mul(ratio, ratio), write.second_derivative()), write.second_derivative())


@dataclasses.dataclass
class _Gamma:
    """Writes the functions of one tensor x: of x itself, or of 1 - x on the left of 1/2."""

    op: Any
    x: ir.Value

    def __post_init__(self) -> None:
        op = self.op
        assert self.x.dtype is not None
        self.steps, self.terms = _STEPS[self.x.dtype], _TERMS[self.x.dtype]
        self.is_left = op.Less(self.x, self.number(0.5))
        self.right = op.Where(self.is_left, op.Sub(self.number(1.0), self.x), self.x)
        self.is_near = op.Less(self.right, self.number(self.steps))
        self.far = op.Where(self.is_near, op.Add(self.right, self.number(self.steps)), self.right)
        self.inverse = op.Reciprocal(self.far)
        # Where the steps are not taken, any number serves that overflows nowhere.
        near = op.Min(self.right, self.number(self.steps))
        product = op.Mul(near, op.Add(near, self.number(self.steps - 1)))
        pairs = [k * (self.steps - 1 - k) for k in range(self.steps // 2)]
        self.pairs = [product if c == 0 else op.Add(product, self.number(c)) for c in pairs]
        self.middle = op.Add(op.Mul(near, self.number(2)), self.number(self.steps - 1))

    def number(self, value: float) -> ir.Value:
        """A number as a scalar."""
        return scalar_like(self.op, float(value), self.x)

    def logarithm(self) -> ir.Value:
        """log gamma on the right."""
        op = self.op
        factors = [b / (2 * i * (2 * i - 1)) for i, b in enumerate(_BERNOULLI, 1)]
        main = op.Mul(op.Sub(self.far, self.number(0.5)), op.Sub(op.Log(self.far), self.number(1.0)))
        far = op.Add(op.Add(main, self.number(0.5 * math.log(2 * math.pi) - 0.5)), op.Mul(self._series(factors), self.inverse))
        product = self.pairs[0]
        for pair in self.pairs[1:]:
            product = op.Mul(product, pair)
        return self._without_steps(far, op.Log(product))

    def derivative(self) -> ir.Value:
        """digamma on the right."""
        op = self.op
        factors = [b / (2 * i) for i, b in enumerate(_BERNOULLI, 1)]
        series = op.Mul(op.Mul(self.inverse, self.inverse), self._series(factors))
        far = op.Sub(op.Sub(op.Log(self.far), op.Mul(self.inverse, self.number(0.5))), series)
        total = op.Sum(*(op.Reciprocal(pair) for pair in self.pairs))
        return self._without_steps(far, op.Mul(self.middle, total))

    def second_derivative(self) -> ir.Value:
        """trigamma on the right."""
        op = self.op
        square = op.Mul(self.inverse, self.inverse)
        far = op.Add(op.Add(self.inverse, op.Mul(square, self.number(0.5))), op.Mul(op.Mul(square, self.inverse), self._series(_BERNOULLI)))
        middle = op.Mul(self.middle, self.middle)
        # 1 / a^2 + 1 / b^2 = ((a + b)^2 - 2 a b) / (a b)^2
        parts = [op.Div(op.Sub(middle, op.Mul(pair, self.number(2))), op.Mul(pair, pair)) for pair in self.pairs]
        return op.Where(self.is_near, op.Add(far, op.Sum(*parts)), far)

    def _without_steps(self, far: ir.Value, steps: ir.Value) -> ir.Value:
        return self.op.Where(self.is_near, self.op.Sub(far, steps), far)

    def _series(self, factors: Any) -> ir.Value:
        """The sum of factors[i] / far^2i."""
        op = self.op
        square = op.Mul(self.inverse, self.inverse)
        *others, last = factors[: self.terms]
        total = self.number(last)
        for factor in reversed(others):
            total = op.Add(op.Mul(total, square), self.number(factor))
        return total

    def _turn(self) -> ir.Value:
        """pi times the distance of x from the nearest integer."""
        op = self.op
        return op.Mul(op.Sub(self.x, op.Round(self.x)), self.number(math.pi))

    def sine(self) -> ir.Value:
        """sin(pi x) but for its sign: a number of half turns is left out, from `cosine` as well."""
        return self.op.Sin(self._turn())

    def cosine(self) -> ir.Value:
        """cos(pi x), likewise. ONNX Runtime has no cosine of float64."""
        return self.op.Sin(self.op.Add(self._turn(), self.number(math.pi / 2)))
