"""Python nodes take and give tensors as they lie in memory in the trace, where a Transpose in the graph goes away for it."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from behaviours.check import single_session
from torch import Tensor, nn
from torch.nn import functional as F

import ort_backend
from ort_backend.lowering import carriers
from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.kernels import dense_products
from ort_backend.runtime import capabilities

pytestmark = single_session

_library = torch.library.Library("call_orders", "DEF")
_library.define("copied(Tensor x, Tensor y) -> (Tensor, Tensor)", tags=(torch.Tag.flexible_layout,))
_library.define("contiguous(Tensor x) -> Tensor")
_library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_arrived: list[tuple[int, ...]] = []


@torch.library.impl(_library, "copied", "CompositeExplicitAutograd")
def _copied(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    _arrived.extend((x.stride(), y.stride()))
    return x.clone(), y.clone()


@torch.library.impl(_library, "contiguous", "CompositeExplicitAutograd")
def _contiguous(x: Tensor) -> Tensor:
    return (3 * x).contiguous()


@torch.library.impl(_library, "noise", "CompositeExplicitAutograd")
def _noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


torch.library.register_fake("call_orders::copied", lambda x, y: (torch.empty_like(x), torch.empty_like(y)))
torch.library.register_fake("call_orders::noise", torch.empty_like)
torch.library.register_fake("call_orders::contiguous", torch.empty_like)  # which lays its result out otherwise than the operator does
copied, contiguous, noise = torch.ops.call_orders.copied, torch.ops.call_orders.contiguous, torch.ops.call_orders.noise


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[ir.Graph]:
    """The graphs that are lowered."""
    found: list[ir.Graph] = []
    finish = GraphLowering.finish

    def finished(self: GraphLowering) -> object:
        lowered = finish(self)
        found.append(lowered.model.graph)
        return lowered

    monkeypatch.setattr(GraphLowering, "finish", finished)
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of results that had to be copied."""
    made: list[torch.Size] = []
    original = carriers.to_carrier

    def carried(tensor: Tensor) -> Tensor:
        if not tensor.is_contiguous():
            made.append(tensor.shape)
        return original(tensor)

    monkeypatch.setattr(carriers, "to_carrier", carried)
    return made


@pytest.fixture
def no_aten_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the nodes that a GPU would have."""
    monkeypatch.setattr(capabilities, "has_aten_op", lambda: False)


def _transposes(graphs: list[ir.Graph]) -> int:
    return sum(node.op_type == "Transpose" for graph in graphs for node in graph)


def _same(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, backend="ort_training")):
        _arrived.clear()
        with torch.no_grad():
            results.append((call(*inputs), list(_arrived)))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.usefixtures("no_aten_op")
def test_transposes_cancel(graphs: list[ir.Graph], copies: list[torch.Size]) -> None:
    """The operator sees eager's strides, and nothing is permuted or copied."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        a, b = copied(x.relu().permute(1, 2, 0), y.relu())
        return a.permute(2, 0, 1) + b

    _same(function, torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    assert [one.operator for one in ort_backend.report().graphs[-1].outside] == ["call_orders::copied"]
    assert _transposes(graphs) == 0 and copies == []


@pytest.mark.usefixtures("no_aten_op")
def test_a_tensor_that_lies_otherwise_is_not_permuted_for_it(graphs: list[ir.Graph]) -> None:
    """ONNX Runtime has the permuted one already: that it lay otherwise in the trace matters to nobody."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        a, b = copied(x.relu().transpose(0, 1).exp(), y.relu())
        return a @ b

    torch._dynamo.reset()
    x, y = torch.randn(3, 2), torch.randn(3, 4)
    compiled = torch.compile(function, backend="ort_training")
    torch.testing.assert_close(compiled(x, y), function(x, y))
    assert _transposes(graphs) == 1


@pytest.mark.usefixtures("no_aten_op")
def test_a_result_that_does_not_lie_as_its_fake(graphs: list[ir.Graph], copies: list[torch.Size]) -> None:
    _same(lambda x: contiguous(x.relu().permute(1, 2, 0)).permute(2, 0, 1) + 1, torch.randn(2, 3, 4))
    assert _transposes(graphs) == 0 and copies == [(2, 3, 4)]


@pytest.mark.usefixtures("no_aten_op")
def test_complex_and_bool(graphs: list[ir.Graph]) -> None:
    """Their carriers have one dimension more, and another type."""

    def function(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.relu()).transpose(0, 1)
        a, b = copied(z, z.real > 0.5)
        return torch.view_as_real(a.transpose(0, 1)).sum(-1) + b.transpose(0, 1)

    x = torch.randn(3, 4, 2)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend="ort_training")(x), function(x))


@pytest.mark.parametrize("aten", [False, True])
def test_random_numbers_go_where_eager_puts_them(
    graphs: list[ir.Graph], copies: list[torch.Size], monkeypatch: pytest.MonkeyPatch, aten: bool
) -> None:
    monkeypatch.setattr(capabilities, "has_aten_op", lambda: aten)

    def function(x: Tensor) -> Tensor:
        return noise(x.relu().permute(1, 2, 0)).permute(2, 0, 1) * 2

    x = torch.randn(2, 3, 4)
    results = []
    torch._dynamo.reset()
    for call in (function, torch.compile(function, backend="ort_training")):
        torch.manual_seed(0)
        results.append(call(x))
    assert torch.equal(*results)
    assert _transposes(graphs) == 0 and copies == []


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2))


@pytest.mark.cpu_only(reason="the operator of its attention")
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_takes_projections_as_they_are(
    graphs: list[ir.Graph], copies: list[torch.Size], dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, with as many rows as PyTorch computes attention for where its products are fast."""
    monkeypatch.setattr(dense_products, "mkl_is_slow", lambda: False)
    torch._dynamo.reset()
    module, x = _Attention(), torch.randn(2, 1056, 32)
    gradients = []
    for call in (module, torch.compile(module, backend="ort_training", dynamic=dynamic)):
        module.zero_grad()
        call(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-3)
    outside = [one.operator for one in ort_backend.report().graphs[-1].outside]
    assert sorted(outside) == [f"aten::_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")]
    assert not any(len(node.attributes["perm"].as_ints()) == 4 for graph in graphs for node in graph if node.op_type == "Transpose")
    assert copies == []
