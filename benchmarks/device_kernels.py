"""Times ONNX Runtime's CUDA kernels beside PyTorch's, operator by operator: `python -m benchmarks.device_kernels [--only NAME...]`.

Each operator stands alone in a graph, and reads tensors that fill the device. A time is the median of what CUDA events say over 12 runs, each behind
a kernel that waits, so that the host's part does not count. `lowering/kernels/device_kernels.py` says what was chosen for it. `--device cpu` takes
the host's clock and small tensors: it shows that the command itself works.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import ort_backend

aten = torch.ops.aten
RUNS = 12
WAIT = 400_000  # cycles of the device, longer than the host takes to start an operator
DTYPES = (torch.float32, torch.bfloat16)
Case = tuple[str, Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class Timing:
    """One operator: milliseconds of either kernel, and what ONNX Runtime had no kernel for."""

    name: str
    dtype: torch.dtype
    pytorch: float
    ort: float
    nodes: int
    outside: tuple[str, ...]


def language(device: str, dtype: torch.dtype, rows: int) -> Iterator[Case]:
    """What language models are made of: `rows` tokens, 3072 wide inside, 768 outside, a vocabulary of 50304."""

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    x, y, outer, bias, scale = made(rows, 3072), made(rows, 3072), made(rows, 768), made(3072), made(768)
    for approximate in ("none", "tanh"):
        yield f"gelu {approximate}", partial(aten.gelu, x, approximate=approximate)
        yield f"gelu_backward {approximate}", partial(aten.gelu_backward, y, x, approximate=approximate)
    yield "silu", lambda: aten.silu(x)
    yield "silu_backward", lambda: aten.silu_backward(y, x)
    for function in (torch.relu, torch.tanh, torch.sigmoid, torch.exp):
        yield function.__name__, partial(function, x)
    yield "threshold_backward", lambda: aten.threshold_backward(y, x, 0)
    yield "add", lambda: x + y
    yield "mul", lambda: x * y
    yield "add of a row", lambda: x + bias
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    yield "cast", lambda: x.to(other)
    yield "sum of columns", lambda: x.sum(0)
    yield "sum of columns to float32", lambda: x.sum(0, dtype=torch.float32)
    yield "sum of rows", lambda: x.sum(-1)
    yield "mean of rows", lambda: x.mean(-1)
    yield "max of rows", lambda: x.amax(-1)
    probabilities = x.softmax(-1)
    yield "softmax", lambda: x.softmax(-1)
    yield "softmax_backward", lambda: aten._softmax_backward_data(y, probabilities, -1, dtype)
    logits = made(rows, 50304)
    logarithms, labels = logits.log_softmax(-1), torch.randint(0, 50304, (rows,), device=device)
    yield "log_softmax", lambda: logits.log_softmax(-1)
    yield "log_softmax_backward", lambda: aten._log_softmax_backward_data(logits, logarithms, -1, dtype)
    count, gradient = torch.tensor(float(rows), device=device, dtype=dtype), torch.ones((), device=device, dtype=dtype)
    yield "nll_loss_forward", lambda: aten.nll_loss_forward(logarithms, labels, None, 1, -100)
    yield "nll_loss_backward", lambda: aten.nll_loss_backward(gradient, logarithms, labels, None, 1, -100, count)
    _, mean, deviation = aten.native_layer_norm(outer, [768], scale, scale, 1e-5)
    yield "layer_norm", lambda: aten.native_layer_norm(outer, [768], scale, scale, 1e-5)
    yield "layer_norm_backward", lambda: aten.native_layer_norm_backward(outer, outer, [768], mean, deviation, scale, scale, [True] * 3)
    heads = made(8, 12, rows // 8, 64)
    yield "transpose", lambda: heads.transpose(1, 2).contiguous()
    yield "cat", lambda: torch.cat([outer, outer, outer], -1)
    table = made(50304, 768)
    yield "embedding", lambda: F.embedding(labels, table)
    yield "embedding_dense_backward", lambda: aten.embedding_dense_backward(outer, labels, 50304, -1, False)
    weight = made(3072, 768)
    yield "mm", lambda: outer @ weight.t()
    yield "addmm", lambda: F.linear(outer, weight, bias)
    yield "mm of a gradient", lambda: x.t() @ outer
    mask = x > 1
    yield "native_dropout_backward", lambda: aten.native_dropout_backward(y, mask, 1.1)


def pictures(device: str, dtype: torch.dtype, count: int) -> Iterator[Case]:
    """What convolutional networks are made of: `count` pictures of 56 x 56 with 64 channels."""
    x = torch.randn(count, 64, 56, 56, device=device, dtype=dtype)
    for size in (1, 3):
        weight = torch.randn(64, 64, size, size, device=device, dtype=dtype)
        yield f"convolution {size}x{size}", partial(F.conv2d, x, weight, padding=size // 2)
        shape = [1, 1], [size // 2] * 2, [1, 1], False, [0, 0], 1, [True, True, False]
        yield f"convolution_backward {size}x{size}", partial(aten.convolution_backward, x, x, weight, None, *shape)
    channels, mean, variance = torch.randn(64, device=device), torch.zeros(64, device=device), torch.ones(64, device=device)
    given = channels, channels, mean, variance, True, 0.1, 1e-5
    saved = aten._native_batch_norm_legit_functional(x, *given)[1:3]
    yield "batch_norm", lambda: aten._native_batch_norm_legit_functional(x, *given)
    yield "batch_norm_backward", lambda: aten.native_batch_norm_backward(x, x, channels, mean, variance, *saved, True, 1e-5, [True] * 3)
    window = [3, 3], [2, 2], [1, 1]
    pooled, positions = aten.max_pool2d_with_indices(x, *window)
    yield "max_pool", lambda: aten.max_pool2d_with_indices(x, *window)
    yield "max_pool_backward", lambda: aten.max_pool2d_with_indices_backward(pooled, x, *window, [1, 1], False, positions)
    yield "mean of planes", lambda: x.mean((2, 3))


def timed(device: str, function: Callable[[], Any]) -> float:
    """The median milliseconds of a call."""
    function()
    function()
    found = []
    for _ in range(RUNS):
        if device == "cpu":
            started = time.perf_counter()
            function()
            found.append((time.perf_counter() - started) * 1e3)
            continue
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(WAIT)
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last))
    return statistics.median(found)


def measure(device: str, dtype: torch.dtype, case: Case) -> Timing:
    """One operator in eager PyTorch, and as a graph of its own on ONNX Runtime's kernels where it has some."""
    name, function = case
    pytorch, before = timed(device, function), len(ort_backend.report().graphs)
    torch._dynamo.reset()
    ort = timed(device, torch.compile(function, backend="ort_training", options={"kernels": "onnxruntime"}))
    graphs = ort_backend.report().graphs[before:]
    outside = tuple(one.operator for graph in graphs for one in graph.outside)
    return Timing(name, dtype, pytorch, ort, sum(graph.onnx_nodes for graph in graphs), outside)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="operators that begin so")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device (--device cpu shows that the command itself works)")
    torch.set_num_threads(1)
    large = chosen.device == "cuda"
    table = Table("operator", "dtype", "PyTorch ms", "ONNX Runtime ms", "ratio", "nodes", "without a kernel")
    with torch.no_grad():
        for dtype in DTYPES:
            for cases in (language(chosen.device, dtype, 8192 if large else 64), pictures(chosen.device, dtype, 64 if large else 1)):
                for case in cases:
                    if not chosen.only or case[0].startswith(tuple(chosen.only)):
                        one = measure(chosen.device, dtype, case)
                        numbers = f"{one.pytorch:.4f}", f"{one.ort:.4f}", f"{one.ort / one.pytorch:.2f}", str(one.nodes)
                        table.add_row(one.name, str(dtype).removeprefix("torch."), *numbers, ", ".join(one.outside))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
