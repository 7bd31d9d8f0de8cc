"""`python -m ort_backend.guards run.jsonl`: what recompiled, what it cost, what to do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ort_backend.guards.diagnosis import counted, from_journals
from ort_backend.guards.page import page


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if there were more recompiles than allowed, 2 for a file that cannot be read or written, or is no guard log."""
    parser = argparse.ArgumentParser(prog="python -m ort_backend.guards", description=__doc__)
    parser.add_argument("log", nargs="+", help='files that options={"guard_log": ...} wrote; run.jsonl stands for run.rank0.jsonl, ... too')
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    form.add_argument("--html", metavar="FILE", help="write one self-contained page with a timeline")
    parser.add_argument(
        "--max-recompiles", type=int, metavar="N", help="exit with status 1 if a process recompiled more often, or fell back to eager"
    )
    options = parser.parse_args(arguments)
    try:
        diagnosis = from_journals(options.log)
        if options.html:
            Path(options.html).write_text(page(diagnosis, title=f"Recompiles of {', '.join(options.log)}"), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if options.json:
        sys.stdout.write(json.dumps(diagnosis.to_json(), indent=2, default=str) + "\n")
    else:
        sys.stdout.write(f"{options.html or diagnosis}\n")
    if options.max_recompiles is not None and (diagnosis.recompiles > options.max_recompiles or diagnosis.limits):
        gave_up = f", and {counted(len(diagnosis.limits), 'function')} fell back to eager" if diagnosis.limits else ""
        sys.stderr.write(f"{counted(diagnosis.recompiles, 'recompile')}, {options.max_recompiles} allowed{gave_up}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
