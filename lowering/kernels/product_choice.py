"""Which kernels compute matrix products on the CPU, by their sizes: ONNX Runtime's, oneDNN's or MKL's."""

from __future__ import annotations


def product_by_onednn(rows: int, depth: int, columns: int, *, transposed: bool) -> bool:
    """Whether oneDNN computes a product (rows x depth) (depth x columns) in float32, and not ONNX Runtime.

    ONNX Runtime's kernels read the left side where it lies. Rows a multiple of 4 KB apart share their place in the first cache, and the product
    takes 1.04 to 1.26 of oneDNN's time inside a PythonOp (once 1.5); at other distances 0.85 to 1.07. What is `transposed`, as in a gradient of
    weights, both copy first; ONNX Runtime takes 1.05 to 1.23 there where the sum is long and the result wide (`python -m benchmarks.products`), but
    whole steps gained no more than their noise, and their peak of memory grew by a tenth. Below some milliseconds, the call into Python and the
    memory of its result, which PyTorch takes from the C library, cost as much as is gained.
    """
    return not transposed and depth % 1024 == 0 and rows * depth * columns >= 2e8


def product_by_mkl(rows: int, depth: int, columns: int, *, transposed: bool) -> bool:
    """Whether MKL computes a product (rows x depth) (depth x columns) in float32, and not ONNX Runtime: on a processor of Intel's.

    MKL inside a PythonOp took 0.65 to 0.9 of ONNX Runtime's time there where the left side is `transposed`, as in a gradient of weights; a step of
    BERT with those 0.94 of its time, of a GPT 0.98. Others took 0.75 to 1.2, those with many multiplications for each element that is read or
    written at most 1.0: a step of GPTs with layers 384 and 512 wide with those 0.92 to 0.98 of its time, with such layers 256 wide 0.99 to 1.02
    (`python -m benchmarks.products`; Intel Xeon of family 6, model 207, AVX-512). On processors of AMD's MKL is the slower one.
    """
    multiplications = rows * depth * columns
    return multiplications >= 1e8 if transposed else multiplications >= 2e8 and depth * columns >= 256 * (depth + columns)


def product_in_bfloat16(rows: int, depth: int, columns: int) -> bool:
    """Whether oneDNN computes a product (rows x depth) (depth x columns) in bfloat16, and not ONNX Runtime between casts to float32.

    On a processor with instructions for it, where oneDNN reaches 500 GFLOP/s and ONNX Runtime 190 in float32 (AMD EPYC of family 26).
    """
    return rows * depth * columns >= 4e6
