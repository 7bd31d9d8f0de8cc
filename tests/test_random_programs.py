"""A few random programs; `python -m tools.random_programs` runs as many as one wants."""

from __future__ import annotations

import re

import pytest

from tools.random_programs import judge
from tools.random_programs.__main__ import reduced
from tools.random_programs.judge import Mode, problem
from tools.random_programs.program import Program, grown, outcome

MODES = {"fixed sizes": Mode(), "symbolic sizes": Mode(dynamic=True), "no gradients": Mode(train=False)}


@pytest.mark.cpu_only(reason="programs make their tensors on the CPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_programs_equal_eager(first: int, mode: str) -> None:
    found = {seed: problem(grown(seed, 8), MODES[mode]) for seed in range(first, first + 10)}
    assert {seed: text for seed, text in found.items() if text is not None} == {}


def test_a_program_is_its_seed() -> None:
    assert grown(7, 8).source() == grown(7, 8).source() != grown(8, 8).source()


def test_what_is_wrong_is_found_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("v0 = x0.sin()", "v1 = x1 * (2 if torch.compiler.is_compiling() else 1)", "v2 = v0 + 1")
    program, mode = Program(0, lines, ("v0", "v1", "v2"), (True, True, False)), Mode()
    assert problem(program, mode) is None  # `aot_eager` is wrong in the same way
    compiled = judge._compiled
    monkeypatch.setattr(judge, "_compiled", lambda *given: compiled(*given) if given[-1] == "ort_training" else outcome(given[0].build(), given[0]))
    text = problem(program, mode)
    assert text is not None and re.fullmatch(r"results\[1\]: off by \S+ of the largest; gradients\[1\]: off by \S+ of the largest", text)
    smaller = reduced(program, mode)
    assert (smaller.lines, smaller.results) == (lines[1:2], ("v1",))
