"""What stands between AOTAutograd and a compiled graph: around the callables that it is given, and around the one that it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad

from ort_backend.runtime import python_op
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
    """`compiled`, showing its results to the training graph."""
    if training is None or not training.watches:
        return compiled

    def call(*args: Any) -> Any:
        results: Any = ()
        since = next_number()
        try:
            results = compiled(*args)
        finally:
            training.watch(results, since)
        return results

    return call


def beside_python(compiled: Callable[..., Any], gm: fx.GraphModule, counts: RunCounts) -> Callable[..., Any]:
    """`compiled`, as `gm` in eager PyTorch where it is called inside a `PythonOp`: ONNX Runtime would wait for itself if it has such nodes, too."""

    def call(*args: Any) -> Any:
        if not python_op.inside():
            return compiled(*args)
        counts.eager += 1
        return gm(*args)

    return call


def beside_tangents(compiled: Callable[..., Any], gm: fx.GraphModule, counts: RunCounts) -> Callable[..., Any]:
    """`compiled`, as `gm` in eager PyTorch in forward-mode differentiation: a session would give results without tangents.

    Dynamo has no guard on it. A graph with a backward is an `autograd.Function`, which PyTorch refuses to differentiate so (seen in torch 2.13).
    """

    def call(*args: Any) -> Any:
        if forward_ad._current_level < 0:
            return compiled(*args)
        counts.eager += 1
        return gm(*args)

    return call
