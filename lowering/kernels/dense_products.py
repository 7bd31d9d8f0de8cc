"""Matrix products on the CPU by the libraries that PyTorch has, with transposes and bias in one call.

In float32 oneDNN's run as inductor's linear layers do (`mkldnn::_linear_pointwise`), MKL's as eager PyTorch's; those in bfloat16, oneDNN's as well,
as eager PyTorch's.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("ort_training", "FRAGMENT")
for _name in ("onednn_mm", "mkl_mm", "bfloat16_mm"):
    _library.define(f"{_name}(Tensor left, Tensor right, Tensor? bias, bool trans_left, bool trans_right) -> Tensor")
ONEDNN_MM = torch.ops.ort_training.onednn_mm.default
MKL_MM = torch.ops.ort_training.mkl_mm.default
BFLOAT16_MM = torch.ops.ort_training.bfloat16_mm.default


@torch.library.register_fake("ort_training::onednn_mm", lib=_library)
@torch.library.register_fake("ort_training::mkl_mm", lib=_library)
@torch.library.register_fake("ort_training::bfloat16_mm", lib=_library)
def _(left: Tensor, right: Tensor, bias: Tensor | None, trans_left: bool, trans_right: bool) -> Tensor:
    return left.new_empty(left.shape[1 if trans_left else 0], right.shape[0 if trans_right else 1])


@torch.library.impl(_library, "onednn_mm", "CompositeExplicitAutograd")
def _by_onednn(left: Tensor, right: Tensor, bias: Tensor | None, trans_left: bool, trans_right: bool) -> Tensor:
    left, right = left.t() if trans_left else left, right if trans_right else right.t()
    if not left.numel() or not right.numel():  # oneDNN has no product of nothing
        return torch.nn.functional.linear(left, right, bias)
    return torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")


@torch.library.impl(_library, "mkl_mm", "CompositeExplicitAutograd")
@torch.library.impl(_library, "bfloat16_mm", "CompositeExplicitAutograd")
def _as_eager(left: Tensor, right: Tensor, bias: Tensor | None, trans_left: bool, trans_right: bool) -> Tensor:
    left, right = left.t() if trans_left else left, right.t() if trans_right else right
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def as_eager_into(empty: Callable[..., Tensor], left: Tensor, right: Tensor, bias: Tensor | None, trans_left: bool, trans_right: bool) -> Tensor:
    """The product as eager PyTorch makes it, in memory that `empty` gives for its shape and dtype."""
    left, right = left.t() if trans_left else left, right.t() if trans_right else right
    out = empty((left.shape[0], right.shape[1]), left.dtype)
    return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)


# What a node calls: without PyTorch's dispatcher, whose layers in Python take as long as a small kernel.
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {ONEDNN_MM: _by_onednn, MKL_MM: _as_eager, BFLOAT16_MM: _as_eager}


@functools.cache
def mkl_is_at_home() -> bool:
    """Whether PyTorch's products are MKL's, and the processor is Intel's: on others MKL runs kernels that were not made for them."""
    return torch.backends.mkl.is_available() and "GenuineIntel" in _processor()


@functools.cache
def mkl_is_slow() -> bool:
    """Whether PyTorch's products are MKL's, and take about twice as long as ONNX Runtime's: on AMD's processors from family 26 on.

    Seen on an EPYC of family 26, and not on one of family 25.
    """
    found = re.search(r"^cpu family\s*: (\d+)$", _processor(), re.MULTILINE)
    return torch.backends.mkl.is_available() and "AuthenticAMD" in _processor() and found is not None and int(found[1]) >= 26


@functools.cache
def processor_multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16 numbers that oneDNN knows (AVX-512 BF16, AMX)."""
    return any(getattr(torch.cpu, name)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported") if hasattr(torch.cpu, name))


def _processor() -> str:
    """Text that names the processor's vendor."""
    try:
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:  # not Linux
        return platform.processor()
