"""Interpreters that find a CUDA provider on a machine without a GPU: it places nodes and takes options, and computes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ort_backend.runtime import capabilities
from tools.cuda_placement import libraries

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def stand_in() -> dict[str, str]:
    """The environment with the stand-in CUDA libraries; the test is skipped where there are none."""
    if not capabilities.has_training():
        pytest.skip("the stand-in CUDA libraries are for onnxruntime-training")
    try:
        return libraries.environment()
    except libraries.NotThere as why:
        pytest.skip(str(why))


@pytest.fixture
def over_stand_in(stand_in: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`over_stand_in(code)`: runs Python code in a process that has the stand-in CUDA libraries."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**stand_in, **environment}, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if not line.startswith("[fake]"))[-4000:]
        return done

    return run
