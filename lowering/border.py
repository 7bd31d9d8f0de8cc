"""What goes into an ONNX graph, comes out of it, and crosses its `YieldOp`."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_backend.lowering.calls import Calls
from ort_backend.lowering.constants import constant
from ort_backend.lowering.memory_order import entering_order
from ort_backend.lowering.ops.ordering import behind
from ort_backend.lowering.permuting import inverse, permutation_of, permuted
from ort_backend.lowering.python_op import MS
from ort_backend.lowering.splitting.saved import behind_yield
from ort_backend.target import OrtTarget


class Border(abc.ABC):
    """The side of a `GraphLowering` that those who compile a graph see."""

    target: OrtTarget
    graph: ir.Graph
    op: Any
    _calls: Calls

    @abc.abstractmethod
    def bind(self, node: fx.Node, value: Any) -> None:
        """Says that `node`'s value is `value`."""

    def add_input(self, node: fx.Node, name: str) -> ir.Value:
        """A graph input for a placeholder: a tensor's carrier, in its `entering_order`, or an int64 scalar for a symbolic integer.

        For a device it comes as the shape of a tensor without elements, as what is worked out from shapes stays on the host: n as (n, 0, 0), or
        (0, -n, 0) if it is negative.
        """
        if self.target.sizes_on_host and isinstance(node.meta["val"], torch.SymInt):
            carried_by = self.op.builder.input(name, ir.DataType.UINT8, ir.Shape([None, None, 0]))
            difference = self.op.Sub(self.op.Shape(carried_by, start=0, end=1), self.op.Shape(carried_by, start=1, end=2))
            value = self._calls.stamp(self.op.Squeeze(difference, constant(self.op, [0], ir.DataType.INT64)), node.meta["val"])
            self.bind(node, value)
            return value
        dtype, shape = self._calls.type_of(node.meta["val"])
        shape = ir.Shape([None] * len(shape)) if "loose" in node.meta else shape
        order = entering_order(node.meta["val"])
        if order is None:
            value = self.op.builder.input(name, dtype, shape)
        else:
            value = permuted(self.op, self.op.builder.input(name, dtype, ir.Shape([shape[d] for d in order])), inverse(order))
        self.bind(node, value)
        return value

    def add_output(self, value: ir.Value) -> None:
        """A graph output. `value` may not be a graph input nor an output already: ask `fresh` for a copy of such a value."""
        self.op.builder.add_output(value, value.name)

    def fresh(self, value: ir.Value, fake: Any) -> ir.Value:
        """A copy of `value`."""
        return self._calls.stamp(self.op.Identity(value), fake)

    def transpose(self, value: ir.Value, permutation: Sequence[int]) -> ir.Value:
        """`value` with its dimensions permuted."""
        made = permuted(self.op, value, permutation)
        if permutation_of(made) is not None:
            return made
        # Two that cancel out are not left to ONNX Runtime: if nothing but a tangent is left, it cannot be fetched.
        copy = self.op.Identity(made)
        copy.type, copy.shape = made.type, made.shape
        return copy

    def type_of(self, fake: Any) -> tuple[ir.DataType, ir.Shape]:
        """The dtype and shape of the ONNX tensor that carries a fake value."""
        return self._calls.type_of(fake)

    def dtype_of(self, node: fx.Node) -> ir.DataType:
        """The dtype of the ONNX tensor that carries `node`'s value."""
        return self.type_of(node.meta["val"])[0]

    def placeholder_of_dtype(self, node: fx.Node) -> ir.Value:
        """Some 0-d value of `node`'s dtype."""
        dtype = self.dtype_of(node)
        made = self.op.Identity(constant(self.op, 0, dtype))
        made.type, made.shape = ir.TensorType(dtype), ir.Shape([])
        return made

    def yield_op(self, outputs: Sequence[ir.Value], tangents: Sequence[fx.Node], non_differentiable: Sequence[int]) -> None:
        """The node at which the forward stops: hands out `outputs`, takes in the `tangents` (one for each differentiable output)."""
        made = self.op.YieldOp(
            *outputs,
            non_differentiable_outputs=ir.AttrInt64s("non_differentiable_outputs", list(non_differentiable)),
            full_shape_outputs=ir.AttrInt64s("full_shape_outputs", []),
            _domain=MS,
            _version=1,
            _outputs=len(tangents),
        )
        values = (made,) if isinstance(made, ir.Value) else made
        for node, value in zip(tangents, values, strict=True):
            value.name = node.name
            self.bind(node, self._calls.stamp(value, node.meta["val"]))

    def after_yield(self, values: Sequence[ir.Value], fakes: Sequence[Any]) -> list[ir.Value]:
        """The values, each computed behind the `YieldOp`, if there is one.

        A gradient that depends on no tangent, such as zeros, would be computed in the forward, where `TrainingAgent` cannot fetch it.
        """
        tangents, late = behind_yield(self.graph)
        if not tangents:
            return list(values)
        return [v if v in late else self._calls.stamp(behind(self.op, v, tangents[0]), fake) for v, fake in zip(values, fakes, strict=True)]
