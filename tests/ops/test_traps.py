"""Traps of PyTorch's decompositions, of torch_lib and of ONNX Runtime's kernels, each through the whole backend.

`python -m pytest --collect-only tests/ops/test_traps.py` lists them; those that concern one lowering alone have their tests beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ort_backend
from ort_backend import graph_report
from ort_backend.runtime import capabilities


def check(function: Callable[..., Any], *inputs: torch.Tensor, tolerance: float = 1e-5, **options: Any) -> graph_report.GraphReport:
    """Results, gradients and the generator's state equal eager's; the report on the graph."""
    graph_report.clear()
    torch._dynamo.reset()
    runs = []
    for call in (function, torch.compile(function, backend="ort_training", fullgraph=True, options=options)):
        torch.manual_seed(3)
        given = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]
        results = [one for one in torch.utils._pytree.tree_leaves(call(*given)) if isinstance(one, torch.Tensor)]
        state = torch.get_rng_state()
        differentiable, wanted = [one for one in results if one.requires_grad], [one for one in given if one.requires_grad]
        torch.manual_seed(4)
        gradients: Sequence[Any] = ()
        if differentiable:
            gradients = torch.autograd.grad(differentiable, wanted, [torch.randn_like(one) for one in differentiable], allow_unused=True)
        runs.append([*results, *gradients, state])
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    (graph,) = ort_backend.report().graphs
    return graph


def heads(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, 4, size, 8).to(dtype) for size in sizes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9), (torch.bfloat16, 6e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("form", ["plain", "causal", "mask", "scale"])
def test_attention_is_not_decomposed(form: str, dtype: torch.dtype, tolerance: float) -> None:
    # core_aten_decompositions() hands the attention matrix to a backward that expects the log-sum-exp, and fails in bfloat16.
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "causal": {"is_causal": True},
            "mask": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(1)},
            "scale": {"scale": 0.5},
        }
        return F.scaled_dot_product_attention(q, k, v, **kinds[form])

    graph = check(attention, *heads(6, 6, 6, dtype=dtype), tolerance=tolerance)
    assert graph.python_ops == 0 and graph.kind == "training"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_a_single_number(approximate: str) -> None:
    assert check(lambda x: F.gelu(x * 2, approximate=approximate) * 3, torch.tensor(0.3)).python_ops == 0


def test_attention_with_dropout_drops_what_eager_drops() -> None:
    assert check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4), *heads(6, 6, 6)).python_ops == 0


def test_attention_with_fewer_heads_of_keys() -> None:
    q, (k, v) = torch.randn(2, 4, 6, 8), (torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8))
    assert check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v).python_ops == 0


def test_tensor_literals_in_a_model() -> None:
    # A table that takes lift_fresh for nothing cannot compile them.
    assert check(lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(0.5), torch.randn(2, 3)).python_ops == 0


def test_writes_into_a_diagonal() -> None:
    # PyTorch's references for them write prims.copy_to, a mutation in a functional graph.
    def filled(x: torch.Tensor) -> torch.Tensor:
        x = x.sin() + x
        x.diagonal().mul_(2)
        return x.clone().fill_diagonal_(3.0) + torch.diagonal_scatter(x, x.sum(0), 0)

    assert check(filled, torch.randn(4, 4)).python_ops == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_dropout_rounds_at_most_once_otherwise_than_eager(p: float, dtype: torch.dtype) -> None:
    # DropoutGrad, the fastest way to scale by a mask, divides where eager multiplies; (x * mask) * scale in bfloat16 would round twice.
    x = torch.randn(64, 64).to(dtype)
    assert check(lambda x: F.dropout(x, p), x, tolerance=(4 if dtype is torch.float32 else 1) * torch.finfo(dtype).eps).python_ops == 0


def test_dropout_over_a_transposed_tensor_drops_what_eager_drops() -> None:
    # The generator fills memory in its own order: a draw needs the strides of what it is for.
    assert check(lambda x: F.dropout(x.exp().t(), 0.5), torch.randn(5, 7), tolerance=1e-6).python_ops == 0


def test_exponential_noise_is_no_uniform_noise() -> None:
    # A table that decomposes `exponential` draws other numbers than eager.
    check(lambda x: F.gumbel_softmax(x, hard=False), torch.randn(4, 5))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_in_training_and_its_running_variance(training: bool) -> None:
    # torch_lib normalises as in inference; ONNX Runtime's running variance is the biased one.
    reference, model = nn.BatchNorm2d(3, momentum=0.3), nn.BatchNorm2d(3, momentum=0.3)
    compiled = torch.compile(model.train(training), backend="ort_training")
    reference.train(training)
    for _ in range(3):
        x = torch.randn(2, 3, 2, 2) * 3 + 1
        torch.testing.assert_close(compiled(x), reference(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_batch_norm_that_keeps_none_of_the_old_statistics_or_all(momentum: float) -> None:
    # ONNX Runtime's optimiser merges what multiplies them with the same number, and its kernel writes over the memory that it is given for new ones.
    reference, model = nn.BatchNorm2d(3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
    compiled = torch.compile(model, backend="ort_training")
    for _ in range(3):
        x = torch.randn(2, 3, 2, 2) * 3 + 1
        torch.testing.assert_close(compiled(x), reference(x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_batch_norm_as_the_first_of_a_graph(momentum: float) -> None:
    """Without a count of batches, or weights, in front of it."""

    def step(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, variance, training=True, momentum=momentum)

    x, statistics = torch.randn(2, 3, 2, 2) * 3 + 1, (torch.rand(3), torch.rand(3) + 1)
    expected, actual = ([one.clone() for one in statistics] for _ in range(2))
    torch.testing.assert_close(torch.compile(step, backend="ort_training")(x, *actual), step(x, *expected))
    torch.testing.assert_close(actual, expected)


def test_the_mean_loss_counts_its_rows() -> None:
    # torch_lib's nll_loss_forward takes 1 for the sum of weights.
    target, weight = torch.tensor([0, 2, 1, 2]), torch.tensor([0.5, 2.0, 1.0])
    assert check(lambda x, y: F.cross_entropy(x, y, weight, ignore_index=1), torch.randn(4, 3), target).python_ops == 0


def test_the_places_of_maxima_are_those_in_their_plane() -> None:
    # ONNX Runtime counts them over the whole tensor.
    assert check(lambda x: F.max_pool2d(x, 2, return_indices=True), torch.randn(2, 3, 4, 4)).python_ops == 0


def test_the_gradient_of_average_pooling_knows_its_size() -> None:
    # AveragePoolGrad without a declared output brings the process down.
    assert check(lambda x: F.avg_pool2d(x, 3, 2, 1), torch.randn(1, 2, 7, 7)).python_ops == 0


def test_a_transposed_convolution_of_which_padding_leaves_nothing() -> None:
    report = check(lambda x, w: F.conv_transpose2d(x, w, padding=(0, 3)), torch.randn(2, 2, 4, 4), torch.randn(2, 2, 1, 3))
    assert report.python_ops >= 1


def test_maxima_of_bools_along_a_dimension() -> None:
    check(lambda x: (x > 0).max(1), torch.randn(3, 4))


def test_equal_elements_are_sorted_as_in_eager() -> None:
    x = torch.tensor([2.0, 1.0, 2.0, 1.0, 2.0])
    check(lambda x: torch.sort(x, stable=True), x)


@pytest.mark.parametrize(
    "scatter",
    [
        lambda x, i, s: x.scatter(0, i, s),
        lambda x, i, s: x.scatter_add(0, i, s),
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
        lambda x, i, s: x.scatter_reduce(0, i, s, "mean", include_self=False),
    ],
)
def test_one_place_without_dimensions_takes_the_first(scatter: Callable[..., torch.Tensor]) -> None:
    def function(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return scatter(x, index, source.detach())  # whose gradient is an error of PyTorch's

    assert check(function, torch.randn(4), torch.tensor(2), torch.randn(5)).python_ops == 0


def test_means_in_scatter_reduce() -> None:
    index = torch.tensor([0, 1, 0, 2, 0])
    assert check(lambda x, i, s: x.scatter_reduce(0, i, s, "mean"), torch.randn(4), index, torch.randn(5)).python_ops == 0


def test_complex_numbers_stay_right() -> None:
    check(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=6), torch.randn(3, 6))
    x, y = torch.randn(2, 3, 3, 2), torch.randn(2, 3, 3, 2)
    check(lambda x, y: torch.view_as_real(torch.bmm(torch.view_as_complex(x), torch.view_as_complex(y).conj())), x, y)


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_embedding_bags(mode: str) -> None:
    # torch_lib's brings the process down.
    index, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 3])
    check(lambda w, i, o: F.embedding_bag(i, w, o, mode=mode), torch.randn(10, 3), index, offsets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_that_kernels_lack(dtype: torch.dtype) -> None:
    # The CPU provider has no bfloat16 kernels, and no float64 Erf, Conv, BatchNormInternal.
    def network(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.conv2d(x, w, padding=1)).flatten(2).softmax(-1)

    check(network, torch.randn(2, 3, 5, 5).to(dtype), torch.randn(4, 3, 3, 3).to(dtype), tolerance=1e-9 if dtype is torch.float64 else 3e-2)


def test_the_same_tensor_twice() -> None:
    # Labels that are the inputs' own tensor: one graph input, two uses.
    compiled = torch.compile(lambda x, y: (x * y).sum() + y.sum(), backend="ort_training")
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, x), x)[0], 2 * x.detach() + 1)
    other = torch.randn(3)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, other), x)[0], other)


def test_a_bidirectional_lstm_of_two_layers() -> None:
    # As mkldnn_rnn_layer it saves nothing for its backward, and AOTAutograd fails.
    model = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(2, 3, 4)
    runs = []
    for call in (model, torch.compile(model, backend="ort_training")):
        with torch._dynamo.config.patch(allow_rnn=True):
            result, (hidden, cell) = call(x)
        loss = result.sin().sum() + hidden.cos().sum() + cell.sum()
        runs.append([result.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*runs)


def test_no_fusion_into_a_kernel_that_float64_lacks() -> None:
    # The optimiser makes QuickGelu of x * sigmoid(x), and FusedMatMul of a product with a transpose, whatever the dtype.
    check(lambda x: (x * torch.sigmoid(x) + F.mish(x) + F.silu(x)) @ x.t(), torch.randn(3, 3).double(), tolerance=1e-9)


_SLOW = {"ReluGrad", "LeakyReluGrad", "GeluGrad", "FastGeluGrad", "LogSoftmaxGrad_13", "GatherGrad", "SoftmaxCrossEntropyLossInternal"}


def test_kernels_that_lose_against_arithmetic_are_not_used(tmp_path: Path) -> None:
    # ReluGrad takes ten times as long as a product with a mask, FastGeluGrad four times as long as its formula.
    def network(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.embedding(x, w)
        h = F.leaky_relu(F.relu(h)) + F.gelu(h) + F.gelu(h, approximate="tanh")
        return F.cross_entropy(h.flatten(0, 1), y)

    check(network, torch.randn(7, 5), torch.randint(7, (2, 3)), torch.randint(5, (6,)), dump_dir=str(tmp_path))
    used = {node.op_type for file in tmp_path.glob("*.onnx") for node in ir.load(file).graph}
    assert ("YieldOp" in used) == capabilities.has_training() and "Gather" in used and not used & _SLOW


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        lambda m: m,
        lambda m: m.mT,
        lambda m: m.permute(2, 1, 0),
        lambda m: m.repeat_interleave(2, -1)[..., ::2],  # gaps between the elements
        lambda m: m.repeat_interleave(2, 0)[::2],  # between the matrices
        lambda m: m[0].t(),
    ],
    ids=["contiguous", "columns", "permuted", "gaps", "every_other", "one"],
)
@pytest.mark.parametrize("function", [torch.linalg.det, lambda m: torch.linalg.slogdet(m)[1]], ids=["det", "slogdet"])
def test_determinants_of_matrices_in_any_layout(function: Callable[..., Any], layout: Callable[..., Any], made_inside: bool) -> None:
    """PyTorch's kernel hands the factors of the transpose to the backward where the matrix is contiguous."""
    torch.manual_seed(2)
    matrices = torch.randn(4, 4, 4) + 3 * torch.eye(4)
    results = []
    for call in (lambda m: m, lambda m: torch.compile(m, backend="ort_training", fullgraph=True)):
        given = (matrices if made_inside else layout(matrices)).detach().requires_grad_()
        results.append(torch.autograd.grad(call(lambda m: function(layout(m.exp()) if made_inside else m).sum())(given), given)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)


_INTEGERS = torch.tensor([7, -7, 5])


@pytest.mark.parametrize("divisor", [0, torch.tensor([2, 0, 3])], ids=["number", "tensor"])
@pytest.mark.parametrize(
    "divide",
    [lambda a, b: a // b, lambda a, b: a % b, lambda a, b: torch.div(a, b, rounding_mode="trunc"), torch.fmod],
    ids=["floor", "remainder", "trunc", "fmod"],
)
def test_integers_divided_by_zero(divide: Callable[..., Any], divisor: Any) -> None:
    """ONNX Runtime's kernels would end the process."""
    compiled = torch.compile(lambda a: divide(a, divisor), backend="ort_training", fullgraph=True)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(_INTEGERS)
    other = torch.tensor([2, -2, 3]) if isinstance(divisor, torch.Tensor) else 3
    torch.testing.assert_close(torch.compile(divide, backend="ort_training")(_INTEGERS, other), divide(_INTEGERS, other))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "read",
    [
        lambda x, i: F.embedding(i, x),
        lambda x, i: F.embedding_bag(i[None], x),
        lambda x, i: x.gather(0, i[:, None].long()),
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.scatter(0, i[:, None].long(), 1.0),
        lambda x, i: x.scatter_add(0, i[:, None].long(), torch.ones(2, 1)),
        lambda x, i: x.index_add(0, i, torch.ones(2, 3)),
        lambda x, i: F.cross_entropy(x[:2], i.long()),
        lambda x, i: F.cross_entropy(x.t()[None, :, :2], i.long()[None]),
        lambda x, i: F.nll_loss(x[:2], i.long(), weight=torch.ones(3)),
    ],
    ids=["embedding", "embedding_bag", "gather", "index_select", "scatter", "scatter_add", "index_add", "cross_entropy", "of pictures", "nll_loss"],
)
def test_a_negative_index_is_out_of_range(read: Callable[..., Any], dtype: torch.dtype) -> None:
    """To ONNX it counts from the end, so that a label of -1 would train the last class."""
    x = torch.randn(4, 3, requires_grad=True)
    compiled = torch.compile(read, backend="ort_training", fullgraph=True)
    torch.testing.assert_close(compiled(x, torch.tensor([2, 0], dtype=dtype)), read(x, torch.tensor([2, 0], dtype=dtype)))
    with pytest.raises((ort_backend.SessionError, RuntimeError, IndexError), match="out of|range|bounds|invalid"):
        compiled(x, torch.tensor([2, -1], dtype=dtype))


@pytest.mark.parametrize("flipped", [lambda x: x[..., :0].flip(-1), lambda x: x[..., :0].flip(0, -1)], ids=["the empty one", "both"])
def test_nothing_flipped_in_front_of_something(flipped: Callable[..., Any]) -> None:
    check(lambda x: torch.cat([flipped(x), x * 2], -1).exp().cumsum(-1), torch.randn(2, 3, 4))


@pytest.mark.parametrize(
    "product",
    [
        lambda a: F.linear(a, torch.ones(2, 3)),
        lambda a: F.linear(a, torch.ones(2, 3), torch.ones(2)),
        lambda a: a[None] @ torch.ones(1, 3, 2),
        lambda a: a @ torch.ones(3),
    ],
    ids=["mm", "addmm", "bmm", "mv"],
)
def test_factors_of_two_dtypes_are_an_error_as_in_eager(product: Callable[..., Any]) -> None:
    given = torch.randn(4, 3, dtype=torch.float64)
    for call in (product, torch.compile(product, backend="ort_training", fullgraph=True)):
        with pytest.raises(RuntimeError, match="dtype|scalar type"):
            call(given)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch._foreach_addcdiv([x], [x], [x], value=3 + 5j)[0],
        lambda x: x.addcmul(x, x, value=1j),
        lambda x: x.clone().fill_(3 + 5j),
        lambda x: torch.full_like(x, 2j),
    ],
    ids=["foreach", "addcmul", "fill_", "full_like"],
)
def test_a_complex_number_in_a_real_tensor_is_an_error_as_in_eager(function: Callable[..., Any]) -> None:
    """The imaginary part was left out without a word."""
    for call in (function, torch.compile(function, backend="ort_training", fullgraph=True)):
        with pytest.raises(RuntimeError, match="cannot be converted to type float"):
            call(torch.ones(2))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 1).t().contiguous(),
        lambda x: (x.t().contiguous() * 1).t().contiguous(),
        lambda x: (x / 1 + 0).view(-1),
        lambda x: (x.cos(), (x * 1).t().contiguous()),
    ],
)
def test_a_gradient_that_is_a_tangent_after_all(function: Callable[..., Any]) -> None:
    """Once ONNX Runtime has left out what does nothing."""
    x = torch.randn(3, 4, requires_grad=True)
    expected = function(x)
    seeds = [torch.randn_like(one) for one in (expected if isinstance(expected, tuple) else [expected])]
    torch._dynamo.reset()
    got = torch.compile(function, backend="ort_training", fullgraph=True)(x)
    torch.testing.assert_close(torch.autograd.grad(got, x, seeds), torch.autograd.grad(expected, x, seeds))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_negative_index_is_filled_from_the_end(dim: int) -> None:
    """`index_fill` alone of its kind takes one in eager PyTorch."""
    check(lambda x, i: x.index_fill(dim, i, 3.0) * x, torch.randn(4, 3), torch.tensor([2, -3]))
