"""Fusions that ONNX Runtime offers for a training step, beside what the lowerings write instead: `python -m benchmarks.fusions`.

One graph each, float32, one thread; the two take turns, and the figures are medians of processor time. Weights are inputs of the graph, as in
training: what is joined of them is joined in every step. None of the four pays. Time fused by time as lowered
(AMD EPYC, onnxruntime-training 1.19.2):

- queries, keys and values by one product, forward and backward: 0.99 to 1.02 (while other programs ran: 0.94 to 1.09)
- `Sum` of 3, 4, 8 gradients: 0.98, 0.97, 0.92 of the sums alone; three take less than 1 % of the products before them
- the bias in `BiasGelu` instead of the product: 0.99 to 1.03
- `BiasGeluGrad_dX`: 1.2 for 16 x 128, 1.6 to 2.0 for larger ones; from 32768 elements PyTorch's kernel runs instead (`kernel_table`)
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

from benchmarks.turns import processor_times

SECONDS, ROUNDS = 1.0, (9, 400)

Node = tuple[str, Sequence[str], Sequence[str], dict[str, Any]]  # type, inputs, results, attributes


def session(nodes: Sequence[Node], shapes: dict[str, tuple[int, ...]], results: Sequence[str]) -> Callable[[], list[np.ndarray]]:
    """A function that runs a graph of these nodes on random inputs; the same for the same shapes."""
    own = ("Gelu", "GeluGrad", "BiasGelu", "BiasGeluGrad_dX", "FusedMatMul")
    made = [helper.make_node(kind, to, of, domain="com.microsoft" if kind in own else "", **given) for kind, to, of, given in nodes]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(made, "fusion", inputs, [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    run = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run
    generator = np.random.default_rng(0)
    values = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    return lambda: run(list(results), values)


def projections(rows: int, width: int) -> Iterator[tuple[list[Node], dict[str, tuple[int, ...]], list[str]]]:
    """Queries, keys and values of one input, with their gradients: three products each; one, with joined weights."""
    shapes = {"x": (rows, width)}
    for i in "qkv":
        shapes |= {f"w{i}": (width, width), f"b{i}": (width,), f"d{i}": (rows, width)}
    results = [*"qkv", "dx", *(f"dw{i}" for i in "qkv")]
    split: list[Node] = []
    for i in "qkv":
        split += [
            ("Gemm", ("x", f"w{i}", f"b{i}"), (i,), {"transB": 1}),
            ("Gemm", (f"d{i}", "x"), (f"dw{i}",), {"transA": 1}),
            ("MatMul", (f"d{i}", f"w{i}"), (f"from {i}",), {}),
        ]
    split += [("Add", ("from q", "from k"), ("both",), {}), ("Add", ("both", "from v"), ("dx",), {})]
    yield split, shapes, results
    joined: list[Node] = [(("Concat"), tuple(f"{kind}{i}" for i in "qkv"), (kind,), {"axis": axis}) for kind, axis in (("w", 0), ("b", 0), ("d", 1))]
    joined += [
        ("Gemm", ("x", "w", "b"), ("together",), {"transB": 1}),
        ("Split", ("together",), tuple("qkv"), {"axis": 1}),
        ("MatMul", ("d", "w"), ("dx",), {}),
        ("Gemm", ("d", "x"), ("dw",), {"transA": 1}),
        ("Split", ("dw",), ("dwq", "dwk", "dwv"), {"axis": 0}),
    ]
    yield joined, shapes, results


def sums(count: int, elements: int) -> Iterator[tuple[list[Node], dict[str, tuple[int, ...]], list[str]]]:
    """Gradients that meet in one tensor: a chain of `Add`; one `Sum`."""
    names = [f"g{i}" for i in range(count)]
    shapes = dict.fromkeys(names, (elements,))
    chain: list[Node] = []
    for i, name in enumerate(names[1:], 1):
        chain.append(("Add", ("g0" if i == 1 else f"to {i - 1}", name), (f"to {i}",), {}))
    yield chain, shapes, [f"to {count - 1}"]
    yield [("Sum", names, ("sum",), {})], shapes, ["sum"]


def bias_gelu(rows: int, width: int) -> Iterator[tuple[list[Node], dict[str, tuple[int, ...]], list[str]]]:
    """A product, its bias and a GELU: the bias in the product; in the GELU."""
    shapes = {"x": (rows, width), "w": (4 * width, width), "b": (4 * width,)}
    yield [("Gemm", ("x", "w", "b"), ("h",), {"transB": 1}), ("Gelu", ("h",), ("y",), {})], shapes, ["y"]
    yield [("FusedMatMul", ("x", "w"), ("h",), {"transB": 1}), ("BiasGelu", ("h", "b"), ("y",), {})], shapes, ["y"]


def bias_gelu_gradient(rows: int, width: int) -> Iterator[tuple[list[Node], dict[str, tuple[int, ...]], list[str]]]:
    """The backward of bias and GELU: arithmetic on their sum, which the forward keeps; one kernel, which adds the bias again."""
    shapes: dict[str, tuple[int, ...]] = {"dy": (rows, width), "x": (rows, width)}
    numbers = {"one": 1.0, "half": 0.5, "root": 0.5**0.5, "density": (2 * np.pi) ** -0.5}
    constants: list[Node] = [("Constant", (), (name,), {"value_float": value}) for name, value in numbers.items()]
    chain: list[Node] = [
        ("Mul", ("x", "root"), ("scaled",), {}),
        ("Erf", ("scaled",), ("erf",), {}),
        ("Add", ("erf", "one"), ("more",), {}),
        ("Mul", ("more", "half"), ("cdf",), {}),
        ("Mul", ("scaled", "scaled"), ("square",), {}),
        ("Neg", ("square",), ("negative",), {}),
        ("Exp", ("negative",), ("bell",), {}),
        ("Mul", ("bell", "density"), ("pdf",), {}),
        ("Mul", ("pdf", "x"), ("slope",), {}),
        ("Add", ("cdf", "slope"), ("whole",), {}),
        ("Mul", ("dy", "whole"), ("dx",), {}),
    ]
    yield [*constants, *chain], shapes, ["dx"]
    with_bias = {**shapes, "b": (width,)}
    yield [("BiasGeluGrad_dX", ("dy", "x", "b"), ("dx",), {})], with_bias, ["dx"]


CASES: tuple[tuple[str, Callable[..., Any], tuple[tuple[int, int], ...]], ...] = (
    ("q, k, v: rows, width", projections, ((512, 128), (1024, 256), (1024, 384), (128, 768))),
    ("sum: gradients, elements", sums, ((3, 4096), (3, 262144), (4, 262144), (8, 262144))),
    ("bias + GELU: rows, width / 4", bias_gelu, ((512, 128), (1024, 256))),
    ("bias + GELU backward: rows, width", bias_gelu_gradient, ((16, 128), (512, 512), (1024, 1024))),
)


def main() -> None:
    """The command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table = Table(title="microseconds")
    for heading in ("what", "sizes", "as lowered", "fused", "fused / as lowered"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for title, case, sizes in CASES:
        for one in sizes:
            plain, fused = processor_times([session(*graph) for graph in case(*one)], SECONDS, *ROUNDS)
            ratio = statistics.median(b / a for a, b in zip(plain, fused))
            table.add_row(title, " x ".join(map(str, one)), *(f"{statistics.median(times) * 1e6:.0f}" for times in (plain, fused)), f"{ratio:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
