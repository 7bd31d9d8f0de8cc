"""A Function whose body launches Triton kernels: in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which CPU builds of PyTorch do not bring")

# Triton reads the variable when it is imported.
_PROGRAM = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl
import ort_backend


@triton.jit
def _swish(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x / (1 + tl.exp(-x)), mask=i < n)


@triton.jit
def _swish_gradient(g_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, g = tl.load(x_ptr + i, mask=i < n), tl.load(g_ptr + i, mask=i < n)
    s = 1 / (1 + tl.exp(-x))
    tl.store(y_ptr + i, g * s * (1 + x * (1 - s)), mask=i < n)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x, y = x.contiguous(), torch.empty(x.shape)
        _swish[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g, y = g.contiguous(), torch.empty(x.shape)
        _swish_gradient[(triton.cdiv(x.numel(), 64),)](g, x, y, x.numel(), BLOCK=64)
        return y


torch.manual_seed(0)
first, second, x = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4), torch.randn(10, 8)
parameters = [*first.parameters(), *second.parameters()]
compiled = torch.compile(lambda x: second(Swish.apply(first(x))).square().mean(), backend="ort_training", fullgraph=True)
eager = lambda x: second(torch.nn.functional.silu(first(x))).square().mean()
for _ in range(3):
    got, wanted = (torch.autograd.grad(call(x), parameters) for call in (compiled, eager))
    torch.testing.assert_close(got, wanted)
print("functions:", ort_backend.report().graphs[-1].functions)
"""


def test_a_body_of_triton_kernels(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # Triton reads the source of its kernels
    program.write_text(_PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "functions: 1"
