"""The gradient of logits in bfloat16 on a CUDA device: eager's numbers, and where it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ort_backend.lowering.kernels.logit_gradients import BFLOAT16_LOGIT_GRADIENT, bfloat16_logit_gradient
from ort_backend.lowering.passes.cross_entropy import fuse_cross_entropy

aten = torch.ops.aten
HALF = torch.bfloat16


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [0, 3, 7])
def test_numbers(reduction: int, weighted: bool, ignored: int) -> None:
    logits = torch.randn(7, 50) * 4
    logits[3, 2] = float("-inf")
    target = torch.randint(0, 50, (7,))
    logits[0, target[0]] = 30.0  # all but certain: what is left of 1 is to be seen
    target[7 - ignored :] = -100
    weight = torch.rand(50) + 0.5 if weighted else None
    probabilities = logits.log_softmax(1)
    loss, total_weight = aten.nll_loss_forward(probabilities, target, weight, reduction, -100)
    arguments = torch.linspace(-1, 2, loss.numel()).reshape(loss.shape), probabilities, target, weight, reduction, -100, total_weight
    wanted = aten._log_softmax_backward_data(aten.nll_loss_backward(*arguments), probabilities, 1, torch.float32).to(HALF)
    found = bfloat16_logit_gradient(*arguments)
    assert found.dtype is HALF
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-37)
    at_target = target.clamp(min=0).unsqueeze(1)
    torch.testing.assert_close(found.gather(1, at_target), wanted.gather(1, at_target), rtol=2**-8, atol=1e-37)


def _graph(function: Callable[..., Any], device: str, *inputs: tuple[tuple[int, ...], torch.dtype]) -> torch.fx.Graph:
    with FakeTensorMode() as mode:
        given = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in inputs]
        made: torch.fx.GraphModule = make_fx(function, tracing_mode="real")(*given)
    del mode
    return made.graph


# PyTorch's rule for fake tensors knows float16 alone; the kernel takes bfloat16 as well.
_log_softmax = torch.library.custom_op(
    "ort_training_tests::log_softmax", lambda logits: logits.log_softmax(1, torch.float32), mutates_args=(), schema="(Tensor x) -> Tensor"
)
_log_softmax.register_fake(lambda logits: torch.empty_like(logits, dtype=torch.float32))


def _under_autocast(gradient: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> Any:
    """As autograd writes it where `log_softmax` reads bfloat16 and gives float32."""
    output = _log_softmax(logits)
    loss, total_weight = aten.nll_loss_forward.default(output, target, None, 1, -100)
    likelihood = aten.nll_loss_backward.default(gradient, output, target, None, 1, -100, total_weight)
    return loss, aten._log_softmax_backward_data.default(likelihood, output, 1, logits.dtype)


def _cast_before(gradient: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> Any:
    """As transformers' language models do: `logits.float()`, seen as rows."""
    output = aten._log_softmax.default(aten._to_copy.default(logits, dtype=torch.float32).view(12, 50), 1, False)
    loss, total_weight = aten.nll_loss_forward.default(output, target, None, 1, -100)
    likelihood = aten.nll_loss_backward.default(gradient, output, target, None, 1, -100, total_weight)
    of_rows = aten._log_softmax_backward_data.default(likelihood, output, 1, torch.float32)
    return loss, aten._to_copy.default(of_rows.view(3, 4, 50), dtype=logits.dtype)


CALLS = {
    "autocast": (_under_autocast, (12, 50)),
    "cast": (_cast_before, (3, 4, 50)),
}


@pytest.mark.parametrize("kind", CALLS)
def test_where_it_is_written(kind: str) -> None:
    function, shape = CALLS[kind]
    graph = _graph(function, "cuda", ((), torch.float32), (shape, HALF), ((12,), torch.int64))
    assert fuse_cross_entropy(graph) == 1
    graph.lint()
    (made,) = graph.find_nodes(op="call_function", target=BFLOAT16_LOGIT_GRADIENT)
    assert made.meta["val"].dtype is HALF and made.meta["val"].shape == (12, 50)
    result = graph.output_node().args[0][1]  # type: ignore[index,union-attr]
    assert result.meta["val"].dtype is HALF and result.meta["val"].shape == shape  # type: ignore[union-attr]
    assert not graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default)


def test_where_it_is_not() -> None:
    """In float16, whose small numbers a probability may be below before it is multiplied; of float32; on the CPU; where float32 is read, too."""
    rows, targets = (12, 50), ((12,), torch.int64)
    for function, device, dtype in ((_under_autocast, "cuda", torch.float16), (_cast_before, "cuda", torch.float32), (_cast_before, "cpu", HALF)):
        shape = (3, 4, 50) if function is _cast_before else rows
        graph = _graph(function, device, ((), torch.float32), (shape, dtype), targets)
        fuse_cross_entropy(graph)
        assert not graph.find_nodes(op="call_function", target=BFLOAT16_LOGIT_GRADIENT)

    def read_twice(*given: torch.Tensor) -> Any:
        output = aten._log_softmax.default(given[1].float(), 1, False)
        loss, total_weight = aten.nll_loss_forward.default(output, given[2], None, 1, -100)
        gradient = aten._log_softmax_backward_data.default(
            aten.nll_loss_backward.default(given[0], output, given[2], None, 1, -100, total_weight), output, 1, torch.float32
        )
        return gradient.to(HALF), F.relu(gradient)

    graph = _graph(read_twice, "cuda", ((), torch.float32), (rows, HALF), targets)
    assert fuse_cross_entropy(graph) == 1 and not graph.find_nodes(op="call_function", target=BFLOAT16_LOGIT_GRADIENT)


@pytest.mark.parametrize("reduction", [0, 1])
def test_by_onnxruntime(lower: Callable[..., Any], reduction: int) -> None:
    """Where the user wants its kernels."""
    output, target = torch.randn(7, 20).log_softmax(1), torch.randint(0, 20, (7,))
    gradient = torch.randn(7) if reduction == 0 else torch.tensor(2.0)

    def function(*given: torch.Tensor) -> torch.Tensor:
        return BFLOAT16_LOGIT_GRADIENT(given[0], given[1], given[2], None, reduction, -100, given[3]).float()

    inputs = gradient, output, target, torch.tensor(7.0)
    torch.testing.assert_close(lower(function, inputs)(*inputs)[0], function(*inputs), rtol=2**-7, atol=0)
