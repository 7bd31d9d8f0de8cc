"""Matrix products by oneDNN and MKL inside PythonOps and by ONNX Runtime's kernels, beside eager PyTorch: which is faster at which sizes.

    python -m benchmarks.products                                   # the sizes that `product_choice.product_by_onednn` rests on
    python -m benchmarks.products --rows 256 1024 --depths 256 384 768 1024 --columns 384 1024      # `product_by_mkl`
    python -m benchmarks.products --rows 512 --depths 1024 --columns 256 1024

A product of a layer's forward (`x w^T`), of the gradient of its input (`g w`), and of that of its weights (`g^T x`), float32, one thread. All
take turns in one process; the figures are medians of processor time over the rounds, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.turns import cell, processor_times
from ort_backend.lowering.kernels import dense_products
from ort_backend.lowering.passes import products

SECONDS, ROUNDS = 0.4, (7, 60)
KINDS = ("eager", "MKL", "oneDNN", "ONNX Runtime")
# Whether the left and the right side are transposes.
FORMS = {"x w^T": (False, True), "g w": (False, False), "g^T x": (True, False)}


def make_product(kind: str, form: str, left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    """The product; what is compiled has run once."""
    trans_left, trans_right = FORMS[form]

    def product(left: Tensor, right: Tensor) -> Tensor:
        return (left.t() if trans_left else left) @ (right.t() if trans_right else right)

    options = {"kernels": "onnxruntime"} if kind == "ONNX Runtime" else {"session_options": {"logid": kind}}  # a graph for each
    run = product if kind == "eager" else torch.compile(product, backend="ort_training", options=options, fullgraph=True, dynamic=False)
    chosen = {"product_by_onednn": lambda *sizes, transposed: True, "product_by_mkl": lambda *sizes, transposed: True}
    with mock.patch.multiple(products, **chosen), mock.patch.object(dense_products, "mkl_is_at_home", lambda: kind == "MKL"):
        run(left, right)
    return lambda: run(left, right)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--depths", type=int, nargs="+", default=[512, 768, 1000, 1024, 2048, 3072])
    parser.add_argument("--columns", type=int, nargs="+", default=[256, 768, 1024])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="milliseconds a product, and the ratio to oneDNN's")
    for heading in ("form", "rows", "depth", "columns", *KINDS):
        table.add_column(heading, justify="right")
    for form, rows, depth, columns in itertools.product(FORMS, arguments.rows, arguments.depths, arguments.columns):
        torch._dynamo.reset()
        trans_left, trans_right = FORMS[form]
        left = torch.randn(*((depth, rows) if trans_left else (rows, depth)))
        right = torch.randn(*((columns, depth) if trans_right else (depth, columns)))
        with torch.no_grad():
            times = processor_times([make_product(kind, form, left, right) for kind in KINDS], SECONDS, *ROUNDS)
        table.add_row(form, str(rows), str(depth), str(columns), *(cell(one, times[KINDS.index("oneDNN")]) for one in times))
    Console().print(table)


if __name__ == "__main__":
    main()
