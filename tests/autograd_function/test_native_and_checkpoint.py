"""Functions whose body is machine code on raw pointers, and Functions under both kinds of activation checkpointing."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ort_backend

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Copied(torch.autograd.Function):
    """Copies its input with C's memcpy, which no tracer sees into."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        source, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        _libc.memcpy(out.data_ptr(), source.data_ptr(), x.numel() * x.element_size())
        ctx.save_for_backward(out)
        return out * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return grad * 2 + 0 * out


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def _gradient(function: Any, x: torch.Tensor) -> torch.Tensor:
    x.grad = None
    torch.manual_seed(0)
    function(x).backward()
    assert x.grad is not None
    return x.grad.clone()


@pytest.mark.cpu_only(reason="memory that C reads")
def test_a_body_of_machine_code() -> None:
    layer = torch.nn.Linear(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return Copied.apply(layer(x).relu()).sum()

    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(_gradient(torch.compile(function, backend="ort_training", fullgraph=True), x), _gradient(function, x))
    assert ort_backend.report().graphs[-1].functions == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_a_function(reentrant: bool) -> None:
    layer = torch.nn.Linear(4, 4)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(Square.apply(layer(x)), 0.5)

    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=reentrant).sum()

    before = len(ort_backend.report().graphs)
    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(_gradient(torch.compile(function, backend="ort_training"), x), _gradient(function, x))
    assert sum(graph.functions for graph in ort_backend.report().graphs[before:]) == 1


class Layers(torch.nn.Module):
    """A Function between linear layers, on a reshaped result: ONNX Runtime has that in the memory of another value."""

    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.before = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self.behind = torch.nn.Linear(width, width)
        self.checkpointed = checkpointed

    def block(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        squared = torch.unflatten(Square.apply((layer(x).relu() + 1).flatten(0, 1)), 0, x.shape[:2])
        return x + self.behind(squared).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.checkpointed else self.block(layer, x)
        return x.mean()


@pytest.mark.parametrize(("shape", "checkpointed"), [((2, 3, 4), True), ((2, 256, 256), False)], ids=["checkpointed", "cheap"])
def test_what_the_ctx_holds_is_not_what_the_backward_computes_again(shape: tuple[int, ...], checkpointed: bool) -> None:
    """Nor where the tensor is large and cheap to compute, which needs no checkpoint."""
    model = Layers(shape[-1], checkpointed).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = _gradient(model, x), [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.testing.assert_close((_gradient(torch.compile(model, backend="ort_training"), x), [one.grad for one in model.parameters()]), expected)
