"""Times ONNX Runtime's CPU kernels beside PyTorch's, operator by operator and size by size: `python -m benchmarks.kernel_choice [--write]`.

Both run inside a session, PyTorch's in an `ATen` node with all that costs, ONNX Runtime's on half precision between casts; one thread. A time
is the smallest CPU time of the thread over many runs, which other processes disturb least. With `--write` the ranges where PyTorch is faster become
`lowering/kernels/kernel_table.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ort_backend.joint import lower_inference
from ort_backend.lowering.kernels import kernel_choice, operator_class
from ort_backend.runtime import capabilities
from ort_backend.runtime.counts import RunCounts
from ort_backend.runtime.inference_graph import InferenceGraph
from ort_backend.runtime.session import Program, Session, SessionConfig

aten = torch.ops.aten
rand = torch.randn

TABLE = Path(kernel_choice.__file__).with_name("kernel_table.py")
# PyTorch's kernel is taken where ONNX Runtime's takes so many times as long: less is within what a machine differs from the next.
MARGIN = 1.25
# A convolution takes long enough for less to count, and oneDNN's have kernels for every processor's instructions, which MKL's products have not.
CONVOLUTION_MARGIN = 1.1

Case = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Timing:
    """One operator at one size: the seconds of either kernel; `ort` is None where ONNX Runtime has none."""

    name: str
    size: int
    ort: float | None
    pytorch: float


# -- what is measured


def pointwise(n: int) -> Iterator[Case]:
    """Operators on one vector of `n` elements, and their backwards."""
    x, g = rand(n), rand(n)
    for approximate in ("none", "tanh"):
        yield aten.gelu.default, (x,), {"approximate": approximate}
        yield aten.gelu_backward.default, (g, x), {"approximate": approximate}
    for op in (aten.silu, aten.relu, aten.sigmoid, aten.tanh, aten.exp, aten.sin, aten.erf, aten.softplus, aten.hardswish, aten.elu, aten.abs):
        yield op.default, (x,), {}
    for op in (aten.silu_backward, aten.sigmoid_backward, aten.tanh_backward, aten.hardswish_backward):
        yield op.default, (g, x), {}
    for op in (aten.log, aten.log1p, aten.reciprocal):
        yield op.default, (x.abs() + 0.1,), {}
    yield aten.threshold_backward.default, (g, x, 0), {}
    yield aten.leaky_relu_backward.default, (g, x, 0.1, False), {}
    yield aten.where.self, (x > 0, g, x), {}
    yield aten.native_dropout_backward.default, (g, x > -1, 1.1), {}
    yield aten.pow.Tensor_Scalar, (x, 3.0), {}
    yield aten.clamp.default, (x, -1.0, 1.0), {}
    for op in (aten.add, aten.sub, aten.mul, aten.div):
        yield op.Tensor, (x, g), {}


def activations(n: int) -> Iterator[Case]:
    """Rarer activations and losses of each element, and their gradients, on vectors of `n` elements."""
    x, g, p = rand(n), rand(n), torch.rand(n) * 0.9 + 0.05
    yield aten.threshold.default, (x, 0.1, 0.2), {}
    for op in (aten.hardshrink, aten.softshrink, aten.hardtanh, aten.hardsigmoid, aten.sign, aten.sgn):
        yield op.default, (x,), {}
    yield aten.hardsigmoid_backward.default, (g, x), {}
    for op in (aten.hardshrink_backward, aten.softshrink_backward):
        yield op.default, (g, x, 0.5), {}
    yield aten.hardtanh_backward.default, (g, x, -1.0, 1.0), {}
    yield aten.leaky_relu.default, (x, 0.01), {}
    yield aten._prelu_kernel.default, (x, rand(1)), {}
    yield aten._prelu_kernel_backward.default, (g, x, rand(1)), {}
    yield aten.elu_backward.default, (g, 1.0, 1.0, 1.0, False, x), {}
    yield aten.softplus_backward.default, (g, x, 1.0, 20.0), {}
    for op in (aten.smooth_l1_loss, aten.huber_loss):
        yield op.default, (x, g, 0), {}
    for op in (aten.smooth_l1_loss_backward, aten.huber_loss_backward):
        yield op.default, (g, x, p, 0, 1.0), {}
    for op in (aten.addcmul, aten.addcdiv):
        yield op.default, (x, g, p), {}
    yield aten.binary_cross_entropy_with_logits.default, (x, p, None, p), {}
    yield aten.lerp.Scalar, (x, g, 0.3), {}
    yield aten.masked_fill.Scalar, (x, x > 0, -1.0), {}
    yield aten.nan_to_num.default, (x,), {}


def products(n: int) -> Iterator[Case]:
    """Batches of matrix products with about `n` elements in one of their factors (single products: `product_choice.product_by_mkl` and others)."""
    for rows, depth, columns in ((128, 64, 128), (128, 128, 64), (256, 256, 256)):
        batch = max(1, n // (rows * max(depth, columns)))
        yield aten.bmm.default, (rand(batch, rows, depth), rand(batch, depth, columns)), {}


def functions(n: int) -> Iterator[Case]:
    """Functions that ONNX Runtime computes one number after the other, or of many nodes, on vectors of `n` elements."""
    x, y, p = rand(n), rand(n), torch.rand(n) * 0.9 + 0.05
    for op in (aten.tan, aten.atan, aten.sinh, aten.cosh, aten.asinh, aten.expm1, aten.exp2, aten.erfc, aten.frac, aten.trunc, aten.round):
        yield op.default, (x,), {}
    for op in (aten.asin, aten.acos, aten.atanh, aten.erfinv, aten.lgamma, aten.digamma, aten.log2, aten.log10, aten.sqrt, aten.rsqrt):
        yield op.default, (p,), {}
    yield aten.acosh.default, (p + 1.0,), {}
    for op in (aten.atan2.default, aten.logaddexp.default, aten.hypot.default, aten.copysign.Tensor):
        yield op, (x, y), {}
    for op in (aten.fmod, aten.remainder):
        yield op.Tensor, (x, p), {}
        yield op.Scalar, (x, 0.7), {}
    yield aten.div.Tensor_mode, (x, p), {"rounding_mode": "floor"}
    yield aten.pow.Tensor_Tensor, (p, y), {}
    yield aten.pow.Tensor_Scalar, (p, 1.7), {}
    yield aten.xlogy.Tensor, (p, p), {}
    yield aten.lerp.Tensor, (x, y, p), {}
    yield aten.floor_divide.default, (x, p), {}
    yield aten.floor.default, (x,), {}
    for op in (aten.fmax, aten.fmin, aten.maximum):
        yield op.default, (x, y), {}


def rows(n: int) -> Iterator[Case]:
    """Operators along the last dimension of a matrix of `n` elements."""
    width = 256
    x, g, w, b = rand(n // width, width), rand(n // width, width), rand(width), rand(width)
    yield aten.native_layer_norm.default, (x, [width], w, b, 1e-5), {}
    _, mean, rstd = aten.native_layer_norm(x, [width], w, b, 1e-5)
    yield aten.native_layer_norm_backward.default, (g, x, [width], mean, rstd, w, b, [True, True, True]), {}
    y = x.softmax(-1)
    yield aten._softmax.default, (x, -1, False), {}
    yield aten._softmax_backward_data.default, (g, y, -1, x.dtype), {}
    yield aten._log_softmax.default, (x, -1, False), {}
    yield aten._log_softmax_backward_data.default, (g, y.log(), -1, x.dtype), {}
    for op in (aten.amax, aten.sum.dim_IntList, aten.mean.dim):
        yield getattr(op, "default", op), (x, [-1], True), {}
    yield aten.glu.default, (x, -1), {}
    yield aten.glu_backward.default, (g[:, : width // 2].contiguous(), x, -1), {}
    yield aten.cumsum.default, (x, -1), {}
    yield aten.cumprod.default, (x, -1), {}
    labels = torch.randint(0, width, (n // width,))
    yield aten.nll_loss_forward.default, (y, labels, None, 1, -100), {}
    yield aten.nll_loss_backward.default, (torch.tensor(1.0), y, labels, None, 1, -100, torch.tensor(float(len(labels)))), {}
    yield aten.embedding.default, (x, labels % len(x)), {}
    yield aten.embedding_dense_backward.default, (rand(len(labels), 64), labels % (n // 64), n // 64, -1, False), {}


def vectors(n: int) -> Iterator[Case]:
    """Normalizations of batches of vectors, `n` elements in all."""
    for width in (64, 512):
        yield from _batch_norms(rand(max(n // width, 2), width))


def _batch_norms(x: torch.Tensor) -> Iterator[Case]:
    channels = x.shape[1]
    w, b, running = rand(channels), rand(channels), (rand(channels), rand(channels).abs())
    yield aten._native_batch_norm_legit_functional.default, (x, w, b, *running, True, 0.1, 1e-5), {}
    _, mean, rstd, *_ = aten._native_batch_norm_legit_functional(x, w, b, *running, True, 0.1, 1e-5)
    yield aten.native_batch_norm_backward.default, (rand(x.shape), x, w, *running, mean, rstd, True, 1e-5, [True, True, True]), {}


def axes(n: int) -> Iterator[Case]:
    """Operators along other dimensions than the last, or that go through it in another order, on `n` elements."""
    x = rand(max(n // 65536, 1), 64, min(n // 64, 1024))
    yield from _softmaxes(x)
    for op in (aten.prod.dim_int, aten.max.dim, aten.min.dim):
        yield op, (x, 1), {}
        yield op, (x, 2), {}
    yield aten.flip.default, (x, [1]), {}
    yield aten.flip.default, (x, [2]), {}
    picture, edge = rand(max(n // 4096, 1), 1, 64, 64), [3, 3, 3, 3]
    for name in ("reflection_pad2d", "replication_pad2d"):
        padded = getattr(aten, name)(picture, edge)
        yield getattr(aten, name).default, (picture, edge), {}
        yield getattr(aten, f"{name}_backward").default, (rand(padded.shape), picture, edge), {}


def _softmaxes(x: torch.Tensor) -> Iterator[Case]:
    y, g = x.softmax(1), rand(x.shape)
    yield aten._softmax.default, (x, 1, False), {}
    yield aten._softmax_backward_data.default, (g, y, 1, x.dtype), {}
    yield aten._log_softmax.default, (x, 1, False), {}
    yield aten._log_softmax_backward_data.default, (g, y.log(), 1, x.dtype), {}


def few(n: int) -> Iterator[Case]:
    """Operators along a dimension of 8 that is not the last, such as that of a few classes of pixels, on `n` elements."""
    yield from _softmaxes(rand(max(n // 8192, 1), 8, min(n // 8, 1024)))


def signals(n: int) -> Iterator[Case]:
    """Convolutions of signals with `n` elements in all, and grouped ones of images, and their backwards."""
    many, length = max(8, min(64, n // 2048)), 512
    for size, stride, groups in ((1, 1, 1), (3, 1, 1), (3, 2, 1), (9, 1, 1), (3, 1, many), (31, 1, many), (3, 1, many // 8)):
        for channels in (max(many // 16 * 16, 16), max(17, many - (many % 16 == 0))) if groups == 1 else (many,):
            x, w = rand(max(1, n // (channels * length)), channels, length), rand(channels, channels // groups, size)
            yield from _convolution_cases(x, w, stride, groups)
    side = 28
    x = rand(max(1, n // (many * side * side)), many, side, side)
    yield from _convolution_cases(x, rand(many, 8, 3, 3), 1, many // 8)


def _convolution_cases(x: torch.Tensor, w: torch.Tensor, stride: int, groups: int) -> Iterator[Case]:
    rank = w.dim() - 2
    shared = ([stride] * rank, [size // 2 for size in w.shape[2:]], [1] * rank, False, [0] * rank, groups)
    y = aten.convolution(x, w, rand(len(w)), *shared)
    yield aten.convolution.default, (x, w, rand(len(w)), *shared), {}
    yield aten.convolution_backward.default, (rand(y.shape), x, w, [len(w)], *shared, [True, True, True]), {}


def images(n: int) -> Iterator[Case]:
    """Operators on batches of images, `n` elements in all."""
    side = 32
    channels = max(8, min(64, n // (4 * side * side)))
    batch = max(1, n // (channels * side * side))
    x, w, b = rand(batch, channels, side, side), rand(channels), rand(channels)
    g = rand(x.shape)
    yield aten.native_group_norm.default, (x, w, b, batch, channels, side * side, 8, 1e-5), {}
    _, mean, rstd = aten.native_group_norm(x, w, b, batch, channels, side * side, 8, 1e-5)
    yield aten.native_group_norm_backward.default, (g, x, mean, rstd, w, batch, channels, side * side, 8, [True, True, True]), {}
    yield from _batch_norms(x)
    window = ([3, 3], [2, 2], [1, 1])
    pooled, indices = aten.max_pool2d_with_indices(x, *window)
    yield aten.max_pool2d_with_indices.default, (x, *window), {}
    yield aten.max_pool2d_with_indices_backward.default, (rand(pooled.shape), x, *window, [1, 1], False, indices), {}
    yield aten.upsample_nearest2d.vec, (x, None, [2.0, 2.0]), {}
    yield aten.upsample_nearest2d_backward.default, (rand(batch, channels, 64, 64), [64, 64], list(x.shape), 2.0, 2.0), {}


def convolutions(n: int) -> Iterator[Case]:
    """Convolutions of images with `n` elements in all, and their backwards; dense ones with a number of channels that 16 divides, with another, and
    from 3 to 64 channels, without a gradient of the image.
    """
    side = 28
    many = max(8, min(128, n // (4 * side * side)))
    cases = [(7, 1, many, many, many), (3, 1, many, many, many)]
    for size, stride in ((1, 1), (3, 1), (3, 2), (4, 2), (5, 1), (5, 2), (7, 1), (7, 2)):
        blocks, other = max(16, many // 16 * 16), max(17, many - (many % 16 == 0))
        cases += [(size, stride, blocks, blocks, 1), (size, stride, other, other, 1), (size, stride, 3, 64, 1)]
    for size, stride, channels, results, groups in cases:
        batch = max(1, n // (channels * side * side))
        x, w, b = rand(batch, channels, side, side), rand(results, channels // groups, size, size), rand(results)
        shared = ([stride, stride], [size // 2, size // 2], [1, 1], False, [0, 0], groups)
        y = aten.convolution(x, w, b, *shared)
        yield aten.convolution.default, (x, w, b, *shared), {}
        yield aten.convolution_backward.default, (rand(y.shape), x, w, [results], *shared, [channels > 3, True, True]), {}


def attentions(n: int) -> Iterator[Case]:
    """Attention of queries with `n` elements in all, over sequences of several lengths, and its backward."""
    for length in (128, 256, 512, 1024, 2048):
        heads = n // (64 * length)
        for causal in (False, True) if heads else ():
            q, k, v, g = (rand(1, heads, length, 64) for _ in range(4))
            yield aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v, 0.0, causal), {}
            out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
            yield aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (g, q, k, v, out, logsumexp, 0.0, causal), {}


def indices(n: int) -> Iterator[Case]:
    """Slices added at indices along other dimensions than the first, or moved, in tensors of `n` elements; elements taken or put at `n` indices."""
    for shape, dim in (((n // 256, 256), 1), ((n // 1024, 64, 16), 1), ((n // 1024, 64, 16), 2), ((n // 1024, 16, 64), 1), ((n // 1024, 16, 64), 2)):
        x, half = rand(shape), torch.randperm(shape[dim])[: shape[dim] // 2]
        part = x.index_select(dim, half)
        yield aten.index_add.default, (x, dim, half, part), {}
        yield aten.slice_backward.default, (part, list(shape), dim, 0, shape[dim], 2), {}
        yield aten.roll.default, (x, [3], [dim]), {}
    for width in (16, 256):
        x, index = rand(n // width, width), torch.randint(0, width, (n // width, width))
        yield aten.gather.default, (x, 1, index), {}
        for op in (aten.scatter_add.default, aten.scatter.src):
            yield op, (x, 1, index, rand(index.shape)), {}


def steps(n: int) -> Iterator[Case]:
    """What ONNX Runtime computes step by step, or in hundreds of nodes, on `n` elements: `kernel_choice.IN_STEPS` and `SAMPLED`."""
    for op, shape in itertools.product((aten.cummax.default, aten.cummin.default), ((n,), (max(n // 256, 1), 256), (256, max(n // 256, 1)))):
        yield op, (rand(shape), 0 if shape[0] == 256 else len(shape) - 1), {}
    for op in (aten.median, aten.nanmedian):
        yield op.default, (rand(n),), {}
        yield op.dim, (rand(max(n // 256, 1), 256), -1), {}
    bounds = torch.linspace(-2, 2, 64)
    yield aten.masked_scatter.default, (rand(n), rand(n) > 0, rand(n)), {}
    yield aten.bucketize.Tensor, (rand(n), bounds), {}
    yield aten.searchsorted.Tensor, (bounds, rand(n)), {}
    alpha, beta = torch.rand(n) * 5 + 0.1, torch.rand(n) * 5 + 0.1
    yield aten._dirichlet_grad.default, (torch.rand(n), alpha, alpha + beta), {}
    for batch in (1, 16):
        side = math.isqrt(n // batch)
        matrices = rand(batch, side, side)
        matrices = (matrices @ matrices.mT + side * torch.eye(side))[0 if batch == 1 else slice(None)]
        factors = torch.linalg.cholesky(matrices)
        yield aten.linalg_cholesky_ex.default, (matrices,), {}
        for right in (rand(matrices.shape), rand(*matrices.shape[:-1], 1)):
            yield aten.linalg_solve_triangular.default, (factors, right), {"upper": False}
            yield aten.cholesky_solve.default, (right, factors), {}
    for channels, spatial in itertools.product((3, 16, 32, 64), (2, 3)):
        side = max(round((n / (2 * channels)) ** (1 / spatial)), 2)
        image, grid = rand(2, channels, *[side] * spatial), torch.rand(2, *[side] * spatial, spatial) * 2 - 1
        forward, backward = (
            (aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default),
            (aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default),
        )[spatial - 2]
        yield forward, (image, grid, 0, 0, False), {}
        yield backward, (rand(image.shape), image, grid, 0, 0, False, [True, True]), {}


def casts(n: int) -> Iterator[Case]:
    """Casts of `n` elements to other dtypes of floating point."""
    for dtype in {torch.float32, torch.bfloat16, torch.float16, torch.float64} - {torch.get_default_dtype()}:
        yield aten._to_copy.default, (rand(n),), {"dtype": dtype}


KINDS: dict[str, Callable[[int], Iterator[Case]]] = {
    "pointwise": pointwise,
    "activations": activations,
    "products": products,
    "functions": functions,
    "rows": rows,
    "vectors": vectors,
    "axes": axes,
    "few": few,
    "images": images,
    "signals": signals,
    "convolutions": convolutions,
    "attentions": attentions,
    "indices": indices,
    "steps": steps,
    "casts": casts,
}


# -- how


def measure(case: Case, seconds: float) -> Timing:
    """Both kernels of one operator, each in a session of its own."""
    op, args, kwargs = case
    graph, values = _graph(op, args, kwargs)
    node = next(node for node in graph.nodes if node.op == "call_function")
    ort, pytorch = (_runner(*_graph(op, args, kwargs), kernels) for kernels in ("onnxruntime", "pytorch"))
    times: dict[Any, float] = {}
    for _, run in itertools.product(range(3), (ort, pytorch)):
        if run is not None:
            times[run] = min(times.get(run, 1e9), _smallest(run, seconds / 6))
    size, dtype = operator_class.size_of(node) or (0, torch.float32)
    return Timing(operator_class.table_key(node, dtype), size, times.get(ort), times[pytorch])


def _graph(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Graph, list[torch.Tensor]]:
    mode, graph, values = FakeTensorMode(), fx.Graph(), []

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"x{len(values)}")
        node.meta["val"] = mode.from_tensor(leaf)
        values.append(leaf)
        return node

    nodes = tuple(placeholder(arg) for arg in args)
    call = graph.call_function(op, nodes, kwargs)
    with mode:
        call.meta["val"] = op(*fx.map_arg(nodes, lambda node: node.meta["val"]), **kwargs)
    made = call.meta["val"]
    results = [call]
    if isinstance(made, tuple):
        results = [graph.call_function(operator.getitem, (call, i)) for i, part in enumerate(made) if part is not None]
        for result in results:
            result.meta["val"] = made[result.args[1]]
    graph.output(tuple(results))
    return graph, values


def _runner(graph: fx.Graph, values: Sequence[torch.Tensor], kernels: str) -> Callable[[], Any] | None:
    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), kernels=kernels)
    lowered, plan = lower_inference(graph, target, strict=False, name="measured")
    if kernels == "onnxruntime" and lowered.outside:
        return None
    compiled = InferenceGraph(Session(Program.of(lowered.model), SessionConfig(), lowered.python_calls), plan, RunCounts())
    return lambda: compiled(list(values))


def _smallest(run: Callable[[], Any], seconds: float) -> float:
    run()
    best, end = 1e9, time.perf_counter() + seconds
    for i in itertools.count():
        started = time.thread_time()
        run()
        best = min(best, time.thread_time() - started)
        if i >= 4 and time.perf_counter() > end:
            return best
    raise AssertionError


# -- what comes of it


def ranges(timings: Sequence[Timing]) -> dict[str, tuple[tuple[int, int, float], ...]]:
    """For each operator the sizes between which PyTorch is faster, each range with the median of its ratios.

    One size alone is no range: it may be chance. A range starts halfway (geometrically) behind the last size at which ONNX Runtime is
    faster, and ends where PyTorch was measured last.
    """
    table = {}
    for name in sorted({timing.name for timing in timings}):
        found: list[tuple[int, int, float]] = []
        run: list[Timing] = []
        before, margin = 0, CONVOLUTION_MARGIN if "convolution" in name else MARGIN
        for timing in [*sorted((t for t in timings if t.name == name), key=lambda t: t.size), None]:
            if timing is not None and timing.ort is not None and timing.ort > margin * timing.pytorch:
                run.append(timing)
                continue
            if len(run) > 1:
                ratios = sorted(t.ort / t.pytorch for t in run if t.ort is not None)
                found.append(
                    (int((max(before, 1) * run[0].size) ** 0.5) if before else run[0].size, run[-1].size, round(ratios[len(ratios) // 2], 1))
                )
            run, before = [], timing.size if timing is not None else 0
        if found:
            table[name] = tuple(found)
    return table


def _judged(name: str) -> bool:
    """Whether a rule in lowering/kernels/kernel_choice.py decides, and not the table."""
    steps = {str(target) for target in (*kernel_choice.IN_STEPS, *kernel_choice.SAMPLED)}
    return "attention" in name or name in steps or ("convolution" in name and "dense" in name and name.endswith("in bfloat16"))


def _written(table: dict[str, tuple[tuple[int, int, float], ...]]) -> str:
    lines = [f'    "{name}": ({" ".join(f"{one}," for one in found)}),' for name, found in table.items()]
    head = TABLE.read_text().partition("FASTER_IN_PYTORCH")[0]
    return f"{head}FASTER_IN_PYTORCH: dict[str, tuple[tuple[int, int, float], ...]] = {{\n" + "\n".join(lines) + "\n}\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_choice", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write lowering/kernels/kernel_table.py")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS), help="kinds of operators")
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "float64", "bfloat16", "float16"), default=["float32"])
    parser.add_argument("--powers", nargs="*", type=int, default=[12, 14, 16, 18, 20, 22, 24], help="sizes, as powers of two")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each operator and size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    timings = []
    console = Console(width=110)
    for dtype, kind in itertools.product(options.dtypes, options.only):
        torch.set_default_dtype(getattr(torch, dtype))
        for power in options.powers:
            for case in KINDS[kind](1 << power):
                timing = measure(case, options.seconds)
                timings.append(timing)
                ort = "     no kernel" if timing.ort is None else f"{timing.ort * 1e6:11.0f} us"
                ratio = "" if timing.ort is None else f"{timing.ort / timing.pytorch:6.2f}"
                console.print(f"{timing.name:56} {timing.size:9} ORT {ort}  PyTorch {timing.pytorch * 1e6:9.0f} us {ratio}", highlight=False)
    table = ranges([timing for timing in timings if not _judged(timing.name)])
    measured = {timing.name for timing in timings}
    table.update((name, found) for name, found in kernel_choice.FASTER_IN_PYTORCH.items() if name not in measured)
    print(_written(table))
    if options.write:
        TABLE.write_text(_written(table))


if __name__ == "__main__":
    main()
