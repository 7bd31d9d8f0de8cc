"""Single functions of torch.nn.functional and torch, forward and a training step, beside eager PyTorch: which operator is slow here.

    python -m benchmarks.operators                      # all, the ones with most time lost first
    python -m benchmarks.operators leaky_relu softmax_channels --backends inductor ort_training

float32 on the CPU, one thread; smallest time of some calls, which other processes disturb least, on random numbers: what branches on the data is
slow on these alone. A call costs some 20 microseconds more than eager's whatever it computes (`benchmarks.overhead`).
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import randn
from torch.nn import functional as F

CALLS = 12

Case = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


def pointwise() -> Iterator[tuple[str, Case]]:
    """Functions of each element."""
    x, y, p = randn(1024, 256), randn(1024, 256), torch.rand(1024, 256) * 0.9 + 0.05
    mask = x > 0.3
    of_one: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        **{name: getattr(F, name) for name in ("relu", "relu6", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish", "hardtanh")},
        **{name: getattr(F, name) for name in ("softplus", "softsign", "softshrink", "hardshrink", "tanhshrink", "hardsigmoid", "logsigmoid", "glu")},
        **{name: getattr(torch, name) for name in ("sigmoid", "tanh", "exp", "expm1", "exp2", "sin", "cos", "tan", "atan", "sinh", "cosh", "asinh")},
        **{name: getattr(torch, name) for name in ("erf", "abs", "square", "frac", "trunc", "round", "nan_to_num")},
        "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
        "threshold": lambda x: F.threshold(x, 0.1, 0.2),
        "clamp": lambda x: x.clamp(-1, 1),
        "cube": lambda x: x**3,
        "where": lambda x: torch.where(x > 0, x, x * 0.1),
        "masked_fill": lambda x: x.masked_fill(mask, 0.0),
        "dropout": lambda x: F.dropout(x, 0.1),
    }
    for name, function in of_one.items():
        yield name, (function, (x,))
    for name in ("sqrt", "rsqrt", "log", "log1p", "log2", "asin", "acos", "atanh", "erfinv", "lgamma", "digamma", "logit"):
        yield name, (getattr(torch, name), (p,))
    for name in ("maximum", "atan2", "fmod", "remainder", "hypot", "copysign", "logaddexp", "div"):
        yield name, (getattr(torch, name), (x, y))
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity"):
        yield name, (getattr(F, name), (x, y))
    yield "binary_cross_entropy", (lambda p: F.binary_cross_entropy(p, (p > 0.5).float()), (p,))


def rows() -> Iterator[tuple[str, Case]]:
    """Functions along a dimension, and of indices."""
    x, few = randn(16, 256, 256), randn(4, 256, 256)
    many = randn(4096, 256)
    index, labels, into = torch.randint(0, 256, (16, 256, 256)), torch.randint(0, 256, (4096,)), torch.randint(0, 256, (4096,))
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda x: x.softmax(-1),
        "softmax_middle": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "layer_norm": lambda x: F.layer_norm(x, (256,)),
        "rms_norm": lambda x: F.rms_norm(x, (256,)),
        "normalize": lambda x: F.normalize(x, dim=-1),
        "std": lambda x: x.std(-1),
        "max": lambda x: x.max(-1)[0],
        "prod": lambda x: x.prod(-1),
        "cumsum": lambda x: x.cumsum(-1),
        "flip": lambda x: x.flip(-1),
        "roll": lambda x: x.roll(5, -1),
        "tril": torch.tril,
        "topk": lambda x: x.topk(8, -1)[0],
        "gather": lambda x: x.gather(1, index),
        "scatter_add": lambda x: torch.zeros(16, 256, 256).scatter_add(1, index, x),
        "bmm": lambda x: x @ x.mT,
        "cdist": lambda x: torch.cdist(x, x[:, :64]),
    }
    for name, function in functions.items():
        yield name, (function, (x,))
    for name, function in {"sort": lambda x: x.sort(-1)[0], "median": lambda x: x.median(-1)[0], "cummax": lambda x: x.cummax(-1)[0]}.items():
        yield name, (function, (few,))
    yield "embedding", (lambda w: F.embedding(labels, w), (many,))
    yield "cross_entropy", (lambda x: F.cross_entropy(x, labels), (many,))
    yield "index_add", (lambda x: torch.zeros(256, 256).index_add(0, into, x), (many,))
    for reduce in ("sum", "mean", "amax"):
        yield f"pool_{reduce}", (lambda x, r=reduce: torch.zeros(256, 256).scatter_reduce(0, into[:, None].expand(-1, 256), x, r), (many,))


def pictures() -> Iterator[tuple[str, Case]]:
    """Functions of batches of pictures and signals."""
    x, signal, small = randn(8, 64, 56, 56), randn(16, 64, 512), randn(4, 16, 56, 56)
    dense, depthwise, grouped = randn(64, 64, 3, 3) * 0.05, randn(64, 1, 3, 3), randn(64, 8, 3, 3)
    line, up, labels = randn(64, 64, 3) * 0.05, randn(64, 32, 2, 2), torch.randint(0, 64, (8, 56, 56))
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "conv2d": lambda x: F.conv2d(x, dense, padding=1),
        "conv2d_strided": lambda x: F.conv2d(x, dense, padding=1, stride=2),
        "conv2d_depthwise": lambda x: F.conv2d(x, depthwise, padding=1, groups=64),
        "conv2d_grouped": lambda x: F.conv2d(x, grouped, padding=1, groups=8),
        "conv_transpose2d": lambda x: F.conv_transpose2d(x, up, stride=2),
        "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 7),
        "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 7),
        "interpolate_bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "interpolate_nearest": lambda x: F.interpolate(x, scale_factor=2),
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "group_norm": lambda x: F.group_norm(x, 8),
        "instance_norm": F.instance_norm,
        "softmax_channels": lambda x: x.softmax(1),
        "cross_entropy_pixels": lambda x: F.cross_entropy(x, labels),
        "pad_reflect": lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
        "patches": lambda x: x.unfold(2, 7, 7).unfold(3, 7, 7).reshape(8, 64, 64, 49),
        "channels_last": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    }
    for name, function in functions.items():
        yield name, (function, (x,))
    yield "conv1d", (lambda x: F.conv1d(x, line, padding=1), (signal,))
    yield "im2col", (lambda x: F.unfold(x, 3, padding=1), (small,))


def best(call: Callable[[], object]) -> float:
    """Microseconds of the fastest of some calls."""
    call()
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times) * 1e6


def measure(case: Case, backend: str) -> tuple[float, float]:
    """Microseconds of a forward without gradients, and of a forward with its backward."""
    function, inputs = case
    torch._dynamo.reset()
    call: Any = function if backend == "eager" else torch.compile(function, backend=backend)
    with torch.no_grad():
        forward = best(lambda: call(*inputs))
    leaves = [one.detach().requires_grad_() for one in inputs]
    gradient = torch.randn_like(call(*leaves))
    return forward, best(lambda: torch.autograd.grad(call(*leaves), leaves, gradient))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="functions; default: all")
    parser.add_argument("--backends", nargs="+", default=["ort_training"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    cases = {name: case for kind in (pointwise, rows, pictures) for name, case in kind()}
    if unknown := set(options.names) - cases.keys():
        parser.error(f"no function is called {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    chosen = {name: case for name, case in cases.items() if name in (options.names or cases)}
    found = {name: {one: measure(case, one) for one in ("eager", *options.backends)} for name, case in track(chosen.items(), "measuring")}
    table = Table(title="microseconds without gradients and of a training step, in brackets eager's time")
    for heading in ("function", "eager", *options.backends):
        table.add_column(heading, justify="left" if heading == "function" else "right")
    for name, times in sorted(found.items(), key=lambda one: one[1]["eager"][1] - one[1][options.backends[-1]][1]):
        base = times["eager"]
        cells = [f"{forward:.0f} ({forward / base[0]:.2f})  {step:.0f} ({step / base[1]:.2f})" for forward, step in map(times.get, options.backends)]  # type: ignore[misc]
        table.add_row(name, f"{base[0]:.0f}  {base[1]:.0f}", *cells)
    Console(width=max(80, 40 + 34 * len(options.backends))).print(table)


if __name__ == "__main__":
    main()
