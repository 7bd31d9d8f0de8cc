"""Lowers a traced function on its own, without the rest of the backend, and runs it in a plain session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.lowered import NotOnOrt
from ort_backend.lowering.tracing.decompositions import table
from ort_backend.runtime import capabilities
from ort_backend.runtime.session import Program, Session, SessionConfig

tree_leaves = torch.utils._pytree.tree_leaves


def _provider() -> str:
    """Asked when a test runs: pytest may import this file before `--device` has set PyTorch's default device."""
    return "CUDAExecutionProvider" if torch.get_default_device().type == "cuda" else "CPUExecutionProvider"


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A traced function and the session that runs it."""

    graph: torch.fx.Graph
    model: ir.Model
    session: Session
    outputs: list[Any]  # a slot for each result: its name, or the number that it is

    @property
    def op_types(self) -> list[str]:
        return [node.op_type for node in self.model.graph]

    def __call__(self, *inputs: Any) -> list[torch.Tensor | None]:
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        tensors = [name for name, node in zip(self.session.inputs, placeholders) if isinstance(node.meta["val"], torch.Tensor)]
        feeds = {name: tensor.detach().contiguous().cpu().numpy() for name, tensor in zip(tensors, leaves, strict=True)}
        got = self.session.open().run([name for name in self.outputs if name is not None], feeds, None)
        results = iter(got)
        return [None if name is None else torch.from_numpy(np.asarray(next(results))) for name in self.outputs]


def _fakes(inputs: tuple[Any, ...], also: tuple[Any, ...]) -> list[Any]:
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(one: Any, other: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        sizes = [DimDynamic.STATIC if a == b else DimDynamic.DUCK for a, b in zip(one.shape, other.shape)]
        return mode.from_tensor(one, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    return [fake(one, other) for one, other in zip(inputs, also)]


def lower(function: Callable[..., Any], inputs: tuple[Any, ...], *, also: tuple[Any, ...] | None = None, contrib: bool = True) -> Lowered:
    """Traces `function(*inputs)`, functionalised and decomposed as the backend does it, and lowers the graph. No PythonOps.

    Args:
        function: What to trace; may compute gradients inside.
        inputs: Its arguments.
        also: Arguments of other sizes: those that differ are symbolic in the graph.
        contrib: Whether operators outside ONNX may be used.
    """
    functional = torch.func.functionalize(lambda *args: function(*args), remove="mutations")
    with enable_python_dispatcher():
        traced = make_fx(functional, decomposition_table=table(), tracing_mode="fake")(*_fakes(inputs, inputs if also is None else also))
    traced.graph.eliminate_dead_code()
    provider = _provider()
    target = dataclasses.replace(capabilities.target(provider, 18), python_op=False)
    if not contrib:
        target = dataclasses.replace(target, contrib_ops=frozenset())
    lowering = GraphLowering(target, "test")
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            lowering.add_input(node, node.name)
    names: list[str | None] = []
    with torch.device("cpu"):  # as in a compile, during which Dynamo has the user's default device off
        try:
            lowering.run(node for node in traced.graph.nodes if node.op in ("call_function", "get_attr"))
        except NotOnOrt as reason:
            if provider == "CPUExecutionProvider":
                raise
            pytest.skip(f"PyTorch runs it on a device: {reason}")
        for node in tree_leaves(traced.graph.output_node().args[0]):
            if node is None:
                names.append(None)
                continue
            value = lowering.fresh(lowering.value(node), node.meta["val"])
            lowering.add_output(value)
            names.append(str(value.name))
        model = lowering.finish().model
    return Lowered(traced.graph, model, Session(Program.of(model, provider), SessionConfig(provider=provider), {}), names)


def compare(actual: Any, expected: Any, rtol: float, atol: float) -> None:
    """Results against eager's; None exactly where eager has None."""
    actual, expected = list(actual), tree_leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        assert (a is None) == (e is None), f"{a} for {e}"
        if e is not None:
            torch.testing.assert_close(a.cpu(), e.detach().contiguous().cpu(), rtol=rtol, atol=atol, equal_nan=True)


def check(
    function: Callable[..., Any], *inputs: Any, also: tuple[Any, ...] | None = None, contrib: bool = True, rtol: float = 1e-4, atol: float = 1e-5
) -> Lowered:
    """Compares a lowered function with eager, with static sizes and with symbolic ones.

    Args:
        function: The function.
        inputs: Its arguments.
        also: Arguments of other sizes for the graph with symbolic ones.
        contrib: Whether operators outside ONNX may be used.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
    """
    lowered = lower(function, inputs, contrib=contrib)
    compare(lowered(*inputs), function(*inputs), rtol, atol)
    if also is not None:
        dynamic = lower(function, inputs, also=also, contrib=contrib)
        for arguments in (inputs, also):
            compare(dynamic(*arguments), function(*arguments), rtol, atol)
    return lowered


@pytest.fixture(name="check", scope="session")
def _check() -> Callable[..., Lowered]:
    return check


@pytest.fixture(name="lower", scope="session")
def _lower() -> Callable[..., Lowered]:
    return lower


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[int]]]:
    """Makes a pass count what it returns: `counted("index_rows", row_indices.index_rows, simplify, regions)`, with the modules that call it."""

    def count(name: str, run: Callable[..., int], *modules: Any) -> list[int]:
        counts: list[int] = []

        def counting(graph: torch.fx.Graph, *others: Any) -> int:
            counts.append(run(graph, *others))
            graph.lint()
            return counts[-1]

        for module in modules:
            monkeypatch.setattr(module, name, counting)
        return counts

    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield count
