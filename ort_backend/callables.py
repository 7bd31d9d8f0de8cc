"""What stands between AOTAutograd and a compiled graph: around the callables that it is given, and around the one that it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import RandomValueSource
from torch.autograd import forward_ad

from ort_backend import compiled_autograd
from ort_backend.runtime.autograd_node import next_number
from ort_backend.runtime.counts import RunCounts
from ort_backend.runtime.region_graph import RegionTraining
from ort_backend.runtime.training_graph import TrainingGraph

Boxed = Callable[[list[Any]], Any]


def boxed(function: Boxed) -> Boxed:
    """A function that AOTAutograd calls with one list, which the function may empty.

    Dynamo compiles neither this Python nor that of users' Functions: it would where a whole training step is compiled, and the backward runs in it.
    """

    @torch.compiler.disable
    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True
    return call


def watched(compiled: Callable[..., Any], training: TrainingGraph | RegionTraining | None) -> Callable[..., Any]:
    """`compiled`, showing its results to the training graph, and its arguments: the program may have written to them.

    Compiled autograd would trace what watches, too: its backwards are not this graph's.
    """
    if training is None or not training.watches or compiled_autograd.is_on():
        return compiled

    def call(*args: Any) -> Any:
        results: Any = ()
        since = next_number()
        try:
            results = compiled(*args)
        finally:
            training.watch([*results, *args], since)
        return results

    return call


def random_numbers(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, torch.dtype]:
    """Which arguments are numbers of Python's that Dynamo draws before a call (`random.random()`), and the dtype that they have in its graph.

    Those that are fractions arrive in float64, which they are traced in float32 for (torch 2.13).
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [getattr(node.meta.get("grapharg"), "source", None) for node in placeholders]
    drawn = [i for i, source in enumerate(sources) if isinstance(source, RandomValueSource) and isinstance(example_inputs[i], torch.Tensor)]
    return {i: example_inputs[i].dtype for i in drawn if example_inputs[i].is_floating_point()}


def with_dtypes(compiled: Callable[..., Any], dtypes: Mapping[int, torch.dtype]) -> Callable[..., Any]:
    """`compiled`, called with some arguments cast."""
    if not dtypes:
        return compiled

    def call(*args: Any) -> Any:
        return compiled(*(arg.to(dtypes[i]) if i in dtypes else arg for i, arg in enumerate(args)))

    return call


def in_forward_mode() -> bool:
    """Whether PyTorch differentiates in forward mode: a session's results would have no tangents.

    Dynamo has no guard on it. A graph with a backward is an `autograd.Function`, which PyTorch refuses to differentiate so (seen in torch 2.13).
    """
    return forward_ad._current_level >= 0


def eager_where(is_so: Callable[[], bool], compiled: Callable[..., Any], gm: fx.GraphModule, counts: RunCounts) -> Callable[..., Any]:
    """`compiled`, as `gm` in eager PyTorch where `is_so()` at a call."""

    def call(*args: Any) -> Any:
        if not is_so():
            return compiled(*args)
        counts.eager += 1
        return gm(*args)

    return call
