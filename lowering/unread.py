"""What nothing in a graph reads: ONNX Runtime would run it, or hold it."""

from __future__ import annotations

import onnx_ir as ir

from ort_backend.target import ATEN, TRITON

_WITH_EFFECT = ("YieldOp", ATEN, TRITON, "PythonOp", "PythonOpGrad")


def drop_unread_nodes(graph: ir.Graph) -> None:
    """Removes the nodes whose results nothing reads, in place; those that run Python stay."""
    unread: set[ir.Node] = set()
    for node in reversed(graph):
        is_read = any(value.is_graph_output() or not all(use.node in unread for use in value.uses()) for value in node.outputs)
        if not is_read and node.op_type not in _WITH_EFFECT:
            unread.add(node)
            for body in (one.value for one in node.attributes.values() if one.type == ir.AttributeType.GRAPH):
                empty(body)
    graph.remove(unread, safe=True)  # at once: each call goes over all outputs


def empty(body: ir.Graph) -> None:
    """Removes all that a body is made of, so that it reads nothing of what is around it, in place."""
    body.outputs.clear()
    drop_unread_nodes(body)


def drop_unread_constants(graph: ir.Graph) -> None:
    """Removes the initializers that nothing reads, not even a node inside the body of a loop, in place."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
