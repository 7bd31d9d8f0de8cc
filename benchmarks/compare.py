"""Whether two backends compute the same, and whether their times differ by more than noise."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Largest relative difference of a loss from eager's, and of a parameter's gradient in the Euclidean norm. A ReLU in front of which rounding
# decides the sign changes a gradient by more than rounding: ResNet-50's lie up to 2 % from those in float64, eager PyTorch's as well.
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
GRADIENT_TOLERANCE = {torch.float32: 5e-2, torch.bfloat16: 2e-1}

# Ratios nearer to 1 than this count as noise even if every round agrees: where memory lies changes as much from process to process.
RESOLUTION = 0.01


def loss_error(losses: Sequence[float], reference: Sequence[float], dtype: torch.dtype, in_float32: Sequence[float] | None = None) -> str | None:
    """What is wrong with these losses, None if they are the reference's.

    Where the reference's own in float32 are given, losses behind the first step in which those differ by more than the tolerance need only be
    finite: training magnifies the rounding of half precision from step to step (the DLRM's to 5 % within two hundred, eager PyTorch's as well).
    """
    tells = True
    for step, (loss, wanted) in enumerate(zip(losses, reference, strict=True)):
        allowed = LOSS_TOLERANCE[dtype] * max(abs(wanted), 1e-3)
        tells = tells and (in_float32 is None or abs(in_float32[step] - wanted) <= allowed)
        if not math.isfinite(loss) or (tells and abs(loss - wanted) > allowed):
            return f"wrong loss: {loss:.6g} at step {step}, eager has {wanted:.6g}"
    return None


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(loss - wanted) / max(abs(wanted), 1e-3) for loss, wanted in zip(losses, reference, strict=True))


def gradient_error(
    gradients: dict[str, Tensor], reference: dict[str, Tensor], dtype: torch.dtype, in_float32: dict[str, Tensor] | None = None
) -> str | None:
    """What is wrong with these gradients, None if they are the reference's.

    Where the reference's own in float32 are given, a difference may be twice as large as from those: deep convolutional networks of random weights
    magnify the rounding of half precision (ResNet-50's gradients a third, eager PyTorch's as well).
    """
    if gradients.keys() != reference.keys():
        return f"wrong gradients: only one of this and eager has {sorted(gradients.keys() ^ reference.keys())}"
    largest = max(wanted.norm().item() for wanted in reference.values())
    for name, wanted in reference.items():
        difference = (gradients[name] - wanted).norm().item()
        allowed = GRADIENT_TOLERANCE[dtype] * max(wanted.norm().item(), 1e-3 * largest)  # a key's bias has a gradient of rounding only
        if in_float32 is not None:
            allowed = max(allowed, 2 * (in_float32[name] - wanted).norm().item())
        if not difference <= allowed:
            return f"wrong gradient of {name}: {difference:.3g} from eager's, whose norm is {wanted.norm().item():.3g}"
    return None


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One backend's time by another's: median over the rounds, and its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float], others: Sequence[float]) -> Ratio:
        """From paired times: each pair was measured in one round, so that a slow moment of the machine met both."""
        ratios = sorted(a / b for a, b in zip(times, others, strict=True))
        outside = _outside(len(ratios))
        return cls(statistics.median(ratios), ratios[outside], ratios[-1 - outside])

    @property
    def within_noise(self) -> bool:
        """Whether it cannot be told from 1."""
        return self.low <= 1 <= self.high or abs(self.median - 1) < RESOLUTION


def _outside(count: int) -> int:
    """How many of `count` sorted values lie below a 95 % interval of their median, and as many above: no distribution is assumed."""
    below, chance = 0, 0.5**count
    while 2 * chance <= 0.05 and below < (count - 1) // 2:
        below += 1
        chance += math.comb(count, below) * 0.5**count
    return max(below - 1, 0)


def geometric_mean(values: Iterable[float]) -> float | None:
    """None if there are no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None
