"""torch.cond: an If of ONNX in the forward and one in the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviours.check import single_session
from ops.trained import check_training, needs_grad
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._higher_order_ops.scan import scan

from ort_backend import graph_report

DYNAMIC = pytest.mark.parametrize("dynamic", [False, True])
TRAINING = pytest.mark.parametrize("training", [True, False])


@DYNAMIC
@TRAINING
def test_branches(training: bool, dynamic: bool) -> None:
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * x.shape[0], lambda x: x.relu() - 1, (x,)) * 2

    for sign in (1, -1):
        others = [(torch.randn(5, 7).requires_grad_(training),)] if dynamic else []
        check_training(branch, (sign * torch.rand(4, 6)).requires_grad_(training), dynamic=dynamic, others=others)


@pytest.mark.parametrize(("dtype", "dynamic"), [(torch.float32, False), (torch.float64, True), (torch.bfloat16, False)])
def test_parameters_of_both_branches(dtype: torch.dtype, dynamic: bool) -> None:
    def branch(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ w, lambda x: (x @ v).tanh(), (x,))

    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5
    for x in (torch.ones(4, 6, dtype=dtype), -torch.ones(4, 6, dtype=dtype)):
        w, v = (needs_grad(6, 7, dtype=dtype) for _ in range(2))
        check_training(branch, x.requires_grad_(), w, v, dynamic=dynamic, rtol=tolerance, atol=tolerance)


@DYNAMIC
@TRAINING
def test_of_what_the_graph_computes(training: bool, dynamic: bool) -> None:
    """Branches read what was computed before them, and their results are computed with; gradients come from and go to what is around them."""

    def branch(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h, mask = torch.tanh(x @ w), x > 0
        a, b = torch.cond(h[0, 0] > 0, lambda h, m: (h * h.exp() * m, h.sum(1)), lambda h, m: ((h - 1) @ w, h.mean(1)), (h, mask))
        c = torch.cond(h[0, 1] > 0, lambda a, h: a.sin() * h, lambda a, h: a - h.cos(), (a, h))
        return torch.softmax(c, -1) * mask, b * b

    for sign in (1, -1):
        x, w = torch.randn(4, 6), torch.eye(6)
        x[0, :2] = torch.tensor([sign, -sign])
        check_training(branch, x.requires_grad_(training), w.requires_grad_(training), dynamic=dynamic)


def test_of_several_results_and_a_nested_one() -> None:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.max() > 1, lambda x: x + 1, lambda x: x * 3, (x,))

    def branch(x: Tensor) -> tuple[Tensor, ...]:
        return torch.cond(x.sum() > 0, lambda x: (inner(x), x.sum()), lambda x: (x * 2, x.mean()), (x,))

    for x in (torch.ones(4, 6), torch.ones(4, 6) * 2, -torch.ones(4, 6)):
        check_training(branch, x.requires_grad_())


@DYNAMIC
def test_whether_a_size_is_large(dynamic: bool) -> None:
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] > 4, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    for rows in (3, 7):
        check_training(branch, needs_grad(rows, 6), dynamic=dynamic)


def test_of_an_argument_itself_and_a_constant() -> None:
    def branch(x: Tensor, c: Tensor) -> Tensor:
        return torch.cond(c, lambda x: x.clone(), lambda x: torch.full_like(x, 2.0) + torch.arange(6.0), (x,))

    for number in (True, False):
        check_training(branch, needs_grad(4, 6), torch.tensor(number))
        check_training(branch, torch.randn(4, 6), torch.tensor([number]))


@single_session
def test_of_layers() -> None:
    """Nothing runs in PyTorch, and nothing that no branch reads is kept for the backward."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return x + torch.cond(h[0, 0] > 0, self.first, self.second, (h,))

    torch._dynamo.reset()
    graph_report.clear()
    model = nn.Sequential(Layer(), Layer(), Layer())
    compiled = torch.compile(model, backend="ort_training", fullgraph=True)
    for _ in range(3):
        x = needs_grad(8, 16)
        got = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
        expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    (graph,) = graph_report.report().graphs
    assert not graph.outside and not graph.python_ops
    assert graph.kept_bytes < 4096


def test_a_branch_inside_a_scan_and_a_scan_inside_a_branch() -> None:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        after = torch.cond(row[0] > 0, lambda c, r: c * 0.5 + r, lambda c, r: torch.tanh(c) - r, (carry, row))
        return after, after * 2

    def inside_scan(first: Tensor, rows: Tensor) -> Any:
        return scan(step, first, rows)

    def inside_branch(first: Tensor, rows: Tensor) -> Any:
        return torch.cond(first[0] > 0, lambda f, r: scan(lambda c, x: (c * 0.5 + x, c.sin()), f, r)[1], lambda f, r: r * 2, (first, rows))

    check_training(inside_scan, torch.randn(3), torch.randn(5, 3))
    for sign in (1, -1):
        check_training(inside_branch, sign * torch.rand(3), torch.randn(5, 3))


@pytest.mark.parametrize("strict", [False, True])
def test_branches_that_need_pytorch(strict: bool) -> None:
    def branch(x: Tensor) -> Tensor:
        h = x.exp()
        return torch.cond(h.sum() > 0, lambda x: x.sin(), lambda x: torch.special.bessel_j0(x), (h,))

    if not strict:
        check_training(branch, torch.randn(4, 6), outside=["cond"])
        return
    with pytest.raises(BackendCompilerFailed, match="cond does not run on ONNX Runtime: in its body, aten::special_bessel_j0"):
        check_training(branch, torch.randn(4, 6), options={"strict": True})


def test_random_branches_draw_as_eager() -> None:
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: x - 1, (x,))

    torch._dynamo.reset()
    x = torch.rand(4, 6)
    torch.manual_seed(3)
    got = torch.compile(branch, backend="ort_training", fullgraph=True)(x)
    torch.manual_seed(3)
    torch.testing.assert_close(got, x * torch.rand_like(x))


def test_a_large_mask_that_a_branch_counts() -> None:
    """What is written in another form where it is read stays as it is, where only a branch reads it."""

    def branch(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(w[0] > 0, lambda x, above: above.sum() * 2, lambda x, above: above[0, 0].clone(), (x, (x > 1).to(torch.int64)))

    for sign in (1, -1):
        check_training(branch, torch.randn(512, 512), torch.full((2,), float(sign)))
