"""Root mean square norms that are written out: one node in the forward and one in the backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import WHOLE_GRAPHS
from default_device import DEVICE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ort_backend
from ort_backend import joint

pytestmark = pytest.mark.skipif(not WHOLE_GRAPHS, reason="the gradient's kernel is onnxruntime-training's")


class Norm(nn.Module):
    """As transformers writes it."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class Block(nn.Module):
    """A residual block, in front of which something else needs a gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.before: nn.Module = nn.Linear(size, size)
        self.norm, self.linear, self.last = Norm(size), nn.Linear(size, size), Norm(size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.last(x + self.linear(self.norm(x)).tanh())


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many norms of each graph."""
    found: list[int] = []
    original = joint.fuse_rms_norms

    def fuse(*args: Any, **kwargs: Any) -> int:
        count = original(*args, **kwargs)
        if not kwargs:
            found.append(0)
        found[-1] += count
        return count

    monkeypatch.setattr(joint, "fuse_rms_norms", fuse)
    return found


def _same(model: nn.Module, *inputs: Tensor, through: Callable[..., Tensor] | None = None) -> None:
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    call = torch.compile(through and (lambda x: through(own, x)) or own, backend="ort_training")
    for x in inputs:
        given = [x.clone().requires_grad_() for _ in range(2)]
        if len(inputs) > 1:
            torch._dynamo.mark_dynamic(given[1], (0, 1))
        expected, found = model(given[0]), call(given[1])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for one in (expected, found):
            one.square().sum().backward()
        torch.testing.assert_close(given[1].grad, given[0].grad, rtol=1e-4, atol=1e-4)
    for parameter, other in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-3)


def test_two_norms_of_a_block(fused: list[int]) -> None:
    torch.manual_seed(0)
    _same(Block(24), torch.randn(3, 5, 24))
    assert fused == [2] and not ort_backend.report().graphs[-1].outside


def test_a_changing_number_of_rows(fused: list[int]) -> None:
    torch.manual_seed(0)
    _same(Block(24), torch.randn(3, 5, 24), torch.randn(2, 7, 24))
    assert fused == [2]


def test_with_every_number_an_input(fused: list[int]) -> None:
    """As `dynamic=True` has it: the epsilon is compiled in, and another one compiles again."""
    model, x = Block(16), torch.randn(4, 16)
    call = torch.compile(model, backend="ort_training", dynamic=True)
    for eps in (1e-6, 0.5, 1e-6):
        model.norm.eps = eps
        for rows in (x, x[1:]):
            torch.testing.assert_close(call(rows), model(rows))
    assert fused == [2, 2]


def test_a_norm_alone_and_one_of_a_matrix(fused: list[int]) -> None:
    torch.manual_seed(0)
    _same(Norm(16), torch.randn(4, 16))
    _same(Norm(16, eps=0.1), torch.randn(2, 2, 2, 16))
    assert fused == [1, 1]


def test_statistics_that_are_read_as_well(fused: list[int]) -> None:
    """And a gradient that comes to the norm itself, in front of the weight."""
    torch.manual_seed(0)

    class Read(Norm):
        def forward(self, x: Tensor) -> Tensor:
            normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * normal + normal.sin()

    _same(Read(8), torch.randn(4, 8))
    assert fused == [0]


def test_other_norms_stay(fused: list[int]) -> None:
    torch.manual_seed(0)

    class OfOthers(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.eps))

    _same(OfOthers(8), torch.randn(4, 8))
    _same(Norm(1 << 15), torch.randn(2, 1 << 15))  # too long for the kernel's sums
    _same(Norm(8), torch.randn(()))
    assert fused == [0, 0, 0] and not ort_backend.report().graphs[-1].outside


def _frozen(model: nn.Module) -> nn.Module:
    """As where others are trained beside a model: its norms have no gradients."""
    for module in model.modules():
        if isinstance(module, Norm):
            module.requires_grad_(False)
    return model


def test_weights_without_gradients(fused: list[int]) -> None:
    torch.manual_seed(0)
    _same(_frozen(Block(24)), torch.randn(3, 5, 24))
    _same(_frozen(Norm(8)), torch.randn(4, 8))
    assert fused == [2, 1] and not ort_backend.report().graphs[-1].outside


def test_a_norm_of_what_has_no_gradient(fused: list[int]) -> None:
    """In front of what is trained; another, of which the weight alone has one, is left."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 16)
    for model, count in ((_frozen(nn.Sequential(Norm(16), nn.Linear(16, 4))), 1), (nn.Sequential(Norm(16), nn.Linear(16, 4)), 0)):
        own = copy.deepcopy(model)
        expected, found = model(x), torch.compile(own, backend="ort_training")(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for one in (expected, found):
            one.square().sum().backward()
        for parameter, other in zip(own.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-4)
        assert fused.pop() == count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [False, True])
def test_half_precision(fused: list[int], dtype: torch.dtype, frozen: bool) -> None:
    """As near to what it is in float32 as eager PyTorch is."""
    torch.manual_seed(0)
    model = Block(24).to(dtype)
    own, wide = _frozen(copy.deepcopy(model)) if frozen else copy.deepcopy(model), copy.deepcopy(model).float()
    x = torch.randn(3, 5, 24, dtype=dtype)
    compiled = torch.compile(own, backend="ort_training")
    results = [run(given) for run, given in ((model, x), (compiled, x), (wide, x.float()))]
    assert results[1].dtype is dtype
    for one in results:
        one.float().square().sum().backward()
    trained = [name for name, parameter in own.named_parameters() if parameter.requires_grad]
    gradients = [[module.get_parameter(name).grad for name in trained] for module in (model, own, wide)]
    assert all(one.dtype is dtype for one in gradients[1])
    for eager, found, exact in zip([results[0], *gradients[0]], [results[1], *gradients[1]], [results[2], *gradients[2]], strict=True):
        error, allowed = ((one.float() - exact).abs().max() for one in (found, eager))
        assert error <= 1.5 * allowed + max(1e-3, torch.finfo(dtype).eps / 4) * exact.abs().max()
    assert fused == [2]


def test_autocast(fused: list[int]) -> None:
    """The first norm is of a product, which is in half precision, and its weight in float32."""
    torch.manual_seed(0)
    model, x = Block(24), torch.randn(3, 5, 24)
    model.before = nn.Sequential(model.before, Norm(24))
    own = copy.deepcopy(model)
    compiled = torch.compile(own, backend="ort_training")
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, found = model(x), compiled(x)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    for one in (expected, found):
        one.square().sum().backward()
    for parameter, other in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0.03, atol=0.03 * float(other.grad.abs().max()))
    assert fused == [3]


def test_a_weight_used_twice_under_autocast(fused: list[int]) -> None:
    """As Zamba's shared blocks are: its gradients are added in front of the cast of the product that the second norm's backward reads."""
    torch.manual_seed(0)
    model, x = Block(24), torch.randn(3, 5, 24)
    model.before = nn.Sequential(model.before, model.norm, nn.Linear(24, 24))
    own = copy.deepcopy(model)
    compiled = torch.compile(own, backend="ort_training")
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, found = model(x), compiled(x)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    for one in (expected, found):
        one.square().sum().backward()
    for parameter, other in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0.05, atol=0.05 * float(other.grad.abs().max()))
    assert fused == [3]


def test_draws_that_nothing_reads_stay(fused: list[int]) -> None:
    """In eager PyTorch what is drawn behind them depends on them."""
    model = Norm(8)

    def call(x: Tensor) -> Tensor:
        torch.rand_like(x)
        return model(x) * torch.rand_like(x)

    x = torch.randn(4, 8, requires_grad=True)
    found = []
    for run in (call, torch.compile(call, backend="ort_training")):
        torch.manual_seed(0)
        found.append((run(x), torch.rand(2)))
    torch.testing.assert_close(found[1], found[0])
    assert fused == [1]


def test_without_gradients(fused: list[int]) -> None:
    torch.manual_seed(0)
    model, x = Block(24), torch.randn(3, 5, 24)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="ort_training")(x), model(x), rtol=1e-4, atol=1e-5)
    assert fused == [2]


def test_a_checkpoint_computes_it_again(fused: list[int]) -> None:
    torch.manual_seed(0)
    _same(Block(24), torch.randn(3, 5, 24), through=lambda model, x: checkpoint(model, x, use_reentrant=False))
    assert fused == [3]  # two in the forward; in the backward the last one's result is not computed again, and it stays


def test_a_root_that_the_backward_alone_reads(fused: list[int]) -> None:
    x = torch.rand(4, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return checkpoint(torch.acosh, x + 2, use_reentrant=False)  # the root of its gradient is written there, and again in the backward

    torch.testing.assert_close(*(torch.autograd.grad(call(x).sum(), x) for call in (torch.compile(step, backend="ort_training"), step)))
    assert fused == [0]
