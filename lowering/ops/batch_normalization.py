"""Batch normalization, beside its backward. Statistics are float32 where PyTorch's kernels keep them so: of tensors in half precision, too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_backend.lowering.axes import element_count
from ort_backend.lowering.constants import constant, int64s
from ort_backend.lowering.microsoft import microsoft
from ort_backend.lowering.ops.normalization import as_single, filled, mean_over, other_dims, per_channel, refuse_double, rsqrt, sum_over
from ort_backend.lowering.registry import Unsupported, register
from ort_backend.lowering.symbolic import size_of

aten = torch.ops.aten


def _channels(input: ir.Value) -> int:
    channels = input.shape[1]  # type: ignore[index]
    if not isinstance(channels, int):
        raise Unsupported("batch normalization over an unknown number of channels")
    return channels


def _affine(op: Any, input: ir.Value, weight: ir.Value | None, bias: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    size = [_channels(input)]
    return (
        filled(op, 1.0, size, input) if weight is None else weight,
        filled(op, 0.0, size, input) if bias is None else bias,
    )


def _varies(value: ir.Value) -> bool:
    """Whether a value depends on the data of an input, so that ONNX Runtime cannot compute it beforehand."""
    seen, ahead = set(), [value]
    while ahead:
        one = ahead.pop()
        if one.is_graph_input():
            return True
        node = one.producer()
        if node is None or node in seen or node.op_type in ("Shape", "Size"):
            continue
        seen.add(node)
        ahead.extend(source for source in reversed(node.inputs) if source is not None)
    return False


def _are_vectors(input: ir.Value) -> bool:
    return all(size == 1 for size in input.shape[2:])  # type: ignore[index]


def _refuse_vectors(input: ir.Value) -> None:
    """Leaves batches of vectors to the primitives: the kernels on the CPU go through a plane of each channel at a time, here of one element.

    They take 1.5 (64 x 64) to 10 times as long (784 x 640), and their gradients as well.
    """
    if _are_vectors(input):
        raise Unsupported("the kernels are slow for planes of one element")


# Elements of a plane from which on its sum by the kernels, which add one number after the other, is off by more than 1e-6.
_LONG = 131072


def _batch_norm_standard(
    op: Any, input: ir.Value, weight: Any, bias: Any, running_mean: ir.Value, running_var: ir.Value, eps: float
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """(result, mean, biased variance, 1 / deviation) of the batch, by ONNX's own operator.

    On the CPU it takes a fifth (4 x 2048 x 4 x 4) to 0.4 (4 x 64 x 56 x 56) of the primitives' time, and 0.8 for the smallest (onnxruntime 1.32.0).
    """
    dtypes = {one.dtype for one in (input, weight, bias, running_mean, running_var) if one is not None}
    if dtypes != {ir.DataType.FLOAT}:
        raise Unsupported("the kernel has all in one dtype, and rounds epsilon to float32")
    sizes: list[int] = [size for size in input.shape[2:] if isinstance(size, int)]  # type: ignore[index]
    if math.prod(sizes) >= _LONG:
        raise Unsupported("the kernel's sums over large planes are not precise enough")
    if not (_varies(running_mean) and _varies(running_var)):
        raise Unsupported("the kernel writes over the running statistics, which are constants")
    weight, bias = _affine(op, input, weight, bias)
    # As in `_batch_norm_fused`. But the kernel multiplies the old statistics by 0, so that these are numbers also where a running one is none.
    scratch = [op.Cast(op.Less(old, _unlike_any(op)), to=ir.DataType.FLOAT) for old in (running_mean, running_var)]
    out, mean, variance = op.BatchNormalization(input, weight, bias, *scratch, epsilon=eps, momentum=0.0, training_mode=1, _outputs=3)
    return out, mean, variance, rsqrt(op, variance, eps)


def _batch_norm_fused(
    op: Any, input: ir.Value, weight: Any, bias: Any, running_mean: ir.Value, running_var: ir.Value, eps: float
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """(result, mean, variance, 1 / deviation) of the batch. The variance is biased on the CPU, and unbiased on CUDA, as cuDNN's is (read in
    1.19.2: orttraining/training_ops/cuda/nn/batch_norm_internal.cc).
    """
    refuse_double(input)
    if not (_varies(running_mean) and _varies(running_var)):
        raise Unsupported("the kernel writes over the running statistics, which are constants")
    weight, bias = as_single(op, *_affine(op, input, weight, bias))
    # The kernel writes its running statistics over the old ones (an alias in ONNX Runtime), which therefore must be values that nothing
    # else reads, nor is merged with. ONNX's momentum is the part of the old statistics: with none of it they are the batch's own.
    scratch = [op.Mul(old, _unlike_any(op)) for old in as_single(op, running_mean, running_var)]
    attributes = {"epsilon": eps, "momentum": 0.0, "training_mode": 1}
    like = (input, bias, bias, bias, bias)
    out, _, variance, mean, rstd = microsoft(op, "BatchNormInternal", input, weight, bias, *scratch, like=like, **attributes)
    return out, mean, variance, rstd


def _unlike_any(op: Any) -> float:
    """A number that nothing else in the graph is combined with: no other normalization's scratch, nor a program's number or momentum (0 or 1)."""
    return len(op.builder.graph) + math.sqrt(2)


def _batch_norm(
    op: Any, input: ir.Value, weight: Any, bias: Any, running_mean: Any, running_var: Any, eps: float
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """(result, mean, biased variance, 1 / deviation) of the batch, by primitives: BatchNormalization in training mode has no CUDA kernel."""
    input, weight, bias = as_single(op, input, weight, bias)
    axes = other_dims(input)
    mean = mean_over(op, input, axes)
    centred = op.Sub(input, mean)
    variance = mean_over(op, op.Mul(centred, centred), axes)
    rstd = rsqrt(op, variance, eps)
    mean, variance, rstd = (op.Squeeze(value, int64s(op, axes)) for value in (mean, variance, rstd))
    return _scaled(op, input, centred, rstd, weight, bias), mean, variance, rstd


def _scaled(op: Any, input: ir.Value, centred: ir.Value, rstd: ir.Value, weight: ir.Value | None, bias: ir.Value | None) -> ir.Value:
    """centred rstd weight + bias, the vectors over channels."""
    out = op.Mul(centred, per_channel(op, rstd if weight is None else op.Mul(rstd, weight), input))
    return out if bias is None else op.Add(out, per_channel(op, bias, input))


def _count(op: Any, input: ir.Value, like: ir.Value) -> float | ir.Value:
    """How many elements each channel has, as a number of the dtype of `like` where it is not known."""
    sizes = [input.shape[axis] for axis in other_dims(input)]  # type: ignore[index]
    if all(isinstance(size, int) for size in sizes):
        return float(math.prod(sizes))  # type: ignore[arg-type]
    channels = input.shape[1]  # type: ignore[index]
    known = constant(op, channels, ir.DataType.INT64) if isinstance(channels, int) else size_of(op, input, 1)
    return op.Cast(op.Div(element_count(op, input), known), to=like.dtype)


def _updated(
    op: Any, input: ir.Value, running_mean: Any, running_var: Any, mean: ir.Value, variance: ir.Value, momentum: float, is_biased: bool
) -> list[ir.Value]:
    """The running statistics after the batch. PyTorch's running variance is unbiased; `is_biased`: whether the batch's is not."""
    running_mean, running_var = as_single(op, running_mean, running_var)
    bessel: Any = momentum
    if is_biased:
        count = _count(op, input, variance)
        if isinstance(count, float):
            bessel = momentum * count / (count - 1) if count > 1 else math.inf
        else:
            bessel = op.Mul(op.Div(count, op.Sub(count, 1.0)), momentum)
    return [
        op.Add(op.Mul(running_mean, 1.0 - momentum), op.Mul(mean, momentum)),
        op.Add(op.Mul(running_var, 1.0 - momentum), op.Mul(variance, bessel)),
    ]


def _inference(op: Any, input: ir.Value, weight: Any, bias: Any, running_mean: ir.Value, running_var: ir.Value, eps: float) -> ir.Value:
    # For float64 an attribute would round eps; and see `_refuse_vectors`. The kernel has all in one dtype, which is not bfloat16.
    dtypes = {one.dtype for one in (input, weight, bias, running_mean, running_var) if one is not None}
    if input.dtype in (ir.DataType.DOUBLE, ir.DataType.BFLOAT16) or _are_vectors(input) or len(dtypes) > 1:
        input, weight, bias, running_mean, running_var = as_single(op, input, weight, bias, running_mean, running_var)
        centred = op.Sub(input, per_channel(op, running_mean, input))
        return _scaled(op, input, centred, rsqrt(op, running_var, eps), weight, bias)
    weight, bias = _affine(op, input, weight, bias)
    return op.BatchNormalization(input, weight, bias, running_mean, running_var, epsilon=eps)


def _kept(op: Any, input: ir.Value, running_mean: ir.Value, running_var: ir.Value, eps: float) -> tuple[ir.Value, ir.Value]:
    """What an inference leaves for its backward, which does not read it: nothing on the CPU, and the statistics elsewhere, as in PyTorch."""
    if op.builder.device_type == "cpu":
        none = constant(op, np.zeros([0]), input.dtype)  # type: ignore[arg-type]
        return none, none
    running_mean, running_var = as_single(op, running_mean, running_var)
    return op.Identity(running_mean), rsqrt(op, running_var, eps)


def _functional(
    statistics: Any,
    op: Any,
    input: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    is_biased: bool = True,
) -> Any:
    if not training:
        out = _inference(op, input, weight, bias, mean, var, eps)
        return out, *_kept(op, input, mean, var, eps), op.Identity(mean), op.Identity(var)
    out, batch_mean, variance, rstd = statistics(op, input, weight, bias, mean, var, eps)
    return out, batch_mean, rstd, *_updated(op, input, mean, var, batch_mean, variance, momentum, is_biased)


@register(aten._native_batch_norm_legit_functional.default, requires=("com.microsoft::BatchNormInternal",))
def native_batch_norm_functional_fused(op, input, weight, bias, running_mean, running_var, training, momentum, eps):
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, bool training,
    float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)
    """
    _refuse_vectors(input)
    return _functional(_batch_norm_fused, op, input, weight, bias, running_mean, running_var, training, momentum, eps)


@register(aten._native_batch_norm_legit_functional.default, requires=("com.microsoft::BatchNormInternal",), device="cuda")
def native_batch_norm_functional_cuda(op, input, weight, bias, running_mean, running_var, training, momentum, eps):
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, bool training,
    float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)
    """
    return _functional(_batch_norm_fused, op, input, weight, bias, running_mean, running_var, training, momentum, eps, is_biased=False)


@register(aten._native_batch_norm_legit_functional.default, device="cpu")
def native_batch_norm_functional_cpu(op, input, weight, bias, running_mean, running_var, training, momentum, eps):
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, bool training,
    float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)
    """
    _refuse_vectors(input)
    return _functional(_batch_norm_standard, op, input, weight, bias, running_mean, running_var, training, momentum, eps)


@register(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(op, input, weight, bias, running_mean, running_var, training, momentum, eps):
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, bool training,
    float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)
    """
    return _functional(_batch_norm, op, input, weight, bias, running_mean, running_var, training, momentum, eps)


@register(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_no_stats(op, input, weight, bias, training, momentum, eps):
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training, float momentum, float eps) ->
    (Tensor, Tensor, Tensor)
    """
    out, mean, _, rstd = _batch_norm(op, input, weight, bias, None, None, eps)
    return out, mean, rstd


@register(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(op, input, weight, bias, running_mean, running_var, momentum, eps):
    """_native_batch_norm_legit_no_training(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var,
    float momentum, float eps) -> (Tensor, Tensor, Tensor)
    """
    return _inference(op, input, weight, bias, running_mean, running_var, eps), *_kept(op, input, running_mean, running_var, eps)


@register(aten.native_batch_norm_backward.default, requires=("com.microsoft::BatchNormalizationGrad",), device="cpu")
def native_batch_norm_backward_cpu(op, grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask):
    """native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean, Tensor? running_var,
    Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    _refuse_vectors(input)
    statistics = (running_mean, running_var, save_mean, save_invstd)
    return native_batch_norm_backward_fused(op, grad_out, input, weight, *statistics, train, eps, output_mask)


@register(aten.native_batch_norm_backward.default, requires=("com.microsoft::BatchNormalizationGrad",), device="cuda")
def native_batch_norm_backward_fused(op, grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask):
    """native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean, Tensor? running_var,
    Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    if not train:
        raise Unsupported("the kernel differentiates through the statistics of the batch")
    weight, save_mean, save_invstd = as_single(op, weight, save_mean, save_invstd)
    scale = filled(op, 1.0, [_channels(input)], save_mean) if weight is None else weight
    results = microsoft(op, "BatchNormalizationGrad", grad_out, input, scale, save_mean, save_invstd, like=(input, scale, scale), epsilon=eps)
    return [result if wanted else None for result, wanted in zip(results, output_mask)]


@register(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(op, grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask):
    """native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean, Tensor? running_var,
    Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    mean = save_mean if train else running_mean
    grad_out, input, weight, mean = as_single(op, grad_out, input, weight, mean)
    running_var, save_invstd = as_single(op, running_var, save_invstd)
    axes = other_dims(input)
    invstd = save_invstd if train else rsqrt(op, running_var, eps)
    # Of the centred input, not the normal one, and with one sum of the gradient for both: each is a pass over all elements less.
    grad_weight = grad_bias = grad_input = None
    if output_mask[1] or train:
        centred = op.Sub(input, per_channel(op, mean, input))
        grad_weight = op.Mul(sum_over(op, op.Mul(grad_out, centred), axes), invstd)
    if output_mask[2] or train:
        grad_bias = sum_over(op, grad_out, axes)
    if output_mask[0]:
        factor = per_channel(op, invstd if weight is None else op.Mul(invstd, weight), input)
        grad_input = grad_out
        if train:
            count = _count(op, input, grad_weight)
            along = op.Mul(centred, per_channel(op, op.Div(op.Mul(grad_weight, invstd), count), input))
            grad_input = op.Sub(op.Sub(grad_out, per_channel(op, op.Div(grad_bias, count), input)), along)
        grad_input = op.Mul(grad_input, factor)
    return grad_input, grad_weight if output_mask[1] else None, grad_bias if output_mask[2] else None
