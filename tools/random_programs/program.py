"""A random program, and what it gives in eager PyTorch and compiled."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from tools.random_programs import lines

# Weights of the kinds of lines; a write is a copy and some lines that write to it.
KINDS = {lines.POINTWISE: 6, lines.REDUCTIONS: 3, lines.MOVEMENTS: 5, lines.LAYERS: 2, lines.MIXED: 3, lines.WRITES: 3}
MOST_ELEMENTS, LARGEST = 20_000, 1e3
TRIES = 6  # for each line
ARGUMENTS = ("x0", "x1", "x2")
# Gradients of what a kernel rounds differently differ by this much of the largest; a float32 step beyond is judged against float64.
TOLERANCE = 2e-4
ROUNDINGS = 20  # times eager's own distance from float64


@dataclass(frozen=True)
class Program:
    """Lines over `x0`, `x1`, `x2` and `idx`, indices; and what it returns.

    Attributes:
        seed: What made it.
        lines: Assignments and writes, in order.
        results: The names that it returns.
        differentiable: Which of the arguments require a gradient.
    """

    seed: int
    lines: tuple[str, ...]
    results: tuple[str, ...]
    differentiable: tuple[bool, ...]

    def source(self) -> str:
        """The text of a function `f`."""
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def f({', '.join(ARGUMENTS)}, idx):\n{body}    return ({', '.join(self.results)},)\n"

    def build(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function, new each time: PyTorch keeps what it compiles under the code object."""
        text, name = self.source(), f"<program {self.seed}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        names = environment()
        exec(compile(text, name, "exec"), names)
        return names["f"]

    def arguments(self) -> list[torch.Tensor]:
        """What it is called with."""
        shapes = random.Random(self.seed).choice(lines.SHAPES)
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(shape, generator=generator) for shape in shapes]


@dataclass(frozen=True)
class Outcome:
    """What a call and its backward gave: results, gradients, and the generator's state."""

    results: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]
    state: torch.Tensor


def environment() -> dict[str, Any]:
    """The names that lines use."""

    def square(a: torch.Tensor) -> torch.Tensor:
        size = a.shape[-1]
        return torch.linspace(-1, 1, size * size, dtype=a.dtype).view(size, size)

    return {"torch": torch, "F": F, "W": square, "idx": torch.tensor([2, 0, 5, 2, 7, 1])}


def grown(seed: int, size: int) -> Program:
    """A program of about `size` values: lines that eager PyTorch refuses, or whose values are not finite or too many, are left out."""
    choice = random.Random(seed)
    choice.choice(lines.SHAPES)  # as `arguments` does
    program = Program(seed, (), (), (True, choice.random() < 0.7, choice.random() < 0.5))
    values: dict[str, torch.Tensor] = dict(zip(ARGUMENTS, program.arguments(), strict=True))
    written: list[str] = []
    for _ in range(size * TRIES):
        if len(values) == size + len(ARGUMENTS):
            break
        table = choice.choices(list(KINDS), list(KINDS.values()))[0]
        names = list(values)
        a, b = choice.choices(names, range(1, len(names) + 1), k=2)
        new = f"v{len(values) - len(ARGUMENTS)}"
        template = choice.choice(lines.templates(lines.COPIES if table == lines.WRITES else table))
        line = f"{new} = {_filled(choice, template, values, a=a, b=b)}"
        if not _runs(line, values, new):
            continue
        written.append(line)
        for _ in range(choice.choice((1, 1, 2, 3)) if table == lines.WRITES else 0):
            line = _filled(choice, choice.choice(lines.templates(lines.WRITES)), values, a=a, b=b, c=new)
            if _runs(line, values, new):
                written.append(line)
    made = [name for name in values if name not in ARGUMENTS]
    results = made if choice.random() < 0.3 else made[-1:] + choice.sample(made[:-1], min(len(made[:-1]), choice.randrange(4)))
    return replace(program, lines=tuple(written), results=tuple(results))


def _filled(choice: random.Random, template: str, values: dict[str, torch.Tensor], **names: str) -> str:
    about = values[names.get("c", names["a"])]
    d = choice.randrange(-about.dim(), about.dim()) if about.dim() else 0
    n = about.shape[d] if about.dim() else 1
    return template.format(**names, d=d, n=n, i=choice.randrange(max(n, 1)), m=about.shape[0] if about.dim() else 1)


def _runs(line: str, values: dict[str, torch.Tensor], name: str) -> bool:
    """Runs a line on `values` if it gives `name` a fit value; else they stay as they were."""
    names = environment() | {key: value.clone() if key == name else value for key, value in values.items()}
    try:
        exec(line, names)
    except Exception:  # noqa: BLE001 - whatever PyTorch refuses
        return False
    value = names[name]
    if not isinstance(value, torch.Tensor) or value.dim() > 5 or not 0 < value.numel() <= MOST_ELEMENTS:
        return False
    if value.dtype != torch.bool and not value.abs().max() <= LARGEST:  # NaN is not
        return False
    values[name] = value
    return True


def outcome(function: Callable[..., Any], program: Program, *, train: bool = True, dtype: torch.dtype = torch.float32) -> Outcome:
    """Calls it under one seed, and takes gradients of its results, each weighed with random numbers."""
    torch.manual_seed(program.seed)
    wanted = program.differentiable if train else (False,) * len(ARGUMENTS)
    arguments = [one.to(dtype).requires_grad_(wants) for one, wants in zip(program.arguments(), wanted, strict=True)]
    with torch.set_grad_enabled(train):
        results = function(*arguments, environment()["idx"])
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(program.seed)
    losses = []
    for one in results:
        real = torch.view_as_real(one.resolve_conj()) if one.is_complex() else one
        weights = torch.rand(real.shape, generator=generator)
        if one.requires_grad:
            losses.append((real.double() * weights).sum())
    if losses:
        sum(losses).backward()
    return Outcome(tuple(one.detach() for one in results), tuple(one.grad for one in arguments), state)


def distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """The largest difference, as a part of the largest element; infinite where shapes, NaNs or None differ."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.shape != other.shape or one.is_complex() != other.is_complex():
        return float("inf")
    one, other = (torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in (one, other))
    one, other = one.double(), other.double()
    if not torch.equal(one.isnan(), other.isnan()):
        return float("inf")
    one, other = one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
    return float((one - other).abs().max() / (other.abs().max() + 1e-3)) if one.numel() else 0.0


def differences(found: Outcome, wanted: Outcome, exact: Callable[[], Outcome]) -> Sequence[str]:
    """What is not eager's: names of results and gradients, and how far off they are; `exact` gives eager's in float64."""
    differing = [] if torch.equal(found.state, wanted.state) else ["the generator's state"]
    for kind in ("results", "gradients"):
        for i, (one, other) in enumerate(zip(getattr(found, kind), getattr(wanted, kind), strict=True)):
            off = distance(one, other)
            if one is not None and other is not None and one.dtype != other.dtype:
                differing.append(f"{kind}[{i}]: {one.dtype} instead of {other.dtype}")
            elif off > TOLERANCE and not (off < float("inf") and _is_rounding(one, other, getattr(exact(), kind)[i])):
                differing.append(f"{kind}[{i}]: off by {off:.1e} of the largest")
    return differing


def _is_rounding(one: torch.Tensor | None, other: torch.Tensor | None, exact: torch.Tensor | None) -> bool:
    return distance(one, exact) < ROUNDINGS * distance(other, exact) + 1e-5
