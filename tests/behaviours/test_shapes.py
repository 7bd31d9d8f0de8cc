"""Sizes may change from call to call: right results, few graphs, sizes in the graph by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from behaviours.check import call, compiled, on_ort, onnx_files, same_as_eager, same_tree
from default_device import ON_CPU, seeded
from models import ids
from torch import nn
from torch.nn import functional as F
from torch_version import MORE_IS_SYMBOLIC, TORCH
from transformers import BertConfig, BertModel

import ort_backend


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, generator=seeded(seed))
    return made.requires_grad_()


class Mixer(nn.Module):
    """Uses its sizes in views, in arange and in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.query(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = torch.arange(length)[:, None] >= torch.arange(length)
        scores = (q @ k.transpose(-1, -2) / 2.0).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, 8)) / length


def test_twenty_batch_sizes_need_two_graphs() -> None:
    sizes = random.Random(0).sample(range(2, 101), 20)
    ran = same_as_eager(
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU()), *(call(tensor(n, 3)) for n in sizes), graphs=2, repeat=1
    )
    assert [graph.counts.forward for graph in ran.graphs] == [1, 19]


def test_twenty_batch_and_sequence_lengths_need_two_graphs() -> None:
    draw = random.Random(0)
    sizes = [(draw.randint(2, 6), draw.randint(9, 20)) for _ in range(20)]  # equal sizes in the first call would be taken for one
    same_as_eager(Mixer(), *(call(tensor(b, length, 8)) for b, length in sizes), graphs=2, repeat=1)
    ran = same_as_eager(Mixer(), *(call(tensor(b, length, 8)) for b, length in sizes), graphs=1, repeat=1, dynamic=True)
    assert ran.graphs[0].counts.backward == 20


def test_bert_with_any_batch_and_length() -> None:
    sizes = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), add_pooling_layer=False)
    draw = random.Random(1)
    calls = [call(ids(draw.randint(2, 5), draw.randint(3, 20))) for _ in range(8)]
    same_as_eager(model, *calls, graphs=range(1, 4), repeat=1, rtol=1e-3, atol=1e-4)


def test_dynamic_elementwise_shapes_share_one_graph() -> None:
    ran = same_as_eager(lambda x: (x.sin() * x).exp(), call(tensor(2, 3)), call(tensor(3, 4)), call(tensor(7, 5)), graphs=1, dynamic=True)
    assert ran.graphs[0].counts.forward == 6


def test_each_rank_has_a_graph() -> None:
    shapes = [(2,), (3,), (2, 3), (4, 5), (2, 3, 4), (2, 3, 4, 5)]
    same_as_eager(lambda x: x.relu() * 2, *(call(tensor(*shape)) for shape in shapes), graphs=4, dynamic=True)


@pytest.mark.parametrize("order", [(1, 4, 1, 7, 9), (4, 1, 7, 1)])
def test_a_batch_of_one_has_a_graph_of_its_own(order: tuple[int, ...]) -> None:
    same_as_eager(nn.Linear(3, 2), *(call(tensor(n, 3)) for n in order), graphs=range(2, 4), repeat=1)


def test_sizes_as_results_and_numbers() -> None:
    def function(x: torch.Tensor) -> Any:
        n = x.shape[0]
        third = x.numel() / 3 if ON_CPU else n * 4 // 3  # where a default device is set Dynamo (2.13) divides no number, with any backend
        return x.shape[0], x / n, x * n + (n // 2), torch.full((n, 2), n), torch.arange(n), x.view(-1, n, 1), n * 2 + 1, third

    same_as_eager(function, *(call(tensor(n, 4)) for n in (3, 5, 9, 7)), graphs=1, repeat=1, dynamic=True)


def test_sizes_in_views_slices_and_reductions() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        n, m = x.shape
        joined = torch.cat([x, y])
        halves = joined[: n // 2], joined[n // 2 :]
        return joined.sum(0) / (n + m), halves, x.reshape(n * m).view(m, n), x.expand(3, n, m).mean(0), F.pad(x, (0, n)), x.repeat(2, 1), x.tril()

    same_as_eager(function, *(call(tensor(n, m), tensor(k, m)) for n, m, k in ((4, 3, 5), (5, 6, 3), (7, 2, 8))), graphs=1, repeat=1, dynamic=True)


def test_a_number_of_blocks_that_is_one() -> None:
    """Dynamo holds it to 1 by a guard; the backward drops the dimension, whose size is still called by its expression there (LongT5)."""

    def function(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        blocks = -(-x.shape[1] // 8)
        return F.pad(x, (0, -x.shape[1] % 8)).view(x.shape[0], blocks, -1) + bias[None, None]

    sizes = ((3, 6), (4, 5), (3, 20), (5, 7), (2, 30))
    outside = () if ON_CPU else None  # there, sums of what may have no elements
    same_as_eager(function, *(call(tensor(*size), tensor(8, seed=1)) for size in sizes), graphs=2, repeat=1, python_ops=outside, dynamic=True)


def test_sizes_whose_equality_is_required() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) @ y.t()

    same_as_eager(function, *(call(tensor(n, 4), tensor(n, 4, seed=1)) for n in (2, 5, 8)), graphs=1, repeat=1, dynamic=True)
    with on_ort(graphs=1, idle=True):
        step = compiled(function, dynamic=True)
        step(tensor(2, 4), tensor(2, 4))
        with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
            step(tensor(2, 4), tensor(3, 4))


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_empty_batch(dynamic: bool | None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.linear(x).relu()
            return hidden, hidden.sum(), hidden.softmax(-1), F.layer_norm(hidden, (4,)), torch.cat([hidden, hidden])

    in_pytorch = () if ON_CPU else None  # on a device what sums or normalizes nothing
    same_as_eager(Model(), call(tensor(0, 3)), call(tensor(5, 3)), call(tensor(0, 3)), graphs=2, repeat=1, dynamic=dynamic, python_ops=in_pytorch)


ON_NO_PICTURE = {
    "conv": lambda x: F.conv2d(x, torch.ones(3, 2, 3, 3)),
    "depthwise": lambda x: F.conv2d(x, torch.ones(2, 1, 3, 3), padding=1, groups=2),
    "transposed": lambda x: F.conv_transpose2d(x, torch.ones(2, 3, 3, 3), stride=2),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 2),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: x.topk(2, -1)[0],
    "median": lambda x: x.median(-1)[0],
}


@pytest.mark.parametrize("function", ON_NO_PICTURE.values(), ids=ON_NO_PICTURE)
def test_no_picture_at_all(function: Any) -> None:
    """As the head of a detector sees where nothing is found. A kernel of ONNX Runtime that divides by the number ends the process."""
    scale = torch.ones(2, 6, 6, requires_grad=True)
    x = torch.zeros(0, 2, 6, 6, requires_grad=True)
    with on_ort(graphs=1, forwards=1, backwards=1, python_ops=None):
        results = []
        for side in (compiled(lambda x, scale: function(x * scale)), lambda x, scale: function(x * scale)):
            made = side(x, scale)
            results.append((made, *torch.autograd.grad(made.sum(), (x, scale))))
        same_tree(*results)


@pytest.mark.parametrize("train", [False, True])
def test_a_changing_number_of_rows_in_reverse(train: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.shape[0]
        return x[torch.arange(rows - 1, -1, -1)].sin(), x[torch.arange(-2, 1)], x[torch.arange(rows - 3, rows)], x[torch.arange(0, rows, 2)]

    step = compiled(function, dynamic=True)
    for rows in (5, 7, 4):
        x = tensor(rows, 3).requires_grad_(train)
        same_tree(step(x), function(x))


def test_a_size_that_falls_to_zero() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[:, 3:].sort(descending=True)[0] * 2

    step = compiled(function, dynamic=True)
    for length in (8, 5, 3):
        x = tensor(2, length)
        same_tree(step(x), function(x))


OF_SOME_ROWS = {
    "linear": lambda rows, w, b: F.linear(rows, w, b),
    "gelu": lambda rows, w, b: F.gelu(F.linear(rows, w)),
    "products": lambda rows, w, b: 2.5 * (rows.t() @ (rows * 2)),
    "batches": lambda rows, w, b: torch.bmm(rows.t().expand(2, -1, -1), rows.expand(2, -1, -1)),
    "dot": lambda rows, w, b: torch.dot(rows[:, 0], rows[:, 1]),
    "layer_norm": lambda rows, w, b: F.layer_norm(rows, (4,), w[0], w[1]),
    "group_norm": lambda rows, w, b: F.group_norm(rows, 1),
    "conv": lambda rows, w, b: F.conv2d(rows.reshape(-1, 1, 2, 2), w.reshape(-1, 1, 2, 2)),
    "transposed_conv": lambda rows, w, b: F.conv_transpose1d(rows[:, None], w[None]),
    "cross_entropy": lambda rows, w, b: F.cross_entropy(rows, torch.zeros_like(rows[:, 0], dtype=torch.int64), reduction="sum"),
    "sort": lambda rows, w, b: rows.sort(1)[0],
}


@pytest.mark.parametrize("rows", ["by_a_mask", "what_a_slice_leaves"])
@pytest.mark.parametrize("function", OF_SOME_ROWS.values(), ids=OF_SOME_ROWS)
def test_rows_of_which_there_may_be_none(function: Any, rows: str) -> None:
    """As an expert sees them to which no token goes. Sums over nothing are 0, which some kernels leave unwritten, and others refuse."""

    def some(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return function(x[x[:, 0] > 0] if rows == "by_a_mask" else x[3:], *rest)

    w, b = (tensor(*size).requires_grad_() for size in ((6, 4), (6,)))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), on_ort(graphs=1 if rows == "by_a_mask" else None, python_ops=None):
        step = compiled(some, dynamic=rows != "by_a_mask")
        for count in (5, 0, 3, 0):
            x = tensor(8 if rows == "by_a_mask" else 3 + count, 4).detach()
            x[:, 0] = torch.where(torch.arange(len(x)) < count, 0.5, -0.5)
            x.requires_grad_()
            results = []
            for side in (step, some):
                made = side(x, w, b)
                results.append((made, *torch.autograd.grad(made.sin().sum(), (x, w, b), allow_unused=True, materialize_grads=True)))
            same_tree(*results)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_elements_that_depends_on_values() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sort()[0] * 2

    step = compiled(function)
    for x in (torch.tensor([2.0, -1.0, 1.0]), -torch.ones(3)):
        same_tree(step(x), function(x))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_gradient_that_is_zero_in_places_of_a_number_of_rows_that_depends_on_values() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x[mask] @ w).relu()

    step = compiled(function)
    for count in (3, 1):
        results = []
        for side in (step, function):
            x, w = tensor(5, 4).detach().requires_grad_(), tensor(4, 3, seed=1).detach().requires_grad_()
            made = side(x, torch.arange(5) < count, w)
            results.append((made, *torch.autograd.grad(made.sin().sum(), (x, w))))
        same_tree(*results)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_dropout_of_a_number_of_rows_that_depends_on_values() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.dropout(x[mask].exp(), 0.4)

    step = compiled(function)
    for count in (3, 0, 5):
        results = []
        for side in (step, function):
            x = tensor(5, 4).detach().requires_grad_()
            torch.manual_seed(0)
            made = side(x, torch.arange(5) < count)
            results.append((made, torch.rand(2), *torch.autograd.grad(made.sin().sum(), x)))
        same_tree(*results)


def test_scalars_and_empty_dimensions_inside() -> None:
    same_as_eager(lambda x, s: (x * s, s + 1, x[:0], x[:, 3:], s.view(1)), call(tensor(4, 3), torch.tensor(0.3, requires_grad=True)), graphs=1)


def test_nested_results_with_changing_sizes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        q = x + y
        return q, (y * 2, {"z": x.sum(0)}), [q[1:], q.shape[0]]

    same_as_eager(function, *(call(tensor(n, 3), tensor(n, 3, seed=1)) for n in (4, 5, 8)), graphs=1, repeat=1, dynamic=True)


def test_changing_sizes_have_names_in_the_onnx_graph(tmp_path: Path) -> None:
    with on_ort(graphs=1) as ran:
        step = compiled(Mixer(), dynamic=True, options={"dump_dir": str(tmp_path)})
        for batch, length in ((2, 5), (3, 7)):
            step(tensor(batch, length, 8)).sum().backward()
    graph = onnx.load(onnx_files(tmp_path, ran.graphs[0].name)[-1]).graph  # of the forward, if it has its own
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    floats = [value.name for value in graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    (x,) = [shapes[name] for name in floats if len(shapes[name]) == 3]
    batch, length, features = x
    assert isinstance(batch, str) and isinstance(length, str) and batch != length and features == 8
    hidden = [shape for shape in shapes.values() if len(shape) == 3 and shape[2] == 24]
    assert hidden and all(shape == [batch, length, 24] for shape in hidden)


def test_sizes_marked_dynamic_by_the_user() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.cos() / x.shape[0]

    with on_ort(graphs=1, forwards=3):
        step = compiled(function)
        for n in (4, 6, 9):
            x = tensor(n, 3).detach()
            torch._dynamo.mark_dynamic(x, 0)
            same_tree(step(x), function(x))


def test_static_shapes_have_a_graph_each() -> None:
    same_as_eager(lambda x: x.sin(), *(call(tensor(n, 3)) for n in (2, 3, 4)), graphs=3, repeat=1, dynamic=False)


def test_a_dynamic_dropout_draws_eagers_mask() -> None:
    same_as_eager(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)), *(call(tensor(n, 3)) for n in (2, 5, 9)), graphs=1, repeat=1, dynamic=True)


def test_convolution_over_pictures_of_any_size() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    graphs = 1 if TORCH >= MORE_IS_SYMBOLIC else 2
    same_as_eager(model, *(call(tensor(n, 2, s, s)) for n, s in ((3, 8), (4, 12), (5, 17))), graphs=graphs, repeat=1, dynamic=True)


def test_a_marked_size_is_dynamic_from_the_first_compile() -> None:
    compiled = torch.compile(lambda x: (x * 2).tanh().sum(0), backend="ort_training")
    before = len(ort_backend.report().graphs)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * (1 - (x * 2).tanh() ** 2).detach())
    graphs = ort_backend.report().graphs[before:]
    assert [(graph.counts.forward, graph.counts.backward) for graph in graphs] == [(3, 3)]


def test_bits_and_truths_of_sizes() -> None:
    def function(x: torch.Tensor) -> Any:
        n = x.shape[0]
        bits = n | n >> 1
        bits &= bits | (n > 4)
        return x * (n << 2), x + (-n >> 1), x - (n ^ 5), x + (n & 5), x * ((n > 4) + 1), x * ((n > 4) * n), (n > 4) | (bits <= 1), bits % 6

    with on_ort(graphs=range(1, 4)):  # PyTorch guards on some truth values
        step = compiled(function, dynamic=True)
        for n in (3, 5, 9):
            got, want = step(torch.ones(n)), function(torch.ones(n))
            same_tree(got[:6], want[:6])
            assert got[6:] == want[6:] and isinstance(got[6], bool)


@pytest.mark.parametrize("dynamic", [False, True])
def test_operators_on_numbers_alone(dynamic: bool) -> None:
    aten = torch.ops.aten

    def function(x: torch.Tensor, a: float, b: float) -> Any:
        return torch.add(a, b), aten.sub(a, b), torch.mul(b, a), torch.true_divide(a, b), x + 1

    with on_ort():
        step = compiled(function, dynamic=dynamic)
        for a, b in ((4, 3.5), (7, 2), (1.5, 2)):
            same_tree(step(torch.ones(2), a, b), torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2), a, b))
