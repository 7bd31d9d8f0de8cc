"""Random programs of PyTorch's operators, compiled and compared with eager PyTorch: results, gradients, the generator's state.

    python -m tools.random_programs --seconds 300              # as many as fit
    python -m tools.random_programs --dynamic --first 50000    # with symbolic sizes, other programs
    python -m tools.random_programs --only 1607                # one, and what is left of it without the lines that it takes not

What `aot_eager` does as well is PyTorch's own. The exit status is 1 if a program differs or fails. One thread.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
import warnings
from dataclasses import replace

import torch
from rich.console import Console
from rich.markup import escape

from tools.random_programs.judge import Mode, problem
from tools.random_programs.program import Program, grown


def main(arguments: list[str] | None = None) -> int:
    """Prints each program with a problem, reduced."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on (default: 60)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first program's seed (default: 0)")
    parser.add_argument("--only", type=int, metavar="SEED", help="this program alone")
    parser.add_argument("--size", type=int, default=8, help="values of a program (default: 8)")
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")
    parser.add_argument("--no-grad", action="store_true", help="without gradients")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.CRITICAL)
    logging.getLogger("ort_backend").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    console = Console()
    mode = Mode(dynamic=options.dynamic, train=not options.no_grad)
    seeds = [options.only] if options.only is not None else itertools.count(options.first)
    end, ran, found = time.monotonic() + options.seconds, 0, 0
    for seed in seeds:
        if time.monotonic() > end:
            break
        program = grown(seed, options.size)
        ran += 1
        if (text := problem(program, mode)) is not None:
            found += 1
            console.print(f"[bold]seed {seed}[/]: {escape(text)}\n{escape(reduced(program, mode).source())}", highlight=False)
    console.print(f"{ran} programs, {found} with a problem", highlight=False)
    return 1 if found else 0


def reduced(program: Program, mode: Mode) -> Program:
    """The program without the lines and results that its problem does not take."""
    smaller = True
    while smaller:
        without_line = [replace(program, lines=program.lines[:i] + program.lines[i + 1 :]) for i in reversed(range(len(program.lines)))]
        without_result = [replace(program, results=tuple(one for one in program.results if one != name)) for name in program.results]
        candidates = [*without_line, *(without_result if len(program.results) > 1 else ())]
        smaller = next((one for one in candidates if problem(one, mode) is not None), None)
        program = smaller or program
    return program


if __name__ == "__main__":
    sys.exit(main())
