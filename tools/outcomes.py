"""What tests came to, as `recorded.py` writes it. Imports no pytest: the interpreter of `gpu_check.py` may have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def outcomes(file: Path) -> dict[str, dict[str, Any]]:
    """By test; where there are several (a test that passed, and whose worker then died), the failure."""
    found: dict[str, dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            one = json.loads(line)
        except json.JSONDecodeError:  # the last line, of a process that was killed
            continue
        known = found.get(one["test"])
        if known is None or known["outcome"] != "failed":
            found[one["test"]] = one
    return found
