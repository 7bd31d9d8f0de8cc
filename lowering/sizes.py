"""Sizes of fake tensors as functions of a graph's arguments, evaluated in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Evaluator = Callable[[Sequence[Any]], tuple[int, ...]]


def evaluator(numbers: Sequence[int | torch.SymInt], placeholders: Sequence[fx.Node]) -> Evaluator | None:
    """A function from the graph's arguments (in the order of `placeholders`) to the values of `numbers`.

    None if a number depends on something that is not the size of an argument, such as the result of `nonzero`.
    """
    if all(not _symbolic(number) for number in numbers):
        constants = tuple(int(number) for number in numbers)
        return lambda args: constants
    sources = _sources(placeholders)
    code: list[str] = []
    for number in numbers:
        if not _symbolic(number):
            code.append(str(int(number)))
            continue
        expression = number.node.expr  # type: ignore[union-attr]
        if any(symbol not in sources for symbol in expression.free_symbols):
            return None
        code.append(_python(expression, sources))
    return eval(f"lambda args: ({', '.join(code)},)", _NAMES)


# What PyTorch's printer of expressions writes: `torch` for roots and for integers as floats.
_NAMES: dict[str, Any] = {"math": math, "torch": torch, "min": min, "max": max, "abs": abs, "round": round}


def _symbolic(number: Any) -> bool:
    return isinstance(number, torch.SymInt) and not number.node.expr.is_number


def _sources(placeholders: Sequence[fx.Node]) -> dict[Any, str]:
    """Python source that gives each symbol's value from `args`."""
    found: dict[Any, str] = {}
    for i, node in enumerate(placeholders):
        fake = node.meta["val"]
        if isinstance(fake, torch.SymInt) and fake.node.expr.is_symbol:
            found[fake.node.expr] = f"args[{i}]"
    for i, node in enumerate(placeholders):
        fake = node.meta["val"]
        for d, size in enumerate(fake.shape if isinstance(fake, torch.Tensor) and "loose" not in node.meta else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found.setdefault(size.node.expr, f"args[{i}].shape[{d}]")
    return found


def _python(expression: Any, sources: dict[Any, str]) -> str:
    from torch.utils._sympy.printers import PythonPrinter  # read in torch 2.13

    class Printer(PythonPrinter):
        def _print_Symbol(self, symbol: Any) -> str:
            return sources[symbol]

    return f"int({Printer().doprint(expression)})"
