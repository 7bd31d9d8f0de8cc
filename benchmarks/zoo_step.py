"""One workload of the zoo, compared with eager PyTorch in this process: loss, every gradient, buffers, random state."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import ort_backend
from benchmarks.zoo_models import Workload
from benchmarks.zoo_models.checkpointed import NoBlocks

MODES = ("both", "static", "dynamic")
# Part of the largest gradient of the model, or of its largest buffer, on whose scale it is compared what is zero but for rounding: the gradient
# of the bias of an attention's keys, the mean of what BatchNorm has just centred.
FLOOR = 1e-6
# A gradient may also differ from eager's by this many times what eager's own moves when its parameters are rounded otherwise: an activation
# that crosses zero changes every gradient in front of it. So many roundings are tried, where a gradient differs by more than the tolerance.
SPREADS, ROUNDINGS = 2.0, 8


@dataclasses.dataclass(frozen=True)
class Call:
    """One training step.

    Attributes:
        batch: Its batch size.
        length: Its length.
        problems: What differs from eager; empty if nothing does.
        compiles: Graphs that were compiled for it.
        breaks: Graph breaks of Dynamo while it was compiled.
        nodes: ONNX nodes of those graphs, `PythonOp`s included.
        fx_nodes: Computing nodes of the traced graphs that they come from.
        python_ops: `PythonOp`s among the nodes, by operator; users' autograd.Functions count as `autograd.Function`.
        seconds: Of the compiled step, with its compiles.
        ill_conditioned: Gradients that differ from eager's, but no more than eager's own with its parameters rounded otherwise.
    """

    batch: int
    length: int
    problems: tuple[str, ...]
    compiles: int
    breaks: int
    nodes: int
    fx_nodes: int
    python_ops: dict[str, int]
    seconds: float
    ill_conditioned: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a workload.

    Attributes:
        name: Its name.
        family: Its family.
        calls: The steps that ran, the static one first unless the mode is `"dynamic"`.
        broken: Why the process ended, or what it raised; empty if neither.
        skipped: Why it did not run: a package that is missing, no blocks to checkpoint; empty if it did.
        has_static: Whether the first call is the static one.
    """

    name: str
    family: str
    calls: tuple[Call, ...] = ()
    broken: str = ""
    skipped: str = ""
    has_static: bool = True

    @property
    def static(self) -> tuple[Call, ...]:
        """The first call, with fixed sizes."""
        return self.calls[:1] if self.has_static else ()

    @property
    def dynamic(self) -> tuple[Call, ...]:
        """The calls with other sizes."""
        return self.calls[1:] if self.has_static else self.calls

    @property
    def wrong(self) -> bool:
        """Whether a call differs from eager."""
        return any(call.problems for call in self.calls)


def missing(workload: Workload) -> str:
    """The package that the workload needs and that is not there, or nothing."""
    return workload.needs if workload.needs and importlib.util.find_spec(workload.needs) is None else ""


def compare(workload: Workload, mode: str = "both") -> Result:
    """Runs a training step for each size, compiled and eager, and compares them.

    In mode `"both"` the sizes change under one `torch.compile` without settings: the second call makes them symbolic, the third should
    compile nothing. `"static"` stops after the first call; `"dynamic"` leaves it out and compiles with `dynamic=True`.
    """
    if package := missing(workload):
        return Result(workload.name, workload.family, skipped=f"{package} is not installed")
    sizes = {"both": workload.sizes, "static": workload.sizes[:1], "dynamic": workload.sizes[1:]}[mode]
    torch.manual_seed(0)
    try:
        eager, batch = workload.build()
    except NoBlocks as reason:
        return Result(workload.name, workload.family, skipped=str(reason))
    eager.train()
    own = copy.deepcopy(eager)
    with torch._dynamo.config.patch(**workload.dynamo) if workload.dynamo else contextlib.nullcontext():
        # What ONNX Runtime can run runs there, also where PyTorch's kernel is the faster one.
        compiled = torch.compile(own, backend="ort_training", dynamic=True if mode == "dynamic" else None, options={"kernels": "onnxruntime"})
        calls = []
        for seed, (rows, length) in enumerate(sizes, 1):
            torch.manual_seed(seed)
            calls.append(_call(workload, (compiled, own, eager), batch(rows, length), (rows, length)))
    return Result(workload.name, workload.family, tuple(calls), has_static=mode != "dynamic")


def _call(workload: Workload, modules: tuple[Any, nn.Module, nn.Module], inputs: dict[str, Any], size: tuple[int, int]) -> Call:
    compiled, own, eager = modules
    before, runs = len(ort_backend.report().graphs), _runs()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    began = time.perf_counter()
    loss, state = _step(compiled, own, copy.deepcopy(inputs), workload.autocast)
    seconds = time.perf_counter() - began
    ran = tuple(after - earlier for after, earlier in zip(_runs(), runs, strict=True))
    untouched = copy.deepcopy(eager)
    expected, expected_state = _step(eager, eager, copy.deepcopy(inputs), workload.autocast)
    problems = [] if torch.equal(state, expected_state) else ["the random state differs"]
    problems += [] if min(ran) > 0 else ["no training graph ran forward and backward on ONNX Runtime"]
    problems += _differences("loss", loss, expected, workload.tolerance)
    gradients = _gradient_problems(own, eager, workload.tolerance)
    unsettled = _beyond_rounding(gradients, own, eager, untouched, lambda module: _step(module, module, copy.deepcopy(inputs), workload.autocast))
    problems += unsettled.values()
    floor = _floor(list(eager.buffers()))
    for (name, buffer), wanted in zip(own.named_buffers(), eager.buffers(), strict=True):
        problems += _differences(f"buffer {name}", buffer, wanted, workload.tolerance, floor)
    graphs = ort_backend.report().graphs[before:]
    return Call(
        *size,
        problems=tuple(problems),
        compiles=len(graphs),
        breaks=sum(torch._dynamo.utils.counters["graph_break"].values()) - breaks,
        nodes=sum(graph.onnx_nodes for graph in graphs),
        fx_nodes=sum(graph.fx_nodes for graph in graphs),
        python_ops=_python_ops(graphs),
        seconds=seconds,
        ill_conditioned=len(gradients) - len(unsettled),
    )


def _step(module: Any, owner: nn.Module, inputs: dict[str, Any], autocast: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward from one seed: the loss, and the state of the random generator behind them."""
    torch.manual_seed(100)
    np.random.seed(100)
    owner.zero_grad()
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        output = module(**inputs)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    return loss.detach(), torch.get_rng_state()


def _runs() -> tuple[int, int]:
    counts = [graph.counts for graph in ort_backend.report().graphs if graph.kind == "training"]
    return sum(one.forward for one in counts), sum(one.backward for one in counts)


def _gradient_problems(own: nn.Module, eager: nn.Module, tolerance: float) -> dict[str, str]:
    """By parameter: how its gradient differs from eager's."""
    problems: dict[str, str] = {}
    floor = _floor([p.grad for p in eager.parameters() if p.grad is not None])
    for (name, parameter), wanted in zip(own.named_parameters(), eager.parameters(), strict=True):
        if parameter.grad is None or wanted.grad is None:
            if (parameter.grad is None) != (wanted.grad is None):
                problems[name] = f"gradient {name}: None {'here' if parameter.grad is None else 'in eager'} only"
        elif differs := _differences(f"gradient {name}", parameter.grad, wanted.grad, tolerance, floor):
            problems[name] = differs[0]
    return problems


def _beyond_rounding(
    problems: dict[str, str], own: nn.Module, eager: nn.Module, untouched: nn.Module, step: Callable[[nn.Module], Any]
) -> dict[str, str]:
    """Those of `problems` that are larger than what rounding alone does to eager's gradients. `untouched` is eager's module before its step."""
    if not problems:
        return {}
    parameters, theirs = dict(own.named_parameters()), dict(eager.named_parameters())
    spread = dict.fromkeys(problems, 0.0)
    for draw in range(ROUNDINGS):
        rounded = copy.deepcopy(untouched)
        _round_otherwise(rounded, draw)
        step(rounded)
        for name, parameter in rounded.named_parameters():
            if name in spread and parameter.grad is not None and theirs[name].grad is not None:
                spread[name] = max(spread[name], _distance(parameter.grad, theirs[name].grad))
    return {name: text for name, text in problems.items() if not _within(parameters[name].grad, theirs[name].grad, SPREADS * spread[name])}


def _round_otherwise(module: nn.Module, draw: int) -> None:
    """Moves every element of every parameter by up to four roundings, as sums in another order do."""
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                direction = torch.randint(-4, 5, parameter.shape, generator=generator)
                parameter.mul_(1 + direction * torch.finfo(parameter.dtype).eps)


def _distance(value: torch.Tensor, wanted: torch.Tensor) -> float:
    return (value.detach().double() - wanted.detach().double()).abs().max().item()


def _within(value: torch.Tensor | None, wanted: torch.Tensor | None, distance: float) -> bool:
    return value is not None and wanted is not None and value.shape == wanted.shape and _distance(value, wanted) <= distance


def _floor(tensors: Sequence[torch.Tensor]) -> float:
    return FLOOR * max((_largest(tensor) for tensor in tensors if tensor.numel() and not tensor.is_complex()), default=0.0)


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite element, without its sign."""
    return tensor.detach().double().abs().nan_to_num(0.0, posinf=0.0).max().item()


def _differences(name: str, value: torch.Tensor, wanted: torch.Tensor, tolerance: float, floor: float = 0.0) -> list[str]:
    """A line if they differ in dtype, in shape, in NaNs, or by more than `tolerance` (relative, and of the largest element) and `floor`."""
    if (value.dtype, value.shape) != (wanted.dtype, wanted.shape):
        return [f"{name}: {value.dtype}{list(value.shape)}, not {wanted.dtype}{list(wanted.shape)}"]
    if not wanted.numel():
        return []
    value, wanted = value.detach().double(), wanted.detach().double()
    largest = _largest(wanted)
    if torch.allclose(value, wanted, rtol=tolerance, atol=tolerance * largest + floor, equal_nan=True):
        return []
    return [f"{name}: off by {(value - wanted).abs().max().item():.3g}, largest {largest:.3g}"]


def _python_ops(graphs: Sequence[Any]) -> dict[str, int]:
    counted: collections.Counter[str] = collections.Counter()
    for graph in graphs:
        for one in graph.outside:
            counted[one.operator] += one.count
        if graph.functions:
            counted["autograd.Function"] += graph.functions
    return dict(counted)
