"""Runs code in eager PyTorch and compiled, and compares everything that a user can see; asserts that ONNX Runtime did the work."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from default_device import ON_CPU, random_state, seeded
from torch import nn

import ort_backend
from ort_backend.graph_report import GraphReport
from ort_backend.runtime import capabilities

# Without training kernels (the package `onnxruntime`) forward and backward have sessions of their own, with PyTorch between them.
WHOLE_GRAPHS = capabilities.has_training() and capabilities.has_python_op()
single_session = pytest.mark.skipif(not WHOLE_GRAPHS, reason="about forward and backward in one session, which needs onnxruntime-training")

RTOL, ATOL = 1e-4, 1e-5


def compiled(function: Any, **settings: Any) -> Any:
    """`torch.compile` with this backend; a graph break is an error unless `fullgraph=False` is given."""
    return torch.compile(function, backend="ort_training", **{"fullgraph": True, **settings})


@contextlib.contextmanager
def refused(kind: type[Exception], match: str) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Asserts that the compile inside fails with this package's error `kind`, in the wrapping that Dynamo gives to a backend's errors."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=match) as caught:
        yield caught
    assert isinstance(caught.value.inner_exception, kind)


def onnx_files(folder: Path, name: str) -> list[Path]:
    """The graphs of one compile that `dump_dir` has, as lowered: one, or those of forward and backward."""
    return sorted(path for path in folder.glob(f"{name}.*onnx") if not path.name.endswith(".optimized.onnx"))


@dataclasses.dataclass
class Ran:
    """The graphs that were compiled inside `on_ort`."""

    graphs: list[GraphReport] = dataclasses.field(default_factory=list)

    def of(self, kind: str) -> list[GraphReport]:
        return [graph for graph in self.graphs if graph.kind == kind]

    @property
    def forwards(self) -> int:
        return sum(graph.counts.forward for graph in self.graphs)

    @property
    def backwards(self) -> int:
        return sum(graph.counts.backward for graph in self.graphs)

    @property
    def python_ops(self) -> list[str]:
        return sorted({one.operator for graph in self.graphs for one in graph.outside if not one.is_choice})


@contextlib.contextmanager
def on_ort(
    *,
    graphs: int | range | None = None,
    forwards: int | None = None,
    backwards: int | None = None,
    python_ops: Sequence[str] | None = (),
    idle: bool = False,
) -> Iterator[Ran]:
    """Forgets all compiled code; asserts, at its end, that graphs compiled inside ran in ONNX Runtime, and left just `python_ops` to PyTorch.

    Args:
        graphs: How many were compiled.
        forwards: How often all of them ran forward. None: at least once each.
        backwards: Likewise backward. None: at least once for each training graph.
        python_ops: The operators that PyTorch runs for want of a lowering or kernel. None: any.
        idle: Whether a compiled graph may have no backward run.
    """
    torch._dynamo.reset()
    before = {graph.name for graph in ort_backend.report().graphs}
    ran = Ran()
    yield ran
    ran.graphs = [graph for graph in ort_backend.report().graphs if graph.name not in before]
    assert ran.graphs, "nothing was compiled: everything ran in eager PyTorch"
    if graphs is not None:
        assert len(ran.graphs) in (graphs if isinstance(graphs, range) else [graphs]), [graph.summary() for graph in ran.graphs]
    assert python_ops is None or ran.python_ops == sorted(python_ops), [graph.outside for graph in ran.graphs]
    for graph in ran.graphs:
        assert graph.sessions > 0 or graph.outside or graph.functions or graph.onnx_nodes == 0, f"{graph.name} has no session"
        assert graph.counts.forward > 0 and graph.counts.eager == 0, f"{graph.name}: {graph.counts}"
        assert idle or graph.kind == "inference" or graph.counts.backward > 0, f"{graph.name} never ran backward"
    assert forwards is None or ran.forwards == forwards
    assert backwards is None or ran.backwards == backwards


def if_on_cuda(*operators: str) -> Sequence[str] | None:
    """For `python_ops`: nothing on the CPU; on a CUDA device these, for which onnxruntime-training 1.19.2 has no kernel there (others may: any)."""
    return () if ON_CPU else operators if capabilities.has_training() else None


@dataclasses.dataclass
class Call:
    """One call: its arguments, and the tensors in them in order."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def call(*args: Any, **kwargs: Any) -> Call:
    """The arguments of one call."""
    return Call(args, kwargs)


def tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists, dicts and objects with attributes, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [one for value in tree.values() for one in tensors(value)]
    if isinstance(tree, (tuple, list)):
        return [one for value in tree for one in tensors(value)]
    if hasattr(tree, "__dict__") and not isinstance(tree, (type, nn.Module)) and not callable(tree):
        return [one for value in vars(tree).values() for one in tensors(value)]
    return []


def twin(tree: Any) -> Any:
    """A deep copy whose tensors are leaves over memory of their own, with the strides and gradient flags of the originals."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.detach().untyped_storage().clone()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return made.requires_grad_(tensor.requires_grad)

    memo: dict[int, Any] = {id(tensor): leaf(tensor) for tensor in tensors(tree)}
    return copy.deepcopy(tree, memo)


def same_tree(actual: Any, expected: Any, where: str = "result", rtol: float = RTOL, atol: float = ATOL) -> None:
    """Asserts equal structure, types, dtypes, shapes, gradient flags and (nearly) equal values."""
    assert type(actual) is type(expected), f"{where}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape, f"{where}: {actual.dtype} {actual.shape}"
        assert actual.device == expected.device, f"{where}: on {actual.device}"
        assert actual.requires_grad == expected.requires_grad, f"{where}: requires_grad is {actual.requires_grad}"
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), where
        for key in expected:
            same_tree(actual[key], expected[key], f"{where}[{key!r}]", rtol, atol)
    elif isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), where
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            same_tree(one, other, f"{where}[{i}]", rtol, atol)
    elif tensors(expected):
        same_tree(vars(actual), vars(expected), where, rtol, atol)
    else:
        assert actual == expected, f"{where}: {actual} instead of {expected}"


def same_gradients(actual: Any, expected: Any, where: str = "gradient", rtol: float = RTOL, atol: float = ATOL) -> None:
    """Asserts equal `.grad` of a tensor or of several in order, None exactly where `expected` has None."""
    pairs = list(zip(*([one] if isinstance(one, torch.Tensor) else one for one in (actual, expected)), strict=True))
    for i, (one, other) in enumerate(pairs):
        assert (one.grad is None) == (other.grad is None), f"{where} {i}: {one.grad} instead of {other.grad}"
        if other.grad is not None:
            same_tree(one.grad, other.grad, f"{where} {i}", rtol, atol)


def same_without_and_with_gradients(function: Callable[[torch.Tensor], Any], x: torch.Tensor, **options: Any) -> None:
    """Asserts that a function of `x` gives, compiled with `options`, eager's results without gradients, and with them also the gradient of `x`."""
    one, other = twin(x).requires_grad_(), twin(x).requires_grad_()
    with torch.no_grad():
        same_tree(compiled(function, **options)(one), function(other))
    results = compiled(function, **options)(one), function(other)
    same_tree(*results)
    for result in results:
        result.square().sum().backward()
    same_gradients(one, other)


def same_module(actual: nn.Module, expected: nn.Module, rtol: float = RTOL, atol: float = ATOL) -> None:
    """Asserts equal parameters, their gradients, and buffers."""
    names = [name for name, _ in expected.named_parameters()]
    assert [name for name, _ in actual.named_parameters()] == names
    for name, one, other in zip(names, actual.parameters(), expected.parameters(), strict=True):
        same_tree(one.detach(), other.detach(), name, rtol, atol)
        assert one.requires_grad == other.requires_grad, name
        same_gradients([one], [other], f"gradient of {name}", rtol, atol)
    same_tree(dict(actual.named_buffers()), dict(expected.named_buffers()), "buffer", rtol, atol)


def differentiable(tree: Any) -> list[torch.Tensor]:
    """The tensors of a result through which gradients flow, each once."""
    found = {id(tensor): tensor for tensor in tensors(tree) if tensor.requires_grad and tensor.grad_fn is not None}
    return list(found.values())


def tangent(output: torch.Tensor) -> torch.Tensor:
    """Random numbers of the shape of `output`, the same for both sides, without a draw from the global generator."""
    generator = seeded(output.numel() + 1)
    made = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return (made + 1j * made.flip(0) if output.is_complex() and output.dim() else made).to(output.dtype).to(output.device)


def backward(result: Any) -> None:
    """Backward through every differentiable tensor of `result`; what the user holds must not change by it."""
    outputs = differentiable(result)
    if not outputs:
        return
    tangents = [tangent(output) for output in outputs]
    held = [*tensors(result), *tangents]
    before = [tensor.detach().clone() for tensor in held]
    torch.autograd.backward(outputs, tangents)
    for tensor, value in zip(held, before, strict=True):
        assert torch.equal(tensor.detach().nan_to_num(), value.nan_to_num()), "the backward overwrote a result of the forward or a tangent"


def same_as_eager(
    function: Any,
    *calls: Call,
    repeat: int = 2,
    graphs: int | range | None = None,
    python_ops: Sequence[str] | None = (),
    train: bool = True,
    rtol: float = RTOL,
    atol: float = ATOL,
    keep: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> Ran:
    """Makes the calls, each `repeat` times, in eager and compiled, and compares results, inputs, gradients, buffers and random state.

    Args:
        function: A module, or a function of tensors.
        calls: Their arguments.
        repeat: How often each is made.
        graphs: How many graphs are to be compiled.
        python_ops: What is to run in PyTorch; None: anything may.
        train: Whether a backward follows each forward.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        keep: What of the result the loss depends on.
        settings: For `torch.compile`.
    """
    reference = copy.deepcopy(function) if isinstance(function, nn.Module) else function
    runner = compiled(function, **settings)
    total = len(calls) * repeat
    forwards = total if settings.get("fullgraph", True) else None
    with on_ort(graphs=graphs, forwards=forwards, python_ops=python_ops, idle=not train) as ran:
        for i in range(total):
            one = calls[i // repeat]
            results, sides, states = [], [], []
            for side in (runner, reference):
                mine = twin((one.args, one.kwargs))
                torch.manual_seed(i)
                results.append(side(*mine[0], **mine[1]))
                sides.append(tensors(mine))
                states.append(random_state())
            same_tree(results[0], results[1], f"call {i}", rtol, atol)
            assert torch.equal(states[0], states[1]), f"call {i}: the random state differs"
            if train:
                for result in results:
                    backward(result if keep is None else keep(result))
            same_tree([t.detach() for t in sides[0]], [t.detach() for t in sides[1]], f"call {i}, input after it", rtol, atol)
            same_gradients(*[[t for t in side if t.is_leaf] for side in sides], f"call {i}, gradient of input", rtol, atol)
            if isinstance(function, nn.Module):
                same_module(function, reference, rtol, atol)
    return ran


class Both:
    """A model compiled, its copy in eager; each step is made on both, then compared."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model, self.reference = model, copy.deepcopy(model)
        self.runner = compiled(model, **settings)
        self.sides = ((self.runner, self.model), (self.reference, self.reference))

    def step(self, do: Callable[[Any, nn.Module], Any]) -> Any:
        """`do(callable, module)` on both sides; compares what it returns, parameters, gradients and buffers."""
        results = []
        for runner, module in self.sides:
            torch.manual_seed(7)
            results.append(do(runner, module))
        same_tree(*results)
        same_module(self.model, self.reference)
        return results[0]
