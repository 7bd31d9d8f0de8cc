"""torch.dtype <-> onnx_ir.DataType, and how a tensor that ONNX cannot express travels."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import torch

_PAIRS = (
    (torch.float32, ir.DataType.FLOAT),
    (torch.float64, ir.DataType.DOUBLE),
    (torch.float16, ir.DataType.FLOAT16),
    (torch.bfloat16, ir.DataType.BFLOAT16),
    (torch.int8, ir.DataType.INT8),
    (torch.int16, ir.DataType.INT16),
    (torch.int32, ir.DataType.INT32),
    (torch.int64, ir.DataType.INT64),
    (torch.uint8, ir.DataType.UINT8),
    (torch.uint16, ir.DataType.UINT16),
    (torch.uint32, ir.DataType.UINT32),
    (torch.uint64, ir.DataType.UINT64),
    (torch.bool, ir.DataType.BOOL),
)
_TO_IR = dict(_PAIRS)
NATIVE = frozenset(_TO_IR)  # the torch dtypes that ONNX has
_TO_TORCH = {ir_dtype: dtype for dtype, ir_dtype in _PAIRS}

# Kernels of ONNX Runtime's CPU provider compute in these types only; others are cast in and out (as PyTorch's own CPU kernels do).
_CPU_COMPUTE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
}


@dataclasses.dataclass(frozen=True)
class Carrier:
    """How values of one torch dtype are stored in an ONNX tensor.

    Attributes:
        dtype: dtype of the ONNX tensor.
        extra_dims: dimensions that the ONNX tensor has behind the torch tensor's own (2 for real and imaginary part).
        native: whether lowerings may work on it, complex numbers as two tensors (`complex_numbers`); otherwise only `PythonOp` nodes do.
    """

    dtype: ir.DataType
    extra_dims: tuple[int, ...] = ()
    native: bool = True


_CARRIERS = {dtype: Carrier(ir_dtype) for dtype, ir_dtype in _PAIRS}
_CARRIERS[torch.complex64] = Carrier(ir.DataType.FLOAT, (2,))
_CARRIERS[torch.complex128] = Carrier(ir.DataType.DOUBLE, (2,))
_CARRIERS[torch.complex32] = Carrier(ir.DataType.FLOAT16, (2,), native=False)
for _name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
    if hasattr(torch, _name):
        _CARRIERS[getattr(torch, _name)] = Carrier(ir.DataType.UINT8, native=False)


def carrier(dtype: torch.dtype) -> Carrier | None:
    """The carrier of `dtype`; None for a dtype that cannot cross into ONNX Runtime (quantised types, bit types)."""
    return _CARRIERS.get(dtype)


def carried(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as its carrier stores it; bfloat16, which numpy lacks, as float32."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).numpy()
    if not _CARRIERS[tensor.dtype].native:
        return tensor.view(torch.uint8).numpy()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_ir(dtype: torch.dtype) -> ir.DataType:
    """The ONNX type of a natively carried dtype. Raises KeyError for any other."""
    return _TO_IR[dtype]


def to_torch(dtype: ir.DataType) -> torch.dtype:
    """The torch dtype of an ONNX type. Raises KeyError for strings and other types that torch lacks."""
    return _TO_TORCH[dtype]


def compute_dtype(dtype: torch.dtype, *, has_half_kernels: bool) -> torch.dtype:
    """The dtype in which kernels compute on values of `dtype`."""
    if has_half_kernels and dtype in (torch.float16, torch.bfloat16):
        return dtype
    return _CPU_COMPUTE.get(dtype, dtype)
