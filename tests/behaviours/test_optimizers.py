"""Which of ONNX Runtime's graph optimizers are left out, and for which graphs only."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from behaviours.check import call, same_as_eager
from torch import nn
from torch.utils.checkpoint import checkpoint

from ort_backend.runtime import capabilities, session
from ort_backend.runtime.harmful_optimizers import harmful_optimizers

SIZES = {"large": [1200, 1200], "small": [2, 3], "empty": [0, 3]}


def _expanded(sizes: list[int], *, constant: bool) -> ir.Model:
    """y = x + an Expand: of a constant, or of x itself."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 1]))
    number, shape = (
        ir.Value(name=name, const_value=ir.tensor(np.array(value, dtype)))
        for name, value, dtype in (("number", 0, np.float32), ("shape", sizes, np.int64))
    )
    expand = ir.node("Expand", [number if constant else x, shape])
    expand.outputs[0].type, expand.outputs[0].shape = x.type, ir.Shape(sizes)
    add = ir.node("Add", [x, expand.outputs[0]])
    graph = ir.Graph([x], add.outputs, nodes=[expand, add], initializers=[number, shape], opset_imports={"": 18}, name="expanded")
    return ir.Model(graph, ir_version=9)


@pytest.mark.parametrize(
    ("size", "left_out"), [("large", ["ConstantFolding"]), ("empty", ["NoopElimination"]), ("small", [])], ids=["large", "empty", "small"]
)
def test_a_repeated_constant_counts_and_a_broadcast_tensor_does_not(size: str, left_out: list[str]) -> None:
    assert harmful_optimizers(_expanded(SIZES[size], constant=True)) == left_out
    assert harmful_optimizers(_expanded(SIZES[size], constant=False)) == []


class Checkpointed(nn.Module):
    """The backward computes the blocks again, so that in the forward only the last normalisation reads the sum in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(checkpoint(self.block, x, use_reentrant=False)))


def test_a_checkpointed_sum_in_front_of_a_normalisation() -> None:
    same_as_eager(Checkpointed(), call(torch.randn(2, 4, 8, requires_grad=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_clamp_behind_a_relu(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).mul(4).to(dtype).requires_grad_(dtype.is_floating_point)
    same_as_eager(lambda x: x.relu().clamp(1, 2) * 3, call(x), train=dtype.is_floating_point)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("operator", [torch.mul, torch.div])
def test_a_factor_with_more_dimensions_than_the_product(operator: Callable[..., torch.Tensor], train: bool) -> None:
    x, y = (torch.randn(shape).requires_grad_(train) for shape in ((3, 4), (4, 3)))
    same_as_eager(lambda x, y: operator(x @ y, torch.tensor([[[2.0]]])), call(x, y), train=train)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("operator", [torch.mul, torch.add])
def test_arithmetic_with_a_constant_without_elements(operator: Callable[..., torch.Tensor], train: bool) -> None:
    x, w = torch.randn(2, 0, 8).requires_grad_(train), torch.randn(8, 3)
    same_as_eager(lambda x, w: operator(x, torch.arange(x.shape[1]).float()[:, None]) @ w, call(x, w), train=train)


def _square(x: torch.Tensor) -> torch.Tensor:
    """A product of a transposed tensor with itself, that the backward reads, too."""
    x = x.clone().transpose(0, -1).unsqueeze(0)
    return x.mT @ x * 2


def test_a_transposed_tensor_times_itself(caplog: pytest.LogCaptureFixture) -> None:
    same_as_eager(_square, call(torch.randn(8, 6, requires_grad=True)))
    assert "without its fusions" not in caplog.text


def test_a_fusion_that_is_not_known_to_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Only the training package's fails there."""
    monkeypatch.setattr(session, "harmful_optimizers", lambda *_: [])
    same_as_eager(_square, call(torch.randn(8, 6, requires_grad=True)))
    assert ("without its fusions" in caplog.text) == capabilities.has_training()


def _optimizers(model: nn.Module, x: torch.Tensor, capfd: pytest.CaptureFixture[str]) -> collections.Counter[str]:
    """How often each of ONNX Runtime's graph optimizers went over a model, forward and backward."""
    capfd.readouterr()
    torch.compile(model, backend="ort_training", options={"session_options": {"log_severity_level": 0}})(x).sum().backward()
    return collections.Counter(re.findall(r"GraphTransformer (\w+) modified", capfd.readouterr().err))


def test_optimizers_stop_when_nothing_is_left_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    ran = _optimizers(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4), capfd)
    assert 1 <= ran["ConstantFolding"] <= 6  # ten times in one session, where each time something is marked


def test_optimizers_without_operators_to_look_for_do_not_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert "ConvActivationFusion" not in _optimizers(nn.Linear(4, 4), torch.randn(2, 4), capfd)
    assert "ConvActivationFusion" in _optimizers(nn.Conv2d(1, 2, 3), torch.randn(2, 1, 8, 8), capfd)
