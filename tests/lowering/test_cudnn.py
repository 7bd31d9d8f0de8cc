"""cuDNN's recurrent layers in a graph, with stand-ins for the kernels, which need a device (`test_recurrent.py --device cuda`)."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ort_backend
from ort_backend.lowering.kernels import cudnn

_WHOLE: dict[int, Any] = {cudnn.LSTM: torch.lstm, cudnn.GRU: torch.gru, cudnn.TANH: torch.rnn_tanh, cudnn.RELU: torch.rnn_relu}


def _run(x: Tensor, weights: Sequence[Tensor], hx: Tensor, cx: Tensor | None, mode: int) -> list[Tensor]:
    states = hx if cx is None else [hx, cx]
    return list(_WHOLE[mode](x, states, weights, len(weights) == 4, 1, 0.0, True, False, False))


def _forward(x: Tensor, weights: Sequence[Tensor], stride: int, packed: None, hx: Tensor, cx: Tensor | None, mode: int, *shape: Any) -> Any:
    assert stride == len(weights) and packed is None and shape[:4] == (hx.shape[-1], 0, 1, False)
    made = _run(x, weights, hx, cx, mode)
    given = torch.cat([one.flatten() for one in weights]) if shape[5] else x.new_empty(0)
    return made[0], made[1], made[2] if cx is not None else torch.empty(0), torch.ones(7, dtype=torch.uint8), given


def _backward(
    x: Tensor, weights: Sequence[Tensor], stride: int, packed: Tensor, hx: Tensor, cx: Tensor | None, y: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    grads, mode, reserve, wanted = rest[:3], rest[3], *rest[-2:]
    assert wanted == [True, True, cx is not None, True]  # as the kernel asserts
    assert reserve.shape == (7,) and packed.numel() == sum(one.numel() for one in weights)
    leaves = [one.detach().requires_grad_() for one in (x, hx, *([] if cx is None else [cx]), *weights)]
    states = 1 if cx is None else 2

    def differentiate() -> tuple[Tensor, ...]:
        made = _run(leaves[0], leaves[1 + states :], leaves[1], leaves[2] if cx is not None else None, mode)
        torch.testing.assert_close(made[0], y)
        return torch.autograd.grad(made, leaves, [one for one in grads if one is not None])

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # where nothing keeps autograd off, as inside a kernel
        found = pool.submit(differentiate).result()
    return found[0], found[1], found[2] if cx is not None else None, list(found[1 + states :])


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    default = SimpleNamespace
    kernels = SimpleNamespace(_cudnn_rnn=default(default=_forward), _cudnn_rnn_backward=default(default=_backward))
    monkeypatch.setattr(cudnn, "aten", kernels)
    monkeypatch.setattr(cudnn, "is_for", lambda *tensors: True)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "relu"])
def test_layers_equal_eager(kind: str, options: dict[str, Any]) -> None:
    model: Any = nn.RNN(4, 6, nonlinearity="relu", **options) if kind == "relu" else getattr(nn, kind)(4, 6, **options)
    x = torch.randn(3, 5, 4, requires_grad=True)
    before = len(ort_backend.report().graphs)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(model, backend="ort_training", fullgraph=True)
        results = []
        for call in (compiled, model):
            y, finals = call(x)
            finals = finals if isinstance(finals, tuple) else (finals,)
            loss = y.square().sum() + sum(one.sin().sum() for one in finals)
            results.append([y, *finals, *torch.autograd.grad(loss, [x, *model.parameters()])])
    torch.testing.assert_close(*results)
    outside = {one.operator for graph in ort_backend.report().graphs[before:] for one in graph.outside}
    assert {"ort_training::cudnn_layer", "ort_training::cudnn_layer_backward"} <= outside


def test_without_gradients() -> None:
    model = nn.GRU(4, 6).eval()
    x = torch.randn(3, 5, 4)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        torch.testing.assert_close(torch.compile(model, backend="ort_training", fullgraph=True)(x), model(x))
