"""FX nodes as Python callables over a list of values: what runs in eager PyTorch between sessions, and the views and sizes that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import suggest_memory_format

from ort_backend.lowering.functions.autograd_function import FORWARD, leave_backward, run_backward, run_forward
from ort_backend.lowering.fx_nodes import attribute
from ort_backend.lowering.kernels import faster_calls, fused_attention, onednn, optimizer_steps
from ort_backend.lowering.kernels.flex_attention import FLEX_BACKWARD, backward_of
from ort_backend.lowering.kernels.row_sums import ADD_ROWS, write_rows
from ort_backend.lowering.kernels.write_back import WRITE_BACK, write_into
from ort_backend.lowering.later import BEHIND
from ort_backend.lowering.memory_order import DETERMINANTS, READS_STRIDES, arranged, is_dense, order_for
from ort_backend.lowering.splitting.dependencies import run_by

aten = torch.ops.aten

Values = list[Any]


def _group_norm_backward(gradient: torch.Tensor, x: torch.Tensor, *others: Any) -> Any:
    """The kernel is silently wrong where the two lie in memory in different orders, as in no trace but where a session has made one of them."""
    order = suggest_memory_format(x)
    gradient, x = gradient.contiguous(memory_format=order), x.contiguous(memory_format=order)
    return aten.native_group_norm_backward.default(gradient, x, *others)


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask of no elements is one of the input's dtype, where the operator promises a bool (torch 2.13)."""
    output, mask = aten.native_dropout.default(x, p, train)
    return output, mask.to(torch.bool)


_REPLACED = {
    # A session hands out contiguous tensors where the trace may have had other strides; a view that they do not allow becomes a copy.
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    BEHIND: lambda x, gradient: x,  # PyTorch's steps are in order; and what reads a plan from the cache may not know the operator
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_dropout.default: _dropout,
    FORWARD: run_forward,
    ADD_ROWS: write_rows,
    WRITE_BACK: write_into,
    **onednn.IMPLEMENTATIONS,
    **faster_calls.IMPLEMENTATIONS,
    **fused_attention.IMPLEMENTATIONS,
    **optimizer_steps.IMPLEMENTATIONS,
}


def evaluation(node: fx.Node, slots: Mapping[fx.Node, int]) -> Callable[[Values], Any]:
    """A function of the list of values that computes `node`; `slots` says where in the list the nodes that it reads stand."""
    if node.op == "get_attr":
        constant = attribute(node)
        return lambda values: constant
    target: Any = node.target
    if target in DETERMINANTS or (target in READS_STRIDES and is_dense(node.args[0].meta["val"])):  # type: ignore[union-attr]
        target = _on(order_for(target, node.args[0].meta["val"]), target)  # type: ignore[union-attr]
    target = backward_of(node) if target is FLEX_BACKWARD else _REPLACED.get(target, target)
    writer = _Writer(slots)
    positional = [writer.source(arg) for arg in node.args]
    keywords = [f"{name}={writer.source(arg)}" for name, arg in node.kwargs.items()]
    return eval(f"lambda values: target({', '.join([*positional, *keywords])})", {"target": target, **writer.constants})


def evaluation_of(nodes: Sequence[fx.Node], sources: Sequence[fx.Node]) -> Callable[..., Any]:
    """A function of the values of `sources` that computes `nodes`, in that order, and returns the last."""
    slots = {node: i for i, node in enumerate([*sources, *nodes])}
    steps = [evaluation(node, slots) for node in nodes]

    def run(*given: Any) -> Any:
        values = list(given)
        for step in steps:
            values.append(step(values))
        return values[-1]

    return run


def _on(order: tuple[int, ...] | None, target: Callable[..., Any]) -> Callable[..., Any]:
    """`target` on a first argument that lies in memory as it did in the trace."""
    return lambda tensor, *args, **kwargs: target(arranged(tensor, order), *args, **kwargs)


def function_backward(node: fx.Node, slots: Mapping[fx.Node, int], undefined: int, depends_on: Sequence[frozenset[int]]) -> Callable[[Values], Any]:
    """`evaluation` of the backward of a user's Function, which gets None for a gradient that autograd does not have.

    Args:
        node: The call.
        slots: As for `evaluation`.
        undefined: Where in the list the set of tangents stands that autograd has no gradient for, and fills with zeros.
        depends_on: For each of the node's gradients the tangents that it depends on.
    """
    evaluate = evaluation(fx.Node(node.graph, node.name, "call_function", _arguments, node.args, {}), slots)

    def run(values: Values) -> Any:
        gradients, *others = evaluate(values)
        missing = values[undefined]
        if missing:
            gradients = [None if needs and needs <= missing else one for one, needs in zip(gradients, depends_on, strict=True)]
        reached = not missing or any(one is not None for one in gradients) or not run_by(node) <= missing
        return run_backward(gradients, *others) if reached else leave_backward(*others)

    return run


def _arguments(*args: Any) -> tuple[Any, ...]:
    return args


class _Writer:
    """Writes arguments of FX nodes as Python source; what has no source becomes a named constant."""

    def __init__(self, slots: Mapping[fx.Node, int]) -> None:
        self._slots = slots
        self.constants: dict[str, Any] = {}

    def source(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return f"values[{self._slots[arg]}]"
        if isinstance(arg, (list, tuple)) and type(arg).__name__ in ("list", "tuple", "immutable_list"):
            parts = "".join(f"{self.source(part)}, " for part in arg)
            return f"[{parts}]" if isinstance(arg, list) else f"({parts})"
        if isinstance(arg, dict):
            return "{" + "".join(f"{key!r}: {self.source(value)}, " for key, value in arg.items()) + "}"
        if isinstance(arg, slice):
            return f"slice({self.source(arg.start)}, {self.source(arg.stop)}, {self.source(arg.step)})"
        if arg is None or type(arg) in (bool, int, str):
            return repr(arg)
        name = f"constant_{len(self.constants)}"
        self.constants[name] = arg
        return name
