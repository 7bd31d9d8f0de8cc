"""`options={"session_options": {"custom_op_libraries": [...]}}`: operators of shared libraries, through lowerings of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from behaviours.check import single_session

import ort_backend
from ort_backend import CompileOptions, OptionError, graph_report
from ort_backend.lowering import registry
from ort_backend.runtime import capabilities

DOMAIN = "ai.onnx.contrib"


@torch.library.custom_op("extending_library::inverse", mutates_args=())
def inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x)


@inverse.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    # The operator once more, so that it stands behind the YieldOp, too.
    inverted = inverse(ctx.saved_tensors[0]).mT
    return -inverted @ gradient @ inverted


inverse.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))

TARGET = torch.ops.extending_library.inverse.default


@pytest.fixture(scope="module")
def library() -> str:
    """A shared library with operators for ONNX Runtime: onnxruntime-extensions'."""
    return str(pytest.importorskip("onnxruntime_extensions", reason="onnxruntime-extensions is not installed").get_library_path())


@pytest.fixture(params=[(), (f"{DOMAIN}::Inverse",)], ids=["", "requires"])
def lowered(request: Any) -> Iterator[None]:
    """A lowering of the operator that writes a node of the library's."""

    @ort_backend.register_lowering(TARGET, requires=request.param)
    def _(op: Any, x: Any) -> Any:
        """extending_library::inverse(Tensor x) -> Tensor"""
        return op.Inverse(x, _domain=DOMAIN, _version=1)

    yield
    del registry._table[TARGET]


def compare(options: dict[str, Any]) -> graph_report.GraphReport:
    def function(x: torch.Tensor) -> torch.Tensor:
        return inverse(x @ x + torch.eye(3) * 9).sin()

    graph_report.clear()
    x = torch.randn(3, 3, requires_grad=True)
    actual, expected = torch.compile(function, backend="ort_training", options=options)(x), function(x)
    torch.testing.assert_close(actual, expected)
    tangent = torch.randn(3, 3)
    torch.testing.assert_close(torch.autograd.grad(actual, x, tangent), torch.autograd.grad(expected, x, tangent))
    (graph,) = ort_backend.report().graphs
    return graph


@single_session
def test_a_lowering_writes_a_node_of_the_library(library: str, lowered: None, tmp_path: Path) -> None:
    graph = compare({"session_options": {"custom_op_libraries": [library]}, "dump_dir": str(tmp_path), "strict": True})
    assert graph.kind == "training" and graph.python_ops == 0
    (dumped,) = [file for file in tmp_path.glob("*.onnx") if "optimized" not in file.name]
    nodes = list(ir.load(dumped).graph)
    stop = next(i for i, node in enumerate(nodes) if node.op_type == "YieldOp")
    assert [any(node.domain == DOMAIN for node in part) for part in (nodes[:stop], nodes[stop:])] == [True, True]


@single_session
def test_without_the_library_pytorch_runs_the_operator(lowered: None) -> None:
    assert [one.operator for one in compare({}).outside] == ["extending_library::inverse"]


def test_what_the_library_has_is_known_to_the_target_with_it_only(library: str) -> None:
    name = f"{DOMAIN}::Inverse"
    assert name in capabilities.target("CPUExecutionProvider", 18, (library,)).contrib_ops
    assert name not in capabilities.target("CPUExecutionProvider", 18).contrib_ops
    assert f"{DOMAIN}::NotThere" not in capabilities.target("CPUExecutionProvider", 18, (library,)).contrib_ops


@pytest.mark.parametrize("given", [["/not/there.so"], [3], [None]])
def test_a_library_that_is_not_there_is_an_option_error(given: Any) -> None:
    with pytest.raises(OptionError, match="there is no such file"):
        CompileOptions(session_options={"custom_op_libraries": given})


@pytest.mark.parametrize("given", ["/a/path.so", 3])
def test_the_libraries_are_a_list(given: Any) -> None:
    with pytest.raises(OptionError, match="a list of paths"):
        CompileOptions(session_options={"custom_op_libraries": given})


def test_a_library_that_cannot_be_loaded_is_an_option_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.so"
    file.write_text("no library")
    compiled = torch.compile(torch.sin, backend="ort_training", options={"session_options": {"custom_op_libraries": [file]}})
    with pytest.raises(Exception, match="which ONNX Runtime cannot load") as caught:
        compiled(torch.randn(3))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), OptionError)
