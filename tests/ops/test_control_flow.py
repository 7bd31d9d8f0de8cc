"""while_loop: one PythonOp in the forward and one in the backward. scan and map: Scans of ONNX."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviours.check import single_session
from ops.trained import check_training, needs_grad
from torch._dynamo.exc import BackendCompilerFailed
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch_version import TELLS_ALIASES, TORCH

from ort_backend import graph_report

DYNAMIC = pytest.mark.parametrize("dynamic", [False, True])
LIKE_TRAINING = pytest.mark.parametrize("training", [True, False])


def _input(training: bool, *size: int) -> torch.Tensor:
    return torch.randn(*size).requires_grad_(training)


def _others(dynamic: bool, training: bool, *size: int) -> list[Any]:
    return [(_input(training, *size),)] if dynamic else []


@DYNAMIC
def test_while_loop(dynamic: bool) -> None:
    def loop(x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (torch.tensor(0), x))

    check_training(loop, torch.randn(4, 6), dynamic=dynamic, others=_others(dynamic, False, 5, 7), outside=["while_loop"])


def test_gradient_of_a_while_loop() -> None:
    def loop(x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (torch.tensor(0), x))[1]

    check_training(loop, needs_grad(4, 6), outside=["while_loop", "while_loop_stack_output"])


def _decay(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return carry * 0.5 + row, (carry + row).clone()


def _cell(carry: torch.Tensor, row: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, Any]:
    gate = torch.sigmoid(row @ w + carry @ u)
    after = (1 - gate) * carry + gate * torch.tanh(row @ w)
    return after, (after * 1.5, gate.sum(-1))


@DYNAMIC
@LIKE_TRAINING
@pytest.mark.parametrize("reverse", [False, True])
def test_scan(training: bool, dynamic: bool, reverse: bool) -> None:
    def steps(first: torch.Tensor, rows: torch.Tensor) -> Any:
        return scan(_decay, first, rows, reverse=reverse)

    others = [(_input(training, 4), _input(training, 6, 4))] if dynamic else []
    check_training(steps, _input(training, 3), _input(training, 5, 3), dynamic=dynamic, others=others)


@DYNAMIC
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scan_of_a_cell_with_weights(dtype: torch.dtype, dynamic: bool) -> None:
    def steps(first: torch.Tensor, rows: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Any:
        return scan(lambda carry, row: _cell(carry, row, w, u), first, rows)

    def given(length: int) -> list[torch.Tensor]:
        return [needs_grad(*size, dtype=dtype) for size in ((3, 4), (length, 3, 4), (4, 4), (4, 4))]

    tolerance = 0.1 if dtype is torch.bfloat16 else 1e-5
    check_training(steps, *given(7), dynamic=dynamic, others=[given(5)] if dynamic else [], rtol=tolerance, atol=tolerance)


def test_scan_of_several_states_along_another_dimension() -> None:
    def step(state: Any, rows: Any) -> Any:
        (a, b), (x, y) = state, rows
        after = torch.sigmoid(a + x) * 2  # as its own backward would read a result, PyTorch takes it for an alias
        return (after, b * 0.9 + y.mean()), {"first": (after + b.unsqueeze(-1))[:, 1:], "second": after.amax(-1)}

    def steps(first: torch.Tensor, rows: torch.Tensor) -> Any:
        return scan(step, (first, first.sum(-1)), (rows, rows * 2), dim=1)

    check_training(steps, needs_grad(3, 4), needs_grad(3, 6, 4))


def test_scan_inside_scan() -> None:
    def steps(first: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> Any:
        def row(carry: torch.Tensor, row: torch.Tensor) -> Any:
            last, kept = scan(_decay, carry[0], row)
            return torch.tanh(carry @ w + kept), last.clone()

        return scan(row, first, rows)

    check_training(steps, needs_grad(3, 4), needs_grad(5, 3, 4), needs_grad(4, 4))


@pytest.mark.parametrize("strict", [False, True])
def test_bodies_that_need_pytorch(strict: bool) -> None:
    def steps(first: torch.Tensor, rows: torch.Tensor) -> Any:
        return scan(lambda carry, row: (torch.special.bessel_j0(carry) + row, row.clone()), first, rows)

    given = torch.randn(3), torch.randn(5, 3)
    if not strict:
        check_training(steps, *given, outside=["scan"])
        return
    with pytest.raises(BackendCompilerFailed, match="scan does not run on ONNX Runtime: in its body, aten::special_bessel_j0"):
        check_training(steps, *given, options={"strict": True})


@single_session
@pytest.mark.parametrize("strict", [False, True])
def test_bodies_that_pytorch_is_faster_at(strict: bool) -> None:
    def steps(first: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> Any:
        return scan(lambda h, x: (torch.sigmoid(torch.nn.functional.conv2d(h, w, padding=1) + x) * 2, h * 2), first, rows)

    given = needs_grad(8, 64, 16, 16), needs_grad(2, 8, 64, 16, 16), (torch.randn(64, 64, 3, 3) / 24).requires_grad_()
    options = {"strict": True} if strict else {}
    check_training(steps, *given, options=options, outside=[] if strict else ["scan"], rtol=1e-3, atol=1e-3)


@LIKE_TRAINING
def test_map(training: bool) -> None:
    check_training(lambda rows: map_over(lambda row: row.sin() * 2, rows), _input(training, 5, 3))


@LIKE_TRAINING
def test_map_with_what_all_rows_read(training: bool) -> None:
    check_training(lambda rows, w: map_over(lambda row, w: torch.softmax(row @ w, -1), rows, w), _input(training, 5, 3), _input(training, 3, 3))


@pytest.mark.skipif(TORCH < TELLS_ALIASES, reason="PyTorch refuses it")
def test_what_the_backward_of_a_scan_reads_of_all_steps_is_not_kept_for_each() -> None:
    """A weight of 4 MB in 8 steps: its transpose would be kept 8 times."""
    first, rows, w = torch.zeros(2, 1024), torch.randn(8, 2, 1024), (torch.randn(1024, 1024) / 32).requires_grad_()

    def steps(first: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> Any:
        return scan(lambda h, x: (torch.sigmoid(h @ w + x) * 2, h * 2), first, rows)

    check_training(steps, first, rows, w)
    assert max(graph.kept_bytes for graph in graph_report.report().graphs) < 4 * 2**20


def test_associative_scan_is_taken_apart() -> None:
    check_training(lambda rows: associative_scan(lambda a, b: a * b, rows, 0, combine_mode="generic"), torch.randn(5, 3))
