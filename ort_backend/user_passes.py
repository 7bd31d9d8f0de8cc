"""`options={"fx_passes": [...], "onnx_passes": [...]}`: the user's own passes over what is lowered, and over what comes of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ort_backend.errors import PassError


def name_of(function: Callable[..., Any]) -> str:
    """What to call a pass: its function's name, or its class's."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def run_fx_passes(passes: Sequence[Callable[[fx.GraphModule], Any]], module: fx.GraphModule) -> fx.GraphModule:
    """Runs the passes, in order, on AOTAutograd's graph.

    Args:
        passes: Each takes the `fx.GraphModule` and changes it in place, or returns another one, or an `fx.Graph`.
        module: The joint graph (placeholders: primals, then tangents), or the graph of a forward alone.

    Raises:
        PassError: a pass raised, returned something else, or changed what the graph takes or gives: how much, of which dtypes and shapes.
    """
    for function in passes:
        title = f"FX pass {name_of(function)!r}"
        before, results = _interface(module.graph), _results(module.graph)
        described = module.graph.output_node().meta
        try:
            made = function(module)
        except Exception as error:
            raise PassError(f"{title} failed: {type(error).__name__}: {error}") from error
        module = _module(made, module, title)
        if _interface(module.graph) != before:
            raise PassError(f"{title} changed the placeholders of the graph, or the number of its results")
        module.graph.output_node().meta = {**described, **module.graph.output_node().meta}
        _complete(module, title)
        for i, (was, now) in enumerate(zip(results, _results(module.graph), strict=True)):
            if was is not None and now is not None and not _fits(was, now):
                raise PassError(f"{title} changed result {i} of the graph from {was[0]} {list(was[1])} to {now[0]} {list(now[1])}")
    return module


def _module(made: Any, module: fx.GraphModule, title: str) -> fx.GraphModule:
    if made is None:
        made = module
    elif isinstance(made, fx.Graph):
        made = fx.GraphModule(module, made)
    if not isinstance(made, fx.GraphModule):
        raise PassError(f"{title} returned {type(made).__name__}, but must return None, an fx.GraphModule or an fx.Graph")
    try:
        made.graph.lint()
    except (RuntimeError, ValueError) as error:
        raise PassError(f"{title} left a graph that is not well formed: {error}") from error
    made.recompile()
    return made


def _interface(graph: fx.Graph) -> tuple[list[str], int]:
    """The names of the placeholders, and the number of results."""
    return [str(node.target) for node in graph.nodes if node.op == "placeholder"], len(graph.output_node().args[0])  # type: ignore[arg-type]


def _results(graph: fx.Graph) -> list[tuple[torch.dtype, tuple[Any, ...]] | None]:
    """Dtype and shape of each result that is a tensor."""
    fakes = [one.meta.get("val") if isinstance(one, fx.Node) else one for one in graph.output_node().args[0]]  # type: ignore[union-attr]
    return [(fake.dtype, tuple(fake.shape)) if isinstance(fake, torch.Tensor) else None for fake in fakes]


def _fits(was: tuple[torch.dtype, tuple[Any, ...]], now: tuple[torch.dtype, tuple[Any, ...]]) -> bool:
    """Whether dtypes are equal, and shapes as far as sizes are numbers: a pass may write a symbolic one in another way."""
    (dtype, shape), (new_dtype, new_shape) = was, now
    same = (a == b for a, b in zip(shape, new_shape) if isinstance(a, int) and isinstance(b, int))
    return dtype == new_dtype and len(shape) == len(new_shape) and all(same)


def _complete(module: fx.GraphModule, title: str) -> None:
    """Works out the fake values (dtype, shape) of new nodes, and of those behind a node whose value is another now."""
    changed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or ("val" in node.meta and changed.isdisjoint(node.all_input_nodes)):
            continue
        try:
            value = _fake_result(node)
        except Exception as error:
            raise PassError(f"{title}: the shape of {node.format_node()} cannot be worked out: {type(error).__name__}: {error}") from error
        if "val" not in node.meta or _described(value) != _described(node.meta["val"]):
            changed.add(node)
            node.meta["val"] = value


def _fake_result(node: fx.Node) -> Any:
    assert callable(node.target)
    args: Any = fx.map_arg(node.args, lambda one: one.meta["val"])
    kwargs: Any = fx.map_arg(node.kwargs, lambda one: one.meta["val"])
    if node.target is operator.getitem:
        return args[0][args[1]]
    fakes = [leaf for leaf in torch.utils._pytree.tree_leaves([one.meta.get("val") for one in node.graph.nodes]) if isinstance(leaf, FakeTensor)]
    with fakes[0].fake_mode, torch.no_grad():
        return node.target(*args, **kwargs)


def _described(value: Any) -> Any:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [(leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in leaves]


def run_onnx_passes(passes: Sequence[Callable[[ir.Model], Any]], model: ir.Model) -> ir.Model:
    """Runs the passes, in order, on the ONNX model, before a session is made of it.

    Args:
        passes: Each takes the `onnx_ir.Model` and changes it in place, or returns another one, or an `onnx_ir.passes.PassResult`.
        model: The lowered graph.

    Raises:
        PassError: a pass raised, returned something else, or changed what the graph takes, what it gives, or its `YieldOp`.
    """
    for function in passes:
        title, before = f"ONNX pass {name_of(function)!r}", _boundary(model)
        try:
            made = function(model)
        except Exception as error:
            raise PassError(f"{title} failed: {type(error).__name__}: {error}") from error
        if made is not None:
            model = made.model if isinstance(made, ir.passes.PassResult) else made
        if not isinstance(model, ir.Model):
            raise PassError(f"{title} returned {type(model).__name__}, but must return None, an onnx_ir.Model or a PassResult")
        if _boundary(model) != before:
            raise PassError(f"{title} changed the inputs or outputs of the graph, or the node YieldOp, at which the forward ends")
    return model


def _boundary(model: ir.Model) -> tuple[Any, ...]:
    graph = model.graph
    stops = [(len(node.inputs), [value.name for value in node.outputs]) for node in graph if node.op_type == "YieldOp"]
    return [value.name for value in graph.inputs], len(graph.outputs), stops
