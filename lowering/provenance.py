"""Where ONNX nodes come from: the FX node and the user's line, written on them as metadata, so that errors and dumps can name them."""

from __future__ import annotations

import os
import re
from typing import Any

import onnx_ir as ir
import torch
from torch import fx


class Provenance:
    """Writes the FX node and the user's stack trace on every ONNX node made inside."""

    def __init__(self, graph: ir.Graph, node: fx.Node) -> None:
        self.graph, self.node, self.start = graph, node, len(graph)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if len(self.graph) == self.start:
            return
        where = user_line(self.node)
        written = f"{self.node.name} = {self.node.target}({', '.join(map(str, self.node.args))})"  # `format_node` takes five times as long
        for made in newest(self.graph, len(self.graph) - self.start):
            made.metadata_props.clear()
            made.metadata_props["fx_node"] = written
            made.metadata_props["stack_trace"] = where


def newest(graph: ir.Graph, count: int) -> list[ir.Node]:
    """The `count` newest nodes, oldest first."""
    nodes = reversed(graph)
    return [next(nodes) for _ in range(count)][::-1]


def move_before(graph: ir.Graph, node: ir.Node, made: list[ir.Node], name: str) -> None:
    """Puts nodes that were written behind a finished graph in front of `node`, where they belong.

    They are called after `name`: the builder's names count the nodes of the graph, which become fewer where one takes the place of another.
    """
    graph.remove(made)
    graph.insert_before(node, made)
    for i, one in enumerate(made):
        one.name = f"{name}/{one.op_type}_{i}"
        one.metadata_props.update(node.metadata_props)
        for j, value in enumerate(one.outputs):
            value.name = f"{one.name}_{j}"


def take_place(graph: ir.Graph, node: ir.Node, made: list[ir.Node], result: ir.Value, name: str) -> None:
    """Puts nodes that were written behind a finished graph in the place of `node`, which has one result: `result` is their value for it.

    The result keeps its name, the nodes are called after `name` (`move_before`).
    """
    move_before(graph, node, made, name)
    old = node.outputs[0]
    result.type, result.shape, result.name = old.type, old.shape, old.name
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    old.name = None
    graph.remove(node, safe=True)


def user_line(node: fx.Node) -> str:
    """`file:line, in function: source` of the innermost user frame that made an FX node.

    Without one, as where a module of PyTorch's was compiled by itself, the module; else an empty string.
    """
    trace = [line.strip() for line in (node.stack_trace or node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    for i in range(len(trace) - 1, -1, -1):
        if trace[i].startswith("File ") and not trace[i].startswith(_DISPATCH):
            source = trace[i + 1] if i + 1 < len(trace) else ""
            return f"{trace[i]}: {source}" if source else trace[i]
    return module_of(node)


def module_of(node: fx.Node) -> str:
    """`module 2.0 (Embedding)`: the innermost that an FX node was traced in, by its name below what was compiled; or an empty string."""
    modules = list((node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}).values())
    if not modules:
        return ""
    path, kind = modules[-1]
    name, kind_name = _COMPILED.sub("", path), getattr(kind, "__name__", str(kind))
    return f"module {name} ({kind_name})" if name else f"module {kind_name}"


# What was compiled, in front of a module's name: `L['self'].2.0` (read in torch 2.13).
_COMPILED = re.compile(r"^L\['\w+'\]\.?")

# The trace of a custom operator ends inside the first two before torch 2.13, every trace inside the last where the user has set a default device.
_DISPATCH = tuple(f'File "{os.path.join(os.path.dirname(torch.__file__), *part)}' for part in (("_library",), ("_ops.py",), ("utils", "_device.py")))


def at(where: str) -> str:
    """The end of an error message: the user's line, if it is known."""
    return f"\n  at {where}" if where else ""


def operator_name(target: object) -> str:
    """The qualified name of an operator (`aten::sum.dim_IntList`), or of a function."""
    if isinstance(target, torch._ops.OpOverload):
        return target.name().removesuffix(".default")
    return getattr(target, "__name__", str(target))
