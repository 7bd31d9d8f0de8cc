"""nn.LSTMCell and nn.GRUCell against eager, and their shapes on CUDA, where PyTorch has operators of their own for them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from behaviours.check import call, same_as_eager
from default_device import seeded
from torch import nn
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ort_backend.lowering.tracing import recurrent_layers
from ort_backend.lowering.tracing.composites import replaced_kernel

aten = torch.ops.aten


class Steps(nn.Module):
    """Two steps of a cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.cell(x, self.cell(x))
        return state if isinstance(state, torch.Tensor) else torch.cat(state, 1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_cells_equal_eager(cell: Callable[..., nn.Module], bias: bool, dynamic: bool) -> None:
    x = torch.randn(3, 4, generator=seeded(0)).requires_grad_()
    (graph,) = same_as_eager(Steps(cell(4, 6, bias=bias)), call(x), graphs=1, dynamic=dynamic).graphs
    assert graph.outside == ()


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_another_backend_has_pytorchs_cells(cell: Callable[..., nn.Module]) -> None:
    model, x = Steps(cell(4, 6)), torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize(("target", "gates"), [(aten.lstm_cell.default, 4), (aten.gru_cell.default, 3)])
def test_dynamo_knows_the_shape_of_a_cells_state_on_cuda(target: torch._ops.OpOverload, gates: int) -> None:
    """PyTorch's own way, on CUDA, is through an operator that has no shape function for a GRU's cell (torch 2.13): a break in the graph."""
    key = DispatchKey.CompositeImplicitAutograd
    for_us = functools.partial(recurrent_layers._either, lambda: True, *target.py_kernels[key].args[1:])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    batch = mode.from_tensor(torch.empty(5, 4), symbolic_context=context, source=ConstantSource("x")).shape[0]
    with mode, enable_python_dispatcher(), replaced_kernel(target, key, for_us):
        x, state, w_ih, w_hh = (torch.empty(shape, device="cuda:0") for shape in ((batch, 4), (batch, 6), (gates * 6, 4), (gates * 6, 6)))
        results = target(x, [state, state], w_ih, w_hh) if gates == 4 else (target(x, state, w_ih, w_hh),)
    assert all(one.shape == (batch, 6) and one.device.type == "cuda" for one in results)
