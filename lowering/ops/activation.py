"""Smooth activations, each beside its backward; `rectifiers` has the others.

Where a choice is open, the form is the one that was faster on ONNX Runtime's CPU provider (1.19.2, one thread, 3.1 M elements). Kernels that
branch on the data lose by far to arithmetic with a mask: `Where` 26 ms, `ReluGrad` 22, `GeluGrad` 22, `FastGeluGrad` 71, against 0.4 to 0.9 for
one of `Mul`, `Add`, `Exp`, `Sigmoid`, `Clip`, `HardSigmoid`, and 1.5 for `Greater` and `Cast` together.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.axes import same_shape
from ort_backend.lowering.constants import int64s, scalar_like
from ort_backend.lowering.microsoft import microsoft
from ort_backend.lowering.registry import Unsupported, register

aten = torch.ops.aten


def refuse_symbolic(*numbers: Any) -> None:
    """For functions that compute with their settings while they are lowered; a program may make these out of symbolic sizes."""
    if any(isinstance(number, ir.Value) for number in numbers):
        raise Unsupported("a setting that is not constant")


def _elementwise(op: Any, kernel: str, grad_output: ir.Value, x: ir.Value, **attributes: Any) -> ir.Value:
    """A gradient kernel of ONNX Runtime. They do not broadcast (1.19.2), as gradients do that come out of `torch.vmap`."""
    if grad_output.shape is None or x.shape is None or not same_shape(grad_output, x):
        raise Unsupported(f"{kernel} takes tensors of one shape")
    return microsoft(op, kernel, grad_output, x, like=x, **attributes)


@register(aten.gelu.default, requires=("com.microsoft::Gelu", "com.microsoft::FastGelu"))
def gelu_fused(op, self, *, approximate="none"):
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    if approximate == "tanh" and (self.dtype == ir.DataType.DOUBLE or not self.shape):
        raise Unsupported("FastGelu refuses 0-d tensors, and in float64 has constants of float32 (onnxruntime 1.32)")
    return microsoft(op, "Gelu" if approximate == "none" else "FastGelu", self, like=self)


@register(aten.gelu.default)
def gelu(op, self, *, approximate="none"):
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    inner = op.Erf(op.Mul(self, math.sqrt(0.5))) if approximate == "none" else op.Tanh(_gelu_inner(op, self))
    return op.Mul(op.Mul(self, 0.5), op.Add(inner, 1.0))


def _gelu_inner(op: Any, x: ir.Value) -> ir.Value:
    """sqrt(2/pi) (x + 0.044715 x^3)"""
    beta = math.sqrt(2 / math.pi)
    return op.Mul(x, op.Add(op.Mul(op.Mul(x, x), 0.044715 * beta), beta))


@register(aten.gelu_backward.default, requires=("com.microsoft::GeluGrad", "com.microsoft::FastGeluGrad"), device="cuda", promote="output")
def gelu_backward_fused(op, grad_output, self, *, approximate="none"):
    """gelu_backward(Tensor grad_output, Tensor self, *, str approximate='none') -> Tensor

    One kernel instead of ten, for the GPU; on the CPU they are the slow ones.
    """
    return _elementwise(op, "GeluGrad" if approximate == "none" else "FastGeluGrad", grad_output, self)


@register(aten.gelu_backward.default, promote="output")
def gelu_backward(op, grad_output, self, *, approximate="none"):
    """gelu_backward(Tensor grad_output, Tensor self, *, str approximate='none') -> Tensor"""
    if approximate == "none":
        # Phi(x) + x phi(x) = (1 + erf(u) + 2/sqrt(pi) u exp(-u^2)) / 2 with u = x / sqrt(2)
        u = op.Mul(self, math.sqrt(0.5))
        bell = op.Exp(op.Sub(math.log(2 / math.sqrt(math.pi)), op.Mul(u, u)))
        twice = op.Add(op.Add(op.Erf(u), op.Mul(u, bell)), 1.0)
        return op.Mul(grad_output, op.Mul(twice, 0.5))
    # x s with s = sigmoid(z), z = 2 sqrt(2/pi) (x + 0.044715 x^3): s (1 + (1 - s) x z'), where x z' = 3 z - 4 sqrt(2/pi) x
    beta = 2 * math.sqrt(2 / math.pi)
    z = op.Mul(self, op.Add(op.Mul(op.Mul(self, self), 0.044715 * beta), beta))
    sigmoid = op.Sigmoid(z)
    slope = op.Sub(op.Mul(z, 3.0), op.Mul(self, 2 * beta))
    return op.Mul(grad_output, op.Mul(sigmoid, op.Add(op.Mul(op.Sub(1.0, sigmoid), slope), 1.0)))


@register(aten.silu.default)
def silu(op, self):
    """silu(Tensor self) -> Tensor"""
    return op.Mul(self, op.Sigmoid(self))


@register(aten.silu_backward.default, requires=("com.microsoft::QuickGeluGrad",), promote="output")
def silu_backward_fused(op, grad_output, self):
    """silu_backward(Tensor grad_output, Tensor self) -> Tensor"""
    return _elementwise(op, "QuickGeluGrad", grad_output, self, alpha=1.0)


@register(aten.silu_backward.default, promote="output")
def silu_backward(op, grad_output, self):
    """silu_backward(Tensor grad_output, Tensor self) -> Tensor"""
    sigmoid = op.Sigmoid(self)
    return op.Mul(grad_output, op.Mul(sigmoid, op.Add(op.Mul(self, op.Sub(1.0, sigmoid)), 1.0)))


@register(aten.sigmoid.default, promote="output")
def sigmoid(op, self):
    """sigmoid(Tensor self) -> Tensor"""
    return op.Sigmoid(self)


@register(aten.sigmoid.default, device="cpu", promote="output")
def sigmoid_to_the_end(op, self):
    """sigmoid(Tensor self) -> Tensor"""
    # The CPU kernel has an error of 1e-7, and is 0 below -18 (1.19.2, 1.31.1), where a logarithm of it, or a loss from it, must not be infinite.
    return op.Reciprocal(op.Add(op.Exp(op.Neg(self)), 1.0))


@register(aten.sigmoid.default, device="cuda", promote="output")
def sigmoid_on_device(op, self):
    """sigmoid(Tensor self) -> Tensor"""
    # That of CUDA takes the part on the left of 0 from 1 (`_Sigmoid`, read in 1.19.2): as little is left. In half precision that may be its rounding.
    return sigmoid_to_the_end(op, self) if self.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else op.Sigmoid(self)


@register(aten.sigmoid_backward.default, requires=("com.microsoft::SigmoidGrad",), promote="output")
def sigmoid_backward_fused(op, grad_output, output):
    """sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor"""
    return _elementwise(op, "SigmoidGrad", grad_output, output)


@register(aten.sigmoid_backward.default, promote="output")
def sigmoid_backward(op, grad_output, output):
    """sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor"""
    return op.Mul(grad_output, op.Mul(output, op.Sub(1.0, output)))


@register(aten.tanh.default, device="cpu", promote="output")
def tanh_cpu(op, self):
    """tanh(Tensor self) -> Tensor

    Between 8.2 and 9 ONNX Runtime's kernel for float32 is up to 2.4e-7 beyond 1 (1.19.2 and 1.32.0). Programs rely on the bound: they take the
    logarithm of `1 - x.tanh() ** 2 + 1e-7`. A million elements take 0.29 ms instead of 0.20 (PyTorch's kernel: 2.1).
    """
    result = op.Tanh(self)
    return op.Clip(result, scalar_like(op, -1.0, self), scalar_like(op, 1.0, self)) if self.dtype == ir.DataType.FLOAT else result


@register(aten.tanh.default, promote="output")
def tanh(op, self):
    """tanh(Tensor self) -> Tensor"""
    return op.Tanh(self)


@register(aten.tanh_backward.default, requires=("com.microsoft::TanhGrad",), promote="output")
def tanh_backward_fused(op, grad_output, output):
    """tanh_backward(Tensor grad_output, Tensor output) -> Tensor"""
    return _elementwise(op, "TanhGrad", grad_output, output)


@register(aten.tanh_backward.default, promote="output")
def tanh_backward(op, grad_output, output):
    """tanh_backward(Tensor grad_output, Tensor output) -> Tensor"""
    return op.Mul(grad_output, op.Sub(1.0, op.Mul(output, output)))


@register(aten.softplus.default)
def softplus(op, self, beta=1, threshold=20):
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    refuse_symbolic(beta, threshold)
    scaled = op.Mul(self, float(beta)) if beta != 1 else self
    # max(x, 0) + log(u) with u = 1 + exp(-|x|) rounded, and what the rounding lost divided by u: no overflow, equal to x above the threshold but for
    # what float32 cannot show, and exp(x) far below, where a logarithm or a quotient of it must not be infinite.
    zero, tail = scalar_like(op, 0.0, self), op.Exp(op.Neg(op.Abs(scaled)))
    rounded = op.Add(tail, 1.0)
    lost = op.Sub(tail, op.Sub(rounded, 1.0))
    soft = op.Add(op.Max(scaled, zero), op.Add(op.Log(rounded), op.Div(lost, rounded)))
    soft = op.Div(soft, float(beta)) if beta != 1 else soft
    return soft if threshold >= 20 else op.Where(op.Greater(scaled, float(threshold)), self, soft)


@register(aten.softplus_backward.default, promote="output")
def softplus_backward(op, grad_output, self, beta, threshold):
    """softplus_backward(Tensor grad_output, Tensor self, Scalar beta, Scalar threshold) -> Tensor"""
    refuse_symbolic(beta, threshold)
    scaled = op.Mul(self, float(beta)) if beta != 1 else self
    slope = op.Reciprocal(op.Add(op.Exp(op.Neg(scaled)), 1.0))  # not Sigmoid: see `sigmoid_to_the_end`
    if threshold < 20:
        slope = op.Where(op.Greater(scaled, float(threshold)), scalar_like(op, 1.0, self), slope)
    return op.Mul(grad_output, slope)


@register(aten.glu.default)
def glu(op, self, dim=-1):
    """glu(Tensor self, int dim=-1) -> Tensor"""
    value, gate = _halves(op, self, dim)
    return op.Mul(value, op.Sigmoid(gate))


@register(aten.glu_backward.default, promote="output")
def glu_backward(op, grad_output, self, dim):
    """glu_backward(Tensor grad_output, Tensor self, int dim) -> Tensor"""
    value, gate = _halves(op, self, dim)
    sigmoid = op.Sigmoid(gate)
    through = op.Mul(grad_output, sigmoid)
    return op.Concat(through, op.Mul(op.Mul(through, value), op.Sub(1.0, sigmoid)), axis=dim)


def _halves(op: Any, tensor: ir.Value, dim: int) -> tuple[ir.Value, ir.Value]:
    """A Split into a number of parts refuses a dimension of size 0."""
    size = tensor.shape[dim]  # type: ignore[index]
    if isinstance(size, int):
        first, second = op.Split(tensor, int64s(op, [size // 2] * 2), axis=dim, _outputs=2)
    else:
        first, second = op.Split(tensor, num_outputs=2, axis=dim, _outputs=2)
    return first, second
