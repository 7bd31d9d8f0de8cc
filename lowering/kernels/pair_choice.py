"""Where PyTorch's kernels take complex numbers as they lie in its memory: large Fourier transforms, and products between pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_backend.lowering.complex_numbers import is_complex
from ort_backend.lowering.kernels.operator_class import elements_of
from ort_backend.lowering.symbolic import hint

aten = torch.ops.aten

TRANSFORMS = {aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default}

# Complex numbers from which on a product that takes and gives pairs is PyTorch's.
_PAIRS = 4096


def multiplies_pairs(node: fx.Node) -> bool:
    """Whether a product of complex tensors comes from pairs of real numbers and becomes pairs again, as in rotary embeddings and global filters.

    In ONNX Runtime real and imaginary parts are taken apart and put together again, two numbers a copy: five times as long.
    """
    if node.target is not aten.mul.Tensor or not all(isinstance(one, fx.Node) and is_complex(one.meta.get("val")) for one in node.args):
        return False
    larger: Any = max(node.args, key=lambda one: elements_of(one.meta["val"]) or 0)  # type: ignore[union-attr]
    is_pairs = larger.op == "placeholder" or larger.target is aten.view_as_complex.default or is_large_transform(larger)
    becomes_pairs = all(user.op == "output" or user.target is aten.view_as_real.default or is_large_transform(user) for user in node.users)
    return is_pairs and becomes_pairs and (elements_of(larger.meta["val"]) or 0) >= _PAIRS


def reads_pairs(node: fx.Node) -> bool:
    """Whether a node takes complex numbers as pairs of real and imaginary part, as they lie in PyTorch's memory, or makes such.

    On the CPU, and where PyTorch's kernels may run (`kernel_choice.slow_kernels_may_go`).
    """
    return node.target in (aten.view_as_real.default, aten.view_as_complex.default) or is_large_transform(node) or multiplies_pairs(node)


def is_large_transform(node: fx.Node) -> bool:
    """Whether a node is a Fourier transform that PyTorch's kernel is faster at."""
    return node.target in TRANSFORMS and large_transform(node) is not None


def large_transform(node: fx.Node) -> str | None:
    """Why PyTorch's kernel runs a Fourier transform; None where ONNX Runtime does, as a product with a matrix for each dimension, of a long one two.

    Measured with transforms forth and back around a product, and their gradients: over rows of 64, products take 0.7 of the time of PyTorch's
    transforms inside a PythonOp for 256 rows, 1.3 for 4096; over planes 1.0 for 128 of 16 x 16, 1.5 of 32 x 32, 1.3 for 8 of 64 x 64, 2.1 for 128;
    over rows of 96, whose products are two, 2.4 and 3.2. Over another dimension than the last they take 0.6 to 0.9, up to a length of 64
    (`torch.fft.rfft` to `fft2`; AMD EPYC of family 25, model 17). For a symbolic length the matrix is made in every run.
    """
    fakes = [one.meta["val"] for one in (node.args[0], node)]  # type: ignore[union-attr]
    real = max(fakes, key=lambda fake: elements_of(fake) or 0)
    dims: Any = node.args[1]
    lengths = [real.shape[d] for d in dims]
    sizes, elements = list(map(hint, lengths)), elements_of(real) or 0
    multiplications = elements * sum(sizes)
    if max(sizes) <= 64:
        along_rows = {-1, len(real.shape) - 1} & {*dims}
        stays = multiplications < (8e6 if len(sizes) == 1 else 3e6) or (len(sizes) == 1 and not along_rows)
    else:
        stays = elements <= 16384 and (max(sizes) <= 256 or all(isinstance(size, int) for size in lengths))
    return None if stays else "PyTorch's transforms are faster at this size"
