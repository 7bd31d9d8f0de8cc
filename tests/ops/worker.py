"""A process that judges cases: reads them as JSON lines, says which one it begins, then its verdict.

Started by `run_all`, which learns from the last line which case brought the process down.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings

import torch
from ops.judging import Case, judge

from ort_backend.operator_database import operators


def main() -> None:
    """Judges what comes on the standard input, up to as many samples a case as the argument says."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Operators that print would disturb the protocol.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    known = operators()
    for line in sys.stdin:
        case = Case(**json.loads(line))
        out.write("begin\n")
        out.write(json.dumps(dataclasses.asdict(judge(case, known[case.name], int(sys.argv[1])))) + "\n")


if __name__ == "__main__":
    main()
