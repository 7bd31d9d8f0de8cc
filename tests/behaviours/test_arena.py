"""The memory pool that all sessions share. In fresh processes: the pool is as large as the largest need so far."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ort_backend.runtime import capabilities

# 64 MB in each of several intermediate results that are alive at one time.
_PROGRAM = """
import gc, re, torch
import onnxruntime as ort
from onnxruntime.capi import _pybind_state as C
torch.set_num_threads(1)
def resident():
    gc.collect()
    with open("/proc/self/status") as file:
        return int(re.search(r"VmRSS:\\s*(\\d+)", file.read())[1]) / 1024
def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 4096), torch.nn.Tanh(), torch.nn.Sigmoid(), torch.nn.Tanh(), torch.nn.Linear(4096, 1))
def step(module):
    compiled = torch.compile(module, backend="ort_training", options={"strict": True})
    compiled(torch.ones(4096, 16)).sum().backward()
    module.zero_grad()
step(torch.nn.Linear(16, 1))
"""
_linux = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")


def _printed(program: str) -> list[float]:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}  # torch's own tensors come and go at once
    done = subprocess.run([sys.executable, "-c", _PROGRAM + program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@_linux
def test_sessions_use_one_pool_and_give_it_back() -> None:
    start, first, second, gone = _printed(
        "one, two = model(0), model(1)\n"
        "print(resident()); step(one); print(resident()); step(two); print(resident())\n"
        "del one, two; torch._dynamo.reset(); print(resident())"
    )
    assert first - start > 150
    assert second - first < 50
    assert gone - start < 50


@pytest.mark.skipif(not capabilities.has_training(), reason="later versions replace an allocator that is registered again")
def test_an_allocator_of_the_program_is_left_alone() -> None:
    first, second = _printed(
        "from ort_backend.runtime import arena\n"
        "before = arena._registered()\n"
        "arena._registered.cache_clear()\n"
        "print(float(before)); print(float(arena._registered()))\n"
        "step(model(0))"
    )
    assert (first, second) == (1.0, 0.0)
