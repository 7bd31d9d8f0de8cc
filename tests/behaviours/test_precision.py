"""Autocast, gradient scaling and half precision follow eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from behaviours.check import Ran, call, compiled, on_ort, same_as_eager, same_module, same_tree
from default_device import DEVICE, seeded
from torch import nn

X = torch.randn(8, 4, generator=seeded(0))
HALVES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}, torch.float16: {"rtol": 1e-2, "atol": 1e-2}}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 3))


class Inside(nn.Module):
    """Enters autocast in its forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.net, self.last = net(), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(DEVICE, self.dtype):
            hidden = self.net(x)
            with torch.autocast(DEVICE, enabled=False):
                wide = self.last(hidden.float())
        return hidden, wide


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_inside_the_model(dtype: torch.dtype) -> None:
    same_as_eager(Inside(dtype), call(X), graphs=1, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_around_the_model(dtype: torch.dtype) -> None:
    model = net()
    reference = copy.deepcopy(model)
    with on_ort(graphs=1, forwards=3, backwards=3):
        step = compiled(model)
        for seed in range(3):
            losses = []
            for side in (step, reference):
                torch.manual_seed(seed)
                with torch.autocast(DEVICE, dtype):
                    result = side(X)
                    assert result.dtype == dtype
                    losses.append(result.float().square().mean())
                losses[-1].backward()
            same_tree(*losses, **TOLERANCE[dtype])
            same_module(model, reference, **TOLERANCE[dtype])


def test_autocast_switched_on_and_off_has_a_graph_for_each() -> None:
    model = net().eval()
    reference = copy.deepcopy(model)
    with on_ort(graphs=2, forwards=4):
        step = compiled(model)
        for enabled in (False, True, False, True):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
                results = [side(X) for side in (step, reference)]
            assert results[0].dtype == (torch.bfloat16 if enabled else torch.float32)
            same_tree(*results, **(TOLERANCE[torch.bfloat16] if enabled else {}))
            for result in results:
                result.float().sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_another_width(dtype: torch.dtype) -> None:
    tolerance = TOLERANCE.get(dtype, {"rtol": 1e-9, "atol": 1e-10})
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 3), nn.Softmax(-1))
    same_as_eager(model.to(dtype), call(X.to(dtype).requires_grad_()), graphs=1, **tolerance)


def test_casts_between_widths() -> None:
    def function(x: torch.Tensor) -> Any:
        half = x.half()
        wide = half.float() * 2
        return half, wide, x.bfloat16().double(), x.to(torch.bool), torch.softmax(half, -1, dtype=torch.float32), x.to(torch.int32)

    same_as_eager(function, call(X.clone().requires_grad_()), graphs=1, rtol=1e-3, atol=1e-3)


def test_float16_overflows_where_eager_does() -> None:
    x = torch.tensor([1.0, 300.0, 70000.0, -70000.0], requires_grad=True)
    same_as_eager(lambda x: (x.half(), x.half() * x.half(), x.half().float()), call(x), graphs=1, train=False)


def _scaled_step(runner: Any, optimizer: torch.optim.Optimizer, scaler: Any, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    optimizer.zero_grad()
    loss = runner(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), scaler.get_scale()


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


@DEVICES
def test_a_step_with_infinite_gradients_is_skipped(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    reference = copy.deepcopy(model)
    sides = []
    with on_ort(graphs=1, forwards=4, backwards=4):
        for runner, module in ((compiled(model), model), (reference, reference)):
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
            sides.append((runner, optimizer, scaler))
        scales = []
        for poison in (False, True, False, False):
            x = X.to(device, copy=True)
            if poison:
                x[0, 0] = float("inf")
            before = [p.detach().clone() for p in model.parameters()]
            results = [_scaled_step(*side, x) for side in sides]
            assert results[0][1] == results[1][1]
            scales.append(results[0][1])
            skipped = all(torch.equal(one, other.detach()) for one, other in zip(before, model.parameters(), strict=True))
            assert skipped == poison
            if not poison:
                same_tree(results[0][0], results[1][0])
                same_module(model, reference)
    assert scales == [256.0, 128.0, 128.0, 256.0]


@DEVICES
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_with_a_scaler_and_accumulation(dtype: torch.dtype, device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    reference = copy.deepcopy(model)
    ran: Ran
    with on_ort(graphs=1, forwards=6) as ran:
        sides = [(compiled(model), model), (reference, reference)]
        scalers = [torch.amp.GradScaler(device, init_scale=16.0) for _ in sides]
        optimizers = [torch.optim.SGD(module.parameters(), 0.1) for _, module in sides]
        for step in range(6):
            for (runner, _), scaler, optimizer in zip(sides, scalers, optimizers, strict=True):
                with torch.autocast(device, dtype):
                    loss = (runner(X.to(device) + step) ** 2).mean() / 2
                scaler.scale(loss).backward()
                if step % 2:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            same_module(model, reference, **TOLERANCE[dtype])
    assert ran.python_ops == []


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_on_cuda(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3)).cuda()
    reference = copy.deepcopy(model)
    with on_ort(graphs=1):
        for side in (compiled(model), reference):
            with torch.autocast("cuda", dtype):
                side(X.cuda()).float().square().mean().backward()
    same_module(model, reference, **TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", ["measured", "onnxruntime"])
def test_the_tail_of_a_sigmoid(kernels: str) -> None:
    """Losses take its logarithm: a recommender's of a difference of scores, and BCELoss."""

    def losses(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(x.sigmoid(), torch.ones(4)) - x.sigmoid().log().sum()

    x = torch.tensor([-3.0, -17.0, -26.0, -80.0], requires_grad=True)
    results = []
    with on_ort(graphs=1):
        for side in (losses, compiled(losses, options={"kernels": kernels})):
            loss = side(x)
            results.append((loss.detach(), *torch.autograd.grad(loss, x)))
    same_tree(*results, rtol=1e-5, atol=1e-6)
