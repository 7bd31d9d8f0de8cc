"""PyTorch's kernels inside a session on the CPU: nodes that ONNX Runtime has for PyTorch's own operators, which hold nothing while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from behaviours.check import compiled, on_ort, same_tree, single_session
from behaviours.operators import BOTH, Cubed, cube
from default_device import DEVICE, on_this_thread
from torch_version import THREADS_CRASH

from ort_backend.runtime import capabilities

pytestmark = single_session

_during: list[Callable[[], Any]] = []


def _meeting(x: torch.Tensor) -> torch.Tensor:
    for one in _during:
        one()
    return x + 1


# Not by `custom_op`, inside which Dynamo is off.
torch.library.define("behaviours::meeting", "(Tensor x) -> Tensor")
torch.library.impl("behaviours::meeting", ("CPU", "CUDA"), _meeting)
torch.library.register_fake("behaviours::meeting", torch.empty_like)
meeting = torch.ops.behaviours.meeting


@torch.library.custom_op("behaviours::many", mutates_args=())
def many(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x * (i + 1) for i, x in enumerate(xs)]


many.register_fake(lambda xs: [torch.empty_like(x) for x in xs])


@pytest.fixture
def during() -> Any:
    """What `meeting` calls."""
    yield _during
    _during.clear()


def _nodes(folder: Path) -> list[onnx.NodeProto]:
    (path,) = (path for path in folder.glob("*.onnx") if "optimized" not in path.name)
    return list(onnx.load(path).graph.node)


@pytest.mark.cpu_only(reason="ATen nodes")
def test_they_are_aten_nodes_and_users_functions_python_ops(tmp_path: Path) -> None:
    assert capabilities.has_aten_op()
    x = torch.rand(4).requires_grad_()
    with on_ort(graphs=1, python_ops=BOTH):
        compiled(lambda x: Cubed.apply(cube(x)).sum(), options={"dump_dir": tmp_path})(x).backward()
    torch.testing.assert_close(x.grad, 9 * x.detach() ** 8)
    nodes = _nodes(tmp_path)
    found = sorted(node.op_type for node in nodes if node.op_type in ("ATen", "PythonOp", "PythonOpGrad"))
    assert found == ["ATen", "ATen", "PythonOp", "PythonOpGrad"]
    called = [next(a.s.decode() for a in node.attribute if a.name == "operator") for node in nodes if node.op_type == "ATen"]
    assert [name.split("#")[0] for name in called] == BOTH


def test_more_tensors_than_most_operators_have() -> None:
    xs = [torch.rand(3) for _ in range(300)]
    with on_ort(graphs=1, python_ops=["behaviours::many"]):
        same_tree(compiled(lambda xs: many([x + 1 for x in xs]))(xs), [(x + 1) * (i + 1) for i, x in enumerate(xs)])


def test_a_compiled_function_runs_inside_on_onnx_runtime(during: list[Callable[[], Any]]) -> None:
    found: list[torch.Tensor] = []
    x = torch.rand(5)
    with on_ort(graphs=None, python_ops=None) as ran:
        inner, outer = compiled(lambda x: cube(x) * 2), compiled(lambda x: meeting(x) * 3)
        during.append(lambda: found.append(inner(torch.full((5,), 2.0, device=DEVICE))))
        for _ in range(3):
            torch.testing.assert_close(outer(x), (x + 1) * 3)
    same_tree(found, [torch.full((5,), 16.0)] * 3)
    assert sum(graph.counts.forward for graph in ran.graphs) == 6 and not any(graph.counts.eager for graph in ran.graphs)


@THREADS_CRASH
def test_two_threads_are_inside_at_once(during: list[Callable[[], Any]]) -> None:
    """Each waits in the middle of its session for the other."""
    step = compiled(lambda x: meeting(x.sin()) * 2)
    x = torch.rand(5)
    step(x)
    barrier = threading.Barrier(2)
    during.append(lambda: barrier.wait(60))
    results: list[torch.Tensor] = []

    def run() -> None:
        with on_this_thread():
            results.append(step(x))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    same_tree(results, [(x.sin() + 1) * 2] * 2)
