"""Normalizations against eager, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import ON_CPU
from torch import randn
from torch.nn import functional as F

from ort_backend.runtime import capabilities

aten = torch.ops.aten
contrib = pytest.mark.parametrize("contrib", [True, False], ids=["fused", "plain"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@contrib
@dtypes
@pytest.mark.parametrize("size", [(6,), (5, 6)])
@pytest.mark.parametrize("affine", [0, 1, 2])
def test_layer_norm(check: Callable, contrib: bool, dtype: torch.dtype, size: tuple[int, ...], affine: int) -> None:
    def both(g: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, bias = (*weights, None, None)[:2]
        out, mean, rstd = aten.native_layer_norm(x, list(size), weight, bias, 1e-5)
        mask = [True, weight is not None, bias is not None]
        return out, mean, rstd, *aten.native_layer_norm_backward(g, x, list(size), mean, rstd, weight, bias, mask)

    weights = [randn(size, dtype=dtype) for _ in range(affine)]
    inputs, also = ([randn(n, 5, 6, dtype=dtype) for _ in range(2)] for n in (4, 3))
    check(both, *inputs, *weights, also=(*also, *weights), contrib=contrib)


def test_norms_of_single_elements(check: Callable) -> None:
    def layer(g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, mean, rstd = aten.native_layer_norm(x, [1], None, None, 1e-5)
        return out, *aten.native_layer_norm_backward(g, x, [1], mean, rstd, None, None, [True, False, False])

    def group(g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, mean, rstd = aten.native_group_norm(x, None, None, 3, 4, 1, 4, 1e-5)
        return out, *aten.native_group_norm_backward(g, x, mean, rstd, None, 3, 4, 1, 4, [True, False, False])

    rounding = 1e-5 if ON_CPU else 1e-3  # PyTorch's kernels of CUDA give gradients of roundings, where they are zero
    check(layer, randn(3, 1), randn(3, 1), atol=rounding)
    check(group, randn(3, 4, 1), randn(3, 4, 1), atol=rounding)


def test_layer_norm_leaves_out_gradients(check: Callable) -> None:
    def backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, mean, rstd = aten.native_layer_norm(x, [6], w, w, 1e-5)
        return aten.native_layer_norm_backward(g, x, [6], mean, rstd, w, w, [False, True, False])

    check(backward, randn(4, 6), randn(4, 6), randn(6))


@pytest.mark.cpu_only(reason="an operator that PyTorch can trace within `vjp`")
def test_rms_norm(check: Callable) -> None:
    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(lambda x, w: F.rms_norm(x, (6,), w, 1e-5), x, w)
        return out, *pull(out.cos())

    check(both, randn(4, 6), randn(6), also=(randn(3, 6), randn(6)))


@contrib
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("size", [(3,), (3, 5), (3, 5, 4), (3, 3, 4, 2)], ids=len)
def test_batch_norm(check: Callable, contrib: bool, training: bool, size: tuple[int, ...]) -> None:
    def both(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor]:
        out, batch_mean, rstd, new_mean, new_var = aten._native_batch_norm_legit_functional(x, w, b, mean, var, training, 0.1, 1e-5)
        grads = aten.native_batch_norm_backward(g, x, w, mean, var, batch_mean, rstd, training, 1e-5, [True] * 3)
        return [out, new_mean, new_var, *grads, *([batch_mean, rstd] if training else [])]

    vectors = (randn(3), randn(3), randn(3), torch.rand(3) + 0.5)
    inputs, also = ((randn(n, *size), 2 * randn(n, *size) + 1) for n in (4, 6))
    check(both, *inputs, *vectors, also=(*also, *vectors), contrib=contrib)


@dtypes
def test_batch_norm_without_weights(check: Callable, dtype: torch.dtype) -> None:
    def both(g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor | None]:
        out, batch_mean, rstd, *new = aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)
        return [out, *new, *aten.native_batch_norm_backward(g, x, None, mean, var, batch_mean, rstd, True, 1e-5, [True, False, False])]

    check(both, *(randn(4, 3, 5, dtype=dtype) for _ in range(2)), randn(3, dtype=dtype), torch.rand(3, dtype=dtype))
    check(lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5), randn(4, 3, 5), randn(3), randn(3))


@contrib
def test_instance_norm_over_any_number_of_pictures(check: Callable, contrib: bool) -> None:
    """Batch norm over pictures times channels, a number that changes."""

    def both(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x, g, w = x.flatten(0, 1)[None], g.flatten(0, 1)[None], w.repeat(x.shape[0])
        out, mean, rstd = aten._native_batch_norm_legit.no_stats(x, w, None, True, 0.1, 1e-5)
        return [out, *aten.native_batch_norm_backward(g, x, w, None, None, mean, rstd, True, 1e-5, [True, True, True])]

    check(both, randn(2, 3, 5), randn(2, 3, 5), randn(3), also=(randn(4, 3, 5), randn(4, 3, 5), randn(3)), contrib=contrib)


def test_batch_norm_keeps_its_running_statistics_apart(check: Callable) -> None:
    """The kernel's statistics alias its inputs: two norms over the same buffers must not disturb each other."""

    def twice(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor]:
        first = aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)
        second = aten._native_batch_norm_legit_functional(first[0] * 3 + 1, None, None, mean, var, True, 0.1, 1e-5)
        return [*first, *second, mean + 1, var + 1]

    check(twice, randn(4, 3, 5), torch.zeros(3), torch.zeros(3))
    check(twice, randn(4, 1, 5), torch.ones(1), torch.ones(1))


@pytest.mark.cpu_only(reason="ONNX's own operator, which has no kernel for CUDA in training mode")
@pytest.mark.parametrize("old", [0.5, float("nan"), float("inf"), -float("inf")])
def test_batch_norm_without_training_kernels_is_one_operator(check: Callable, old: float) -> None:
    """Its kernel multiplies the running statistics by 0, which makes no number of those that are none."""

    def both(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor]:
        out, batch_mean, rstd, *running = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, 0.1, 1e-5)
        return [out, batch_mean, rstd, *running, *aten.native_batch_norm_backward(g, x, w, mean, var, batch_mean, rstd, True, 1e-5, [True] * 3)]

    inputs, also = ([randn(n, 3, 5, 4) for _ in range(2)] for n in (4, 6))
    vectors = randn(3), randn(3), torch.full([3], old), torch.full([3], old)
    lowered = check(both, *inputs, *vectors, also=(*also, *vectors), contrib=False)
    assert lowered.op_types.count("BatchNormalization") == 1
    # The backward goes over all elements for two sums, and for nothing else that is one number of a channel.
    assert [name for name in lowered.op_types if name.startswith("Reduce")] == ["ReduceSum", "ReduceSum"]


@pytest.mark.cpu_only(reason="ONNX's own operator, which has no kernel for CUDA in training mode")
def test_batch_norm_of_large_planes_is_not_one_operator(lower: Callable) -> None:
    """Its kernel adds one number to the next: over planes of 1024 x 1024 the variance is off by 1e-5."""

    def variance(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        return aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 1.0, 1e-5)[4]

    for side, count in ((256, 1), (512, 0)):
        lowered = lower(variance, (randn(1, 1, side, side), torch.zeros(1), torch.ones(1)), contrib=False)
        assert lowered.op_types.count("BatchNormalization") == count


def test_batch_norm_with_constant_running_statistics(check: Callable) -> None:
    """Constants that are equal become one in ONNX Runtime: the old mean, which the kernel writes over, and the bias."""

    def constant(x: torch.Tensor) -> list[torch.Tensor]:
        return list(aten._native_batch_norm_legit_functional(x, None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5))

    check(constant, randn(4, 3, 5))


@pytest.mark.cpu_only(reason="the kernel whose variance is biased")
@pytest.mark.skipif(not capabilities.has_training(), reason="the fused kernel needs onnxruntime-training")
def test_the_variance_of_the_fused_kernel_of_cuda_is_taken_for_unbiased(lower: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own graph, run by the CPU's kernel, whose variance is biased, has that as the batch's part."""

    def statistics(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor]:
        return list(aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)[3:])

    target = dataclasses.replace(capabilities.target("CPUExecutionProvider", 18), provider="CUDAExecutionProvider")
    monkeypatch.setattr(capabilities, "target", lambda *_: target)
    x, mean, var = randn(4, 3, 5), randn(3), torch.rand(3)
    new_mean, new_var = lower(statistics, (x, mean, var))(x, mean, var)
    torch.testing.assert_close(new_mean, 0.9 * mean + 0.1 * x.mean((0, 2)))
    torch.testing.assert_close(new_var, 0.9 * var + 0.1 * x.var((0, 2), unbiased=False))


@contrib
@dtypes
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(check: Callable, contrib: bool, dtype: torch.dtype, affine: bool) -> None:
    def both(g: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, bias = weights or (None, None)
        n, c, rest = x.shape[0], x.shape[1], x.shape[2] * x.shape[3]
        out, mean, rstd = aten.native_group_norm(x, weight, bias, n, c, rest, 2, 1e-5)
        return out, mean, rstd, *aten.native_group_norm_backward(g, x, mean, rstd, weight, n, c, rest, 2, [True, affine, affine])

    weights = [randn(4, dtype=dtype) for _ in range(2 * affine)]
    inputs, also = ([randn(n, 4, 5, 6 * n, dtype=dtype) for _ in range(2)] for n in (3, 2))
    check(both, *inputs, *weights, also=(*also, *weights), contrib=contrib)


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(check: Callable, dim: int) -> None:
    def both(v: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = torch.func.vjp(lambda v, g: aten._weight_norm_interface(v, g, dim)[0], v, g)
        return out, *pull(out.cos())

    check(both, randn(4, 3, 5), randn(4, 1, 1) if dim == 0 else randn(1, 1, 5))


@contrib
@pytest.mark.parametrize("shape", [(64, 8), (33, 5, 1, 1), (2, 3)], ids=str)
def test_batch_norm_of_vectors_is_made_of_primitives(check: Callable, contrib: bool, shape: tuple[int, ...]) -> None:
    """ONNX Runtime's kernels for the CPU take ten times as long for planes of one element."""

    def both(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, saved, rstd, *running = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, 0.1, 1e-5)
        grads = aten.native_batch_norm_backward(g, x, w, mean, var, saved, rstd, True, 1e-5, [True, True, True])
        evaluated, *_ = aten._native_batch_norm_legit_no_training(x, w, b, mean, var, 0.1, 1e-5)
        return out, saved, rstd, *running, *grads, evaluated

    size = shape[1]
    vectors = randn(size), randn(size), randn(size), torch.rand(size) + 0.1
    lowered = check(both, randn(shape), randn(shape), *vectors, contrib=contrib)
    assert any("BatchNorm" in node.op_type for node in lowered.model.graph) == (contrib and not ON_CPU)


@pytest.mark.parametrize("shape", [(512, 96), (3, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_layer_norm_without_a_weight(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Large ones run by PyTorch's kernel, with a weight of ones."""
    x = torch.randn(shape, dtype=dtype)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
    same_as_eager(lambda x: torch.nn.functional.layer_norm(x, shape[1:]).square(), call(x.requires_grad_()), graphs=1, **tolerance)
