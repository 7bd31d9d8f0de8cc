"""What runs where, operator by operator, found by lowering samples of PyTorch's operator database for the installed ONNX Runtime."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import aot_function
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ort_backend.errors import LoweringError
from ort_backend.lowering import registry
from ort_backend.lowering.complex_numbers import has_complex, is_complex
from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.lowered import NotOnOrt
from ort_backend.lowering.provenance import operator_name
from ort_backend.lowering.splitting.partition import is_random
from ort_backend.lowering.tracing import decompositions
from ort_backend.operator_database import operators, samples
from ort_backend.sample_program import Program
from ort_backend.target import OrtTarget

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
# A complex tensor is lowered as two real ones, by lowerings that may be others than for real numbers: it has samples of its own.
_TRACED = ((torch.float32, torch.int64, torch.bool), (torch.complex64,))
# Argument patterns of an operator that are looked at, at most.
_VARIANTS = 6


@dataclasses.dataclass
class Support:
    """Where one operator runs.

    Attributes:
        operator: Its qualified name, such as `aten::_softmax`.
        kernels: The ONNX Runtime operators that its lowering wrote, over all samples.
        dtypes: The dtypes in which ONNX Runtime ran a sample, in the order of `DTYPES`.
        outside: Why PyTorch runs it (`PythonOp`), for some arguments or always: reason -> dtypes. Empty if it never does.
        drawn: Whether it draws random numbers: PyTorch makes them, in front of the session where it can.
        requires: Operators outside ONNX that its lowerings ask for.
        sampled: Whether the database has a sample that uses it.
    """

    operator: str
    kernels: set[str] = dataclasses.field(default_factory=set)
    dtypes: list[torch.dtype] = dataclasses.field(default_factory=list)
    outside: dict[str, list[torch.dtype]] = dataclasses.field(default_factory=dict)
    drawn: bool = False
    requires: tuple[str, ...] = ()
    sampled: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = dataclasses.asdict(self)
        plain["kernels"] = sorted(self.kernels)
        plain["dtypes"] = [_short(dtype) for dtype in self.dtypes]
        plain["outside"] = {reason: [_short(dtype) for dtype in dtypes] for reason, dtypes in self.outside.items()}
        return plain


def supported(
    target: OrtTarget, pattern: str = "", progress: Callable[[Sequence[str]], Iterator[str]] = lambda names: iter(names)
) -> dict[str, Support]:
    """Every operator that has a lowering, or that a sample of the database leads to, by name.

    Args:
        target: The ONNX Runtime to lower for.
        pattern: A regular expression: only operators that it is found in. The samples then are those of the entries that it is found in
            as well, or of all if there is no such entry.
        progress: Goes over the names of the database's entries, and may show how far it is.

    Raises:
        ModuleNotFoundError: the database needs a package that is not installed.
    """
    found = {operator_name(one): Support(operator_name(one), requires=_requirements(lowerings)) for one, lowerings in registry.registered().items()}
    for one in registry.registered_complex()[0]:
        found.setdefault(operator_name(one), Support(operator_name(one)))
    entries = operators()
    word = re.sub(r"(_forward|_backward(_data)?)?(\..*)?\$?$", "", pattern.removeprefix("^").removeprefix("aten::").lstrip("_"))
    chosen = [name for name, info in entries.items() if not word or word in name or word in (info.aten_name or "")] or list(entries)
    seen: dict[Any, set[str]] = {}
    for name in progress(chosen):
        for node, dtypes in _nodes(entries[name]):
            variants = seen.setdefault((node.target, dtypes[0].is_complex), set())
            variant = _variant(node)
            if variant not in variants and len(variants) < _VARIANTS and re.search(pattern, operator_name(node.target)):
                variants.add(variant)
                support = found.setdefault(operator_name(node.target), Support(operator_name(node.target)))
                _look_at(support, node, dtypes, target)
    return {name: support for name, support in sorted(found.items()) if re.search(pattern, name)}


def _requirements(lowerings: Sequence[registry.Lowering]) -> tuple[str, ...]:
    return tuple(sorted({name for lowering in lowerings for name in lowering.requires}))


def _nodes(info: Any) -> Iterator[tuple[fx.Node, list[torch.dtype]]]:
    """The operator calls, forward and backward, that samples of an entry lead to, and the dtypes that PyTorch takes there: the traced one first."""
    own = info.supported_dtypes("cpu")
    for choices in _TRACED:
        traced = next((dtype for dtype in choices if dtype in own), None)
        if traced is not None:
            yield from _traced_nodes(info, traced, own)


def _traced_nodes(info: Any, traced: torch.dtype, own: Collection[torch.dtype]) -> Iterator[tuple[fx.Node, list[torch.dtype]]]:
    for gradients in (True, False):
        try:
            graph = _joint_graph(Program(info.op, [one.given for one in samples(info, traced, 4, gradients=gradients)]))
        except _UNTRACEABLE:  # data-dependent shapes, sparse tensors, kernels that the samples' dtype lacks
            continue
        others = info.supported_backward_dtypes("cpu") if gradients and info.supports_autograd else own
        for node in graph.nodes if graph is not None else ():
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and "val" in node.meta:
                dtypes = _dtypes(node, traced, others if _behind_tangents(node) else own)
                if dtypes:
                    yield node, dtypes
        return


def _dtypes(node: fx.Node, traced: torch.dtype, taken: Collection[torch.dtype]) -> list[torch.dtype]:
    """The dtypes to look at a call in, that of its sample first: those of its arguments. None for the real numbers among complex samples."""
    given = [one.meta.get("val") for one in node.all_input_nodes] or [node.meta["val"]]
    if any(is_complex(one) for one in pytree.tree_leaves(given)):
        return [torch.complex64, *([torch.complex128] if not traced.is_complex or torch.complex128 in taken else [])]
    if traced.is_complex:
        return [torch.float32, torch.float64] if has_complex(node) else []
    return [traced, *(dtype for dtype in DTYPES if dtype is not traced and dtype in taken and not dtype.is_complex)]


_UNTRACEABLE = (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError, AttributeError, KeyError)


class _Captured(Exception):
    """Ends the compile as soon as the graph is there."""


def _joint_graph(program: Program) -> fx.Graph | None:
    """AOTAutograd's graph of a function of tensors: of forward and backward, or of a forward alone. None for a function that computes nothing."""

    def stop(module: fx.GraphModule, *_: Any, **__: Any) -> Any:
        raise _Captured(module.graph)

    inputs = [one.detach().clone().requires_grad_(one.requires_grad) for tensors in program.tensors for one in tensors]
    with decompositions.lstm_as_steps():
        function = aot_function(program.function, fw_compiler=stop, partition_fn=stop, decompositions=decompositions.table())
        try:
            function(*inputs)
        except _Captured as captured:
            return captured.args[0]
    return None


def _behind_tangents(node: fx.Node) -> bool:
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            if one.op == "placeholder" and one.name.startswith("tangents"):
                return True
            waiting.extend(one.all_input_nodes)
    return False


def _variant(node: fx.Node) -> str:
    """What tells one use of an operator from another: everything but the names and sizes of tensors."""

    def one(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            value = argument.meta.get("val")
            return f"{value.dtype}/{min(value.dim(), 1)}" if isinstance(value, torch.Tensor) else "number"
        return "int" if type(argument) is int else repr(argument)

    return str(pytree.tree_map(one, (node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, (fx.Node, torch.dtype))))


def _look_at(support: Support, node: fx.Node, dtypes: Sequence[torch.dtype], target: OrtTarget) -> None:
    """Lowers one operator call alone, in each dtype, and notes what came of it."""
    support.sampled = True
    if is_random(node):
        support.drawn = True
        return
    traced = dtypes[0]
    for dtype in dtypes:
        alone = _alone(node, {traced: dtype, traced.to_real(): dtype.to_real()} if traced.is_complex else {traced: dtype})
        if alone is None:
            continue
        try:
            reason, kernels = _lowered(alone, target)
        except _UNTRACEABLE:
            if dtype is traced:
                raise
            continue  # PyTorch knows the result's shape in this dtype, and yet has no kernel for it; nor is the lowering made for it
        if reason is None:
            support.kernels |= kernels
            support.dtypes = [one for one in DTYPES if one is dtype or one in support.dtypes]
        elif dtype not in support.outside.setdefault(reason, []):
            support.outside[reason].append(dtype)


def _alone(node: fx.Node, dtypes: Mapping[torch.dtype, torch.dtype]) -> fx.Node | None:
    """The call in a graph of its own, with tensors of other dtypes; None if PyTorch does not take those."""
    mode = next((leaf.fake_mode for leaf in _fakes(node)), None)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        fake = source.meta.get("val")
        copies[source].meta["val"] = _recast(fake, dtypes) if isinstance(fake, FakeTensor) else fake
    made = graph.create_node("call_function", node.target, *(fx.map_arg(part, copies.__getitem__) for part in (node.args, dict(node.kwargs))))  # type: ignore[arg-type]
    if all(before is after for before, after in dtypes.items()) or mode is None:
        made.meta["val"] = node.meta["val"]
        return made
    args: Any = fx.map_arg(made.args, lambda one: one.meta["val"])
    kwargs: Any = fx.map_arg(made.kwargs, lambda one: one.meta["val"])
    try:
        with mode, torch.no_grad():
            made.meta["val"] = made.target(*args, **kwargs)  # type: ignore[operator]
    except _UNTRACEABLE:
        return None
    return made


def _recast(fake: FakeTensor, dtypes: Mapping[torch.dtype, torch.dtype]) -> torch.Tensor:
    with fake.fake_mode:
        return fake.to(dtypes.get(fake.dtype, fake.dtype))


def _fakes(node: fx.Node) -> Iterator[FakeTensor]:
    leaves = pytree.tree_leaves([one.meta.get("val") for one in (node, *node.all_input_nodes)])
    return (leaf for leaf in leaves if isinstance(leaf, FakeTensor))


def _lowered(node: fx.Node, target: OrtTarget) -> tuple[str | None, set[str]]:
    """Why the call does not run on ONNX Runtime's own kernels (None if it does), and the operators written for it."""
    lowering = GraphLowering(target, "sample")
    try:
        for source in node.graph.nodes:
            if source is not node:
                lowering.add_input(source, source.name)
        lowering.run([node])
    except NotOnOrt as refusal:
        return refusal.reason, set()
    except LoweringError as error:
        return str(error).splitlines()[0], set()
    if lowering.outside:
        return lowering.outside[0].reason, set()
    kernels = {f"{one.domain}::{one.op_type}" if one.domain else one.op_type for one in lowering.graph}
    return None, kernels - {"Constant"}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
