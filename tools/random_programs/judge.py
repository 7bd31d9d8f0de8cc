"""Whether a compiled program gives what eager PyTorch gives."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tools.random_programs.program import Outcome, Program, differences, outcome

SHOWN = 600  # characters of an error


@dataclass(frozen=True)
class Mode:
    """How programs are compiled: with symbolic sizes or fixed ones, with gradients or without."""

    dynamic: bool = False
    train: bool = True


def problem(program: Program, mode: Mode) -> str | None:
    """What is wrong with it under this backend; None if nothing is, if eager PyTorch refuses it, or if `aot_eager` is wrong in the same way."""
    try:
        wanted = outcome(program.build(), program, train=mode.train)
    except Exception:  # noqa: BLE001 - whatever PyTorch refuses: a line that was taken out, a write to what a gradient needs
        return None
    exact = functools.cache(lambda: outcome(program.build(), program, train=mode.train, dtype=torch.float64))
    try:
        found = differences(_compiled(program, mode, "ort_training"), wanted, exact)
    except Exception as error:  # noqa: BLE001 - what is looked for
        return None if _fails(program, mode) else f"{type(error).__name__}: {str(error)[:SHOWN]}"
    if not found:
        return None
    try:
        known = {one.split(":")[0] for one in differences(_compiled(program, mode, "aot_eager"), wanted, exact)}
    except Exception:  # noqa: BLE001
        return None
    return "; ".join(one for one in found if one.split(":")[0] not in known) or None


def _compiled(program: Program, mode: Mode, backend: str) -> Outcome:
    torch._dynamo.reset()
    return outcome(torch.compile(program.build(), backend=backend, dynamic=mode.dynamic), program, train=mode.train)


def _fails(program: Program, mode: Mode) -> bool:
    try:
        _compiled(program, mode, "aot_eager")
    except Exception:  # noqa: BLE001
        return True
    return False
