"""What a session's call costs beside PyTorch's, without training kernels: `python -m benchmarks.regions`.

Two decisions of `lowering/splitting/regions.py` rest on it: how many cheap nodes a session must have to be worth its call, and that PyTorch's
backward of a convolution runs in the place of the plain ONNX operators that express it. CPU time, so that a busy machine matters less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ort_backend
from ort_backend.runtime import capabilities


def microseconds(function: Callable[..., Any], x: torch.Tensor, calls: int) -> float:
    """CPU time of `function(x)`, the median of seven series."""
    for _ in range(max(calls // 5, 2)):
        function(x)
    series = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(calls):
            function(x)
        series.append((time.process_time() - start) / calls * 1e6)
    return statistics.median(series)


def chain(nodes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A chain of cheap operators."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for i in range(nodes):
            x = torch.tanh(x) if i % 2 else x + 1
        return x

    return function


def trained(model: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """A forward and a backward."""
    return lambda x: model(x).sum().backward()


def cheap_nodes() -> None:
    """A chain of cheap operators as one session, and in eager PyTorch."""
    x = torch.randn(16)
    print("cheap nodes   session us   eager us")
    for nodes in (1, 2, 4, 8, 16):
        function = chain(nodes)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="ort_training")
        with torch.no_grad():
            print(f"{nodes:11d} {microseconds(compiled, x, 500):12.1f} {microseconds(function, x, 500):10.1f}")


def convolutions() -> None:
    """Steps of a convolution whose backward is plain ONNX operators, and PyTorch's kernel."""
    print("multiplications (millions)   ONNX ms   PyTorch ms")
    for channels, size in ((8, 8), (8, 16), (16, 16), (32, 16), (32, 32), (64, 32)):
        x, model = torch.randn(8, channels, size, size, requires_grad=True), nn.Conv2d(channels, channels, 3, padding=1)
        times = []
        for kernels in ("onnxruntime", "measured"):
            torch._dynamo.reset()
            step = trained(torch.compile(model, backend="ort_training", options={"kernels": kernels}))
            times.append(microseconds(step, x, 5) / 1e3)
            outside = [one.operator for one in ort_backend.report().graphs[-1].outside]
            assert ("aten::convolution_backward" in outside) == (kernels == "measured" and (channels, size) != (8, 8))
        print(f"{8 * size * size * channels * channels * 9 / 1e6:26.1f} {times[0]:9.2f} {times[1]:12.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if capabilities.has_training():
        raise SystemExit("this measures an ONNX Runtime without training kernels: pip install onnxruntime in an environment of its own")
    cheap_nodes()
    convolutions()
