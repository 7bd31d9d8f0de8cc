"""What to expect of PyTorch's operator samples: gaps with their cause, tolerances, and what cannot be compared.

A gap is an operator that PyTorch runs inside the session (`PythonOp`). `ops.run_all` prints this table with how often each was seen, and
fails for a gap that is not here, and for one that is here and was not seen.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Gap:
    """Operators that run as `PythonOp`.

    Attributes:
        cause: Why there is no lowering for ONNX Runtime's kernels.
        operators: Their names; a star stands for anything.
        reason: What the backend's own reason has in it: other reasons are no recorded gap.
    """

    cause: str
    operators: tuple[str, ...]
    reason: str = "no lowering"

    def covers(self, operator: str, reason: str) -> bool:
        """Whether a `PythonOp` of the operator, for the reason that the backend gives, is this gap."""
        return self.reason in reason and any(fnmatch.fnmatchcase(operator.removeprefix("aten::"), name) for name in self.operators)


GAPS: tuple[Gap, ...] = (
    Gap("complex numbers in half precision stay with PyTorch", ("*",), "torch.complex32"),
    Gap("rare for complex numbers, not written: each is a formula of its own", ("*",), "no lowering of torch.complex"),
    # Sin could stand in for Cos: it takes three times as long as PyTorch's Cos.
    Gap("the CPU provider has no kernel for float64", ("*",), "kernel for DOUBLE"),
    Gap("PyTorch takes an output_padding of a stride or more, ONNX does not", ("convolution", "convolution_backward"), "output_padding of a stride"),
    Gap("the CPU provider has no kernel for bools", ("clamp*", "masked_s*"), "kernel for BOOL"),
    Gap("the CPU provider has no Expand kernel for bfloat16", ("scatter*", "index_fill*"), "no Expand kernel for BFLOAT16"),
    Gap("the kernels' attributes need a size that is symbolic: the channels'", ("*batch_norm*",), "unknown number of channels"),
    Gap("likewise the windows'", ("convolution", "convolution_backward"), "a kernel of unknown size"),
    Gap("addresses memory by strides, of a part of a larger tensor", ("as_strided*",), "not contiguous, or part of a larger tensor"),
    Gap("8-bit floats stay with PyTorch: the CPU provider has no kernels for them", ("*",), "torch.float8"),
    Gap("a random draw from a distribution that the graph computes is made when it is known", ("*",), "a random draw that cannot be made before"),
    Gap("a special function without an ONNX operator or a short formula", ("special_*", "igamma", "igammac")),
    Gap("in float64 a special function takes three times as many terms", ("special_*", "i0", "erfinv"), "a special function of float64"),
    Gap("rare in training, not written", ("polygamma",), "a derivative of digamma beyond the first"),
    Gap("`1 - Erf(x)` has no digits in the tail; a formula that has takes 40 times PyTorch's time (1M elements)", ("erfc",)),
    Gap("bit patterns of floats: no ONNX operator", ("frexp.Tensor", "nextafter", "hash_tensor")),
    Gap(
        "matrix decompositions and solvers: no ONNX operator",
        (*("_linalg_*", "linalg_*", "cholesky", "cholesky_inverse", "lu_unpack", "geqrf", "ormqr", "triangular_solve"),),
    ),
    Gap("an error with the user's text: no ONNX operator", ("_assert_async*",)),
    # By doubling 1.09 ms (PyTorch in a PythonOp 0.45) for 128 x 128 elements.
    Gap("a running logarithm of a sum: no ONNX operator, and doubling is always slower", ("logcumsumexp",)),
    Gap("a running product takes as many steps as the length has digits", ("cumprod",), "of a length that is not known"),
    Gap("ONNX Runtime's Unique takes 35 times PyTorch's time (100 000 integers)", ("_unique", "_unique2", "unique_*")),
    Gap(
        "order statistics, histograms: no ONNX operator",
        ("histogram.*", "_histogramdd_*", "mode", "nonzero_static"),
    ),
    Gap("rare in training, not written: every p has a formula of its own", ("_pdist_*",)),
    Gap("PyTorch's kernel needs no memory for the differences of all rows", ("_cdist_*",), "distances"),
    Gap("zeros that no tangent has a part in", ("_cdist_backward",), "zeros, whatever the gradient"),
    Gap("rare in training, not written", ("segment_reduce", "_segment_reduce_backward")),
    Gap("16 pixels a sample: PyTorch's kernel is faster", ("grid_sampler_*",), "cubic sampling"),
    Gap("windows of unequal sizes", ("fractional_max_pool*",)),
    Gap("windows of unequal sizes over planes of unknown size", ("adaptive_max_pool*",), "windows of unknown size"),
    Gap("the CPU provider has no convolution of integers", ("convolution",), "kernel for INT64"),
    Gap("rare, not written: means of scattered integers, and what leaves out the target's own", ("scatter_reduce.two",), "scatter_reduce"),
    Gap("ONNX Runtime's Pow is computed in float64", ("pow.Tensor_Tensor",), "rounds large integers"),
    Gap(
        "ONNX Runtime's kernels of integers end the process where they divide by 0",
        ("div.*", "floor_divide*", "remainder*", "fmod*"),
        "may be divided by 0",
    ),
    Gap("Euclid's algorithm: no ONNX operator", ("gcd", "lcm")),
    Gap("the limits are the data's own extremes", ("histc",), "min == max"),
    Gap("the CPU provider has no pooling of integers", ("max_pool*", "avg_pool*"), "Pool kernel for INT"),
    Gap("a transposed convolution to a size that is not known", ("col2im",), "an image of a size that is not known"),
    Gap("PyTorch rounds interpolated bytes", ("upsample_*", "_upsample_*"), "interpolated integers"),
    Gap("operators of the exporter and of functionalisation, which training does not show", ("as_strided_copy", "batch_norm_backward")),
    Gap("likewise", ("_batch_norm_with_update_functional",)),
    Gap("antialiased resizing of planes of unknown size: the number of weights is not known", ("_upsample_*",), "_aa interpolation of dynamic sizes"),
    Gap("a composite that PyTorch keeps whole for its memory", ("torch_nn::_linear_cross_entropy_batch_chunked*",)),
    Gap("nothing to compute, and ONNX Runtime's kernels refuse it", ("*",), "of zero-sized tensors"),
    Gap("ONNX gives another rank", ("nonzero",), "nonzero of a scalar"),
)

# Samples of these differ by more than PyTorch's own tests allow between two right algorithms; with the reason.
TOLERANCES: dict[str, dict[torch.dtype, tuple[float, float]]] = {
    # Sums of hundreds of products in another order.
    **{
        name: {torch.float32: (1e-4, 1e-4), torch.complex64: (1e-4, 1e-4)}
        for name in (
            *("nn.functional.conv_transpose3d", "nn.functional.conv_transpose2d", "nn.functional.conv3d", "nn.functional.conv2d"),
            *("grid_sampler_3d", "nn.functional.grid_sample"),
        )
    },
    "dist": {torch.float16: (3e-3, 1e-5)},  # a power of the norm, which is rounded
    "linalg.multi_dot": {torch.float32: (1e-4, 1e-4)},
    "stft": {torch.float32: (1e-5, 1e-4)},
    # Values of several hundreds, relative to which the difference is small.
    "linalg.householder_product": {torch.float32: (1e-4, 1e-2)},
    # A border pixel gathers the gradients of hundreds of samples.
    "grid_sampler_3d": {torch.float32: (1e-4, 1e-4)},
    # Eager adds gradients up in half precision, and errs two to five times as far from float64 as this does.
    **{
        f"nn.functional.{name}": {torch.float16: (5e-2, 1e-2), torch.bfloat16: (5e-2, 3e-2)}
        for name in (
            *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
            *("pad.replicate", "pad.replicate_negative", "unfold", "bilinear"),
        )
    },
    # The gradient is the difference of two numbers of almost one size, each rounded.
    "special.i0e": {torch.float16: (1e-2, 1e-3), torch.bfloat16: (2e-2, 4e-3)},
    "grid_sampler_2d": {torch.float16: (1e-2, 1e-1), torch.bfloat16: (5e-2, 5e-1)},
}


def _kth(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, ...]:
    if x.dim() == 0:
        return torch.kthvalue(x, k, dim, keepdim)
    found = torch.sort(x, dim=dim, stable=True)
    return tuple(part.narrow(dim, k - 1, 1) if keepdim else part.select(dim, k - 1) for part in found)


def _top(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[torch.Tensor, ...]:
    if x.dim() == 0:
        return torch.topk(x, k, dim, largest, sorted)
    return tuple(part.narrow(dim, 0, k) for part in torch.sort(x, dim=dim, descending=largest, stable=True))


def _grid_sampler_in_float32(x: torch.Tensor, grid: torch.Tensor, *modes: Any) -> torch.Tensor:
    """Eager's coordinates, rounded to half, choose other pixels: it errs by 18 from float64 where ONNX Runtime errs by 0.08 (bfloat16)."""
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    return torch.grid_sampler_2d(x.to(wide), grid.to(wide), *modes).to(x.dtype)


# What to compare with where eager's own order of equal elements is any (ONNX Runtime's is that of a stable sort), or eager itself is far off.
REFERENCES: dict[str, Callable[..., Any]] = {
    "sort": lambda x, dim=-1, descending=False, stable=True: torch.sort(x, dim=dim, descending=descending, stable=True),
    "argsort": lambda x, dim=-1, descending=False, stable=True: torch.argsort(x, dim=dim, descending=descending, stable=True),
    "kthvalue": _kth,
    "topk": _top,
    "grid_sampler_2d": _grid_sampler_in_float32,
    "msort": lambda x: torch.sort(x, dim=0, stable=True).values,
}

# Contents that nobody defined: dtype and shape are compared.
UNINITIALISED = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"))

# Entries that are not run at all, and why.
NOT_RUN: dict[str, str] = {
    "jiterator_*": "compiles CUDA code",
}


def gap_of(operator: str, reason: str) -> Gap | None:
    """The recorded gap that a `PythonOp` of an operator is, if it is one."""
    return next((gap for gap in GAPS if gap.covers(operator, reason)), None)


def is_run(name: str) -> bool:
    """Whether an entry of the database is run."""
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_RUN)
