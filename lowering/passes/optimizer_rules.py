"""Which optimizer's rule a function is, and with what settings: told from what it gives for some numbers, whatever it is written as."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ort_backend.lowering.kernels.optimizer_steps import ADAM_STEP, SGD_STEP, adam_step, sgd_step

# (parameter, gradient, states, steps so far, learning rate if that is a tensor) -> (new parameter, new states), each for one element or several
Update = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, Tensor], tuple[Tensor, Sequence[Tensor]]]


class Rule(NamedTuple):
    """A rule with its settings, but for the tensors."""

    target: Any
    settings: tuple[Any, ...]
    order: tuple[int, ...]  # of the states, as the operator takes them


# Steps after which nothing is left of Adam's corrections for averages that began at zero.
_MANY = 1e9
_RATE = 0.3125  # for a learning rate that is a tensor


def rule_of(update: Update, states: int, *, counts: bool, has_rate: bool) -> Rule | None:
    """The rule that a function follows, up to rounding in float64; None for any that is not Adam's, AdamW's or SGD's.

    Args:
        update: The function, of elements that it treats alike.
        states: How many states there are for a parameter.
        counts: Whether the steps are counted.
        has_rate: Whether the learning rate is a tensor; else it is one of the settings.
    """
    ways: list[Callable[[], Rule | None]] = []
    if counts and states == 2:
        ways = [functools.partial(_adam, update, order) for order in ((0, 1), (1, 0))]
    elif not counts and states == 1:
        ways = [functools.partial(_sgd, update, nesterov) for nesterov in (False, True)]
    elif not counts and not states:
        ways = [functools.partial(_without_momentum, update)]
    for solve in ways:
        try:
            rule = solve()
        except ZeroDivisionError:  # no settings give such numbers
            continue
        if rule is not None and _holds(rule, update, states, has_rate=has_rate):
            return rule
    return None


def _at(update: Update, p: float, g: float, *states: float) -> list[float]:
    """New parameter and states of one element, after many steps."""
    p_, g_, *rest = (torch.tensor([number], dtype=torch.float64) for number in (p, g, *states))
    new, after = update(p_, g_, rest, torch.tensor(_MANY, dtype=torch.float64), torch.tensor(_RATE, dtype=torch.float64))
    return [float(one) for one in (new, *after)]


def _adam(update: Update, order: tuple[int, int]) -> Rule | None:
    """`torch.optim.Adam` and `AdamW`: m' = b1 m + (1 - b1) g, v' = b2 v + (1 - b2) g^2, p' = p (1 - rate decay) - rate m' / (sqrt(v') + eps)."""

    def at(p: float, g: float, m: float, v: float) -> list[float]:
        new, *states = _at(update, p, g, *((m, v) if order == (0, 1) else (v, m)))
        return [new, *(states[i] for i in order)]

    beta1, beta2 = at(0, 0, 1, 0)[1], at(0, 0, 0, 1)[2]
    if not (0 < beta1 < 1 and 0 < beta2 < 1):
        return None
    of_gradient, of_parameter = at(0, 1, 0, 0)[1] / (1 - beta1), at(1, 0, 0, 0)[1] / (1 - beta1)
    with_one, with_none = at(0, 0, 1, 1 / beta2)[0], at(0, 0, 1, 0)[0]  # rate / (1 + eps) and rate / eps, but for the sign and beta1
    if not with_one or not with_none:
        return None
    rate = 1 / (beta1 / with_none - beta1 / with_one)
    decay = of_parameter or (1 - at(1, 0, 0, 1)[0]) / rate
    numbers = (rate, beta1, beta2, decay, -beta1 / with_none * rate)
    return Rule(ADAM_STEP, (*map(_plain, numbers), of_parameter == 0, of_gradient < 0), order)


def _sgd(update: Update, nesterov: bool) -> Rule | None:
    """`torch.optim.SGD` with momentum: b' = momentum b + (1 - dampening) d, p' = p - rate b', or p - rate (d + momentum b'); d = g + decay p."""
    momentum, of_gradient, of_parameter = _at(update, 0, 0, 1)[1], _at(update, 0, 1, 0)[1], _at(update, 1, 0, 0)[1]
    if not momentum or not of_gradient:
        return None
    moved = (1 + momentum * abs(of_gradient)) if nesterov else abs(of_gradient)
    rate = abs(_at(update, 0, 1, 0)[0]) / moved
    numbers = (rate, momentum, 1 - abs(of_gradient), of_parameter / abs(of_gradient))
    return Rule(SGD_STEP, (*map(_plain, numbers), nesterov, of_gradient < 0), (0,))


def _without_momentum(update: Update) -> Rule | None:
    """`torch.optim.SGD` without: p' = p - rate (g + decay p)."""
    of_gradient, of_parameter = _at(update, 0, 1)[0], _at(update, 1, 0)[0]
    if not of_gradient:
        return None
    rate = abs(of_gradient)
    decay = _plain((1 - of_parameter) / rate)
    # An average of weights is such a function, too: of this decay.
    return Rule(SGD_STEP, (_plain(rate), 0.0, 0.0, decay, False, of_gradient > 0), ()) if decay != 1 else None


def _plain(number: float) -> float:
    """The number that somebody has written, where rounding has made another of it."""
    short = float(f"{number:.9g}") if abs(number) > 1e-13 else 0.0
    return short if abs(short - number) <= max(1e-11 * abs(number), 1e-13) else number


def _holds(rule: Rule, update: Update, states: int, *, has_rate: bool) -> bool:
    """Whether the operator gives the same for other numbers, and other counts of steps."""
    generator = torch.Generator().manual_seed(0)
    parameter, gradient, *before = (torch.randn(16, dtype=torch.float64, generator=generator) for _ in range(2 + states))
    if rule.target is ADAM_STEP:
        before[rule.order[1]] = before[rule.order[1]].square()
    for step, rate in ((0.0, _RATE), (3.0, 0.01), (500.0, 2.0)) if has_rate else ((0.0, 0.0), (3.0, 0.0), (500.0, 0.0)):
        count, rate_tensor = (torch.tensor(number, dtype=torch.float64) for number in (step, rate))
        expected, after = update(parameter, gradient, before, count, rate_tensor)
        mine, *given = (one.clone() for one in (parameter, *(before[i] for i in rule.order)))
        settings = ((rate_tensor if has_rate else None), *rule.settings)
        if rule.target is ADAM_STEP:
            adam_step([mine], [gradient], [given[0]], [given[1]], [count.float() + 1], *settings)
        else:
            sgd_step([mine], [gradient], given, *settings)
        pairs = [(mine, expected), *((one, after[i]) for one, i in zip(given, rule.order, strict=True))]
        if not all(torch.allclose(one, other, rtol=1e-7, atol=1e-10) for one, other in pairs):
            return False
    return True
