"""Sizes stay on the host: for a device, what is worked out from sizes reaches the kernels that want it as a value without a copy.

ONNX Runtime works out sizes on the CPU and copies between devices where such a value meets a kernel. The copies are this pass's to avoid: `Range`
takes its limits on the host and writes its result on the device, so that a number n is there as `Range(n, n + 1, 1)`; a node that calls PyTorch
gets a number as the shape of a tensor without elements.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ort_backend.target import TRITON

_ROOTS = {"Shape", "Size"}
# What sizes are worked out with.
ARITHMETIC = {
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "Div", "Equal", "Floor", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual",
    "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round", "Slice", "Sqrt",
    "Squeeze", "Sub", "Unsqueeze", "Where", "Xor",
}  # fmt: skip
# Inputs that the CUDA provider's kernels read on the host (1.19.2).
_ON_HOST: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "TopK", "Unsqueeze", "Squeeze", "Split", "SplitTraining", "CumSum", "OneHot", "Trilu"), (1,)),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare"), (1,)),
    **dict.fromkeys(("ReduceLogSum", "ReduceLogSumExp", "ReduceSumTraining"), (1,)),
    **dict.fromkeys(("ConstantOfShape", "GatherGrad", "GatherNDGrad", "GatherElementsGrad", "If"), (0,)),
    **dict.fromkeys(("Clip", "Dropout"), (1, 2)),
    "Loop": (0, 1),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "SliceGrad": (1, 2, 3, 4, 5),
}
_MOST = 16  # numbers of one vector
_INT64, _FLOATS = ir.DataType.INT64, (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def keep_on_host(graph: ir.Graph) -> None:
    """Rewrites a graph for the CUDA provider, in place."""
    for node in list(graph):
        if (gradient := _awaited(node)) is not None:
            _wait_on_device(graph, node, gradient)
    host, arithmetic = _worked_out(graph)
    to_device = _ToDevice(graph)
    for node in list(graph):
        if node in arithmetic or node.op_type in _ROOTS:
            continue
        for i, value in enumerate(node.inputs):
            if value is not None and _orders(value, node, i) and (link := to_device(value)) is not None:
                node.replace_input_with(i, link)
                continue
            if value is None or value not in host or i in _ON_HOST.get(node.op_type, ()):
                continue
            if node.op_type in ("PythonOp", TRITON):
                to_device.as_shape(node, i, value)
            elif (made := to_device(value)) is not None:
                node.replace_input_with(i, made)


def _awaited(node: ir.Node) -> ir.Value | None:
    """None of the elements of the gradient behind which a tensor is to be computed, if that is what this Reshape says (`ops.ordering`)."""
    sizes = node.inputs[1].producer() if node.op_type == "Reshape" and node.inputs[1] is not None else None
    if sizes is None or sizes.op_type != "Concat" or len(sizes.inputs) != 2:
        return None
    cast = sizes.inputs[1].producer()  # type: ignore[union-attr]
    gather = cast.inputs[0].producer() if cast is not None and cast.op_type == "Cast" and cast.inputs[0] is not None else None
    return cast.inputs[0] if gather is not None and gather.op_type == "Gather" else None  # type: ignore[union-attr]


def _wait_on_device(graph: ir.Graph, node: ir.Node, nothing: ir.Value) -> None:
    """Appends `nothing` to the tensor itself: to its sizes, which are wanted on the host, it would be copied, and the host would wait for that."""
    x, result = node.inputs[0], node.outputs[0]
    assert x is not None and x.dtype is not None
    nodes: list[ir.Node] = []

    def op(op_type: str, *inputs: ir.Value, dtype: ir.DataType = x.dtype, **ints: int) -> ir.Value:
        nodes.append(ir.Node("", op_type, inputs, [ir.AttrInt64(name, number) for name, number in ints.items()]))
        nodes[-1].outputs[0].type = ir.TensorType(dtype)
        return nodes[-1].outputs[0]

    def constant(numbers: list[int]) -> ir.Value:
        value = ir.Value(name=f"behind_{len(graph.initializers)}", const_value=ir.tensor(np.array(numbers, np.int64)))
        value.type, value.shape = ir.TensorType(_INT64), ir.Shape([len(numbers)])
        graph.register_initializer(value)
        return value

    rows = op("Reshape", x, op("Concat", constant([1]), op("Shape", x, dtype=_INT64), dtype=_INT64, axis=0), allowzero=1)
    none = op("Concat", constant([0]), op("Shape", x, dtype=_INT64), dtype=_INT64, axis=0)
    rest = op("Reshape", op("Cast", nothing, to=int(x.dtype)), none, allowzero=1)
    op("Reshape", op("Concat", rows, rest, axis=0), op("Shape", x, dtype=_INT64), allowzero=1)
    for one in nodes:
        one.metadata_props.update(node.metadata_props)
    graph.insert_before(node, nodes)
    made = nodes[-1].outputs[0]
    made.shape, made.name = result.shape, result.name
    result.name = None
    result.replace_all_uses_with(made, replace_graph_outputs=True)
    dead: ir.Node | None = node
    while dead is not None and not any(output.uses() for output in dead.outputs):  # with what joins the sizes and nothing
        last = dead.inputs[-1]
        graph.remove(dead, safe=True)
        dead = last.producer() if last is not None else None


def _worked_out(graph: ir.Graph) -> tuple[set[ir.Value], set[ir.Node]]:
    """The values that follow from sizes and constants alone, and the nodes that compute them."""
    host: set[ir.Value] = set()
    arithmetic: set[ir.Node] = set()
    folded: set[ir.Value] = set()  # what follows from constants alone, which ONNX Runtime works out in advance
    for node in graph:
        if node.domain == "" and node.op_type in _ROOTS:
            host.update(node.outputs)
        elif node.domain == "" and node.op_type in ARITHMETIC:
            values = [value for value in node.inputs if value is not None and not _is_constant(value) and value not in folded]
            if not values:
                folded.update(node.outputs)
            elif host.issuperset(values):
                host.update(node.outputs)
                arithmetic.add(node)
    return host, arithmetic


def _orders(value: ir.Value, node: ir.Node, i: int) -> bool:
    """Whether an input is the context of an earlier Python node, which is on the host, and there to keep the order.

    ONNX Runtime would run a node on the CPU that takes nothing but such values and inputs of the graph.
    """
    producer = value.producer()
    is_context = producer is not None and producer.op_type == "PythonOp" and value is producer.outputs[0]
    return is_context and (node.op_type in ("PythonOp", "YieldOp") or (node.op_type == "PythonOpGrad" and i > 0))


def is_about_sizes(node: ir.Node) -> bool:
    """Whether a node works out something from sizes and constants alone, so that it runs on the host."""
    waiting, seen = [node], {node}
    while waiting:
        one = waiting.pop()
        if one.domain or one.op_type not in ARITHMETIC:
            return False
        values = [value for value in one.inputs if value is not None and not _is_constant(value)]
        producers = {value.producer() for value in values}
        if None in producers or (not values and one is node):
            return False
        new = {producer for producer in producers if producer is not None and producer.op_type not in _ROOTS} - seen
        seen |= new
        waiting += new
    return True


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    return value.is_initializer() or (producer is not None and producer.op_type == "Constant")


class _ToDevice:
    """Writes the nodes by which a value of the host gets to the device, behind the node that computes it; once each."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._made: dict[ir.Value, ir.Value | None] = {}
        self._constants: dict[tuple[object, ...], ir.Value] = {}

    def __call__(self, value: ir.Value) -> ir.Value | None:
        """The value on the device; None if there is no way."""
        if value not in self._made:
            self._made[value] = self._write(value)
        return self._made[value]

    def as_shape(self, node: ir.Node, i: int, value: ir.Value) -> None:
        """Gives a node that calls PyTorch an int64 scalar n as a tensor of shape (n, 0, 0), or (0, -n, 0) if it is negative."""
        if value.dtype != _INT64 or value.shape is None or value.shape.rank() != 0:
            return
        zero, first = self._constant(0, _INT64), self._constant([0], _INT64)
        parts = [self._after(value, "Max", value, zero)]
        parts.append(self._after(parts[0], "Max", self._after(value, "Neg", value), zero))
        parts = [self._after(part, "Unsqueeze", part, first) for part in parts]
        sizes = self._after(parts[1], "Concat", *parts, first, axis=0)
        fill = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.uint8)))
        made = self._after(sizes, "ConstantOfShape", sizes, attributes=[fill], dtype=ir.DataType.UINT8)
        made.shape = ir.Shape([None, None, 0])
        node.replace_input_with(i, made)
        for name, declared in (("input_tensor_types", int(ir.DataType.UINT8)), ("input_tensor_ranks", 3)):
            if name in node.attributes:  # a `TritonOp` declares nothing
                kept = list(node.attributes[name].as_ints())
                kept[i] = declared
                node.attributes[name] = ir.AttrInt64s(name, kept)

    def _write(self, value: ir.Value) -> ir.Value | None:
        shape, producer = value.shape, value.producer()
        if shape is None or value.dtype is None or shape.rank() > 1 or (shape.rank() == 1 and not isinstance(shape[0], int)):
            return None
        if producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None and producer.inputs[0].dtype == _INT64:
            before = self(producer.inputs[0])
            return None if before is None else self._cast(before, value.dtype, shape)
        if value.dtype == ir.DataType.BOOL:
            before = self(self._cast(value, _INT64, shape))
            return None if before is None else self._cast(before, ir.DataType.BOOL, shape)
        if value.dtype not in (_INT64, *_FLOATS):
            return None
        if shape.rank() == 0:
            first = self._constant([0], _INT64)
            row = self._element(value)
            made = self._after(row, "Squeeze", row, first)
        elif shape[0] == 0 or int(shape[0]) > _MOST:  # type: ignore[arg-type]
            return None
        else:
            count = int(shape[0])  # type: ignore[arg-type]
            rows: list[ir.Value] = []
            for k in range(count):
                place = rows[-1] if rows else value
                rows.append(self._element(self._after(place, "Gather", value, self._constant(k, _INT64), axis=0)))
            made = rows[0] if count == 1 else self._after(rows[-1], "Concat", *rows, axis=0)
        made.shape = ir.Shape(list(shape))
        return made

    def _element(self, number: ir.Value) -> ir.Value:
        """A number of the host as a vector of one element on the device."""
        assert number.dtype is not None
        if number.dtype == _INT64:
            step = self._constant(1, _INT64)
            limit = self._after(number, "Add", number, step)
            return self._after(limit, "Range", number, limit, step)
        one, half = self._constant(1.0, number.dtype), self._constant(0.5, number.dtype)
        step = self._after(number, "Add", self._after(number, "Abs", number), one)  # so wide that no rounding makes it two elements, or none
        part = self._after(step, "Mul", step, half)
        limit = self._after(part, "Add", number, part)
        return self._after(limit, "Range", number, limit, step)

    def _cast(self, value: ir.Value, dtype: ir.DataType, shape: ir.Shape) -> ir.Value:
        made = self._after(value, "Cast", value, dtype=dtype, to=int(dtype))
        made.shape = ir.Shape(list(shape))
        return made

    def _after(
        self, place: ir.Value, op_type: str, *inputs: ir.Value, dtype: ir.DataType | None = None, attributes: list[ir.Attr] | None = None, **ints: int
    ) -> ir.Value:
        """A node behind the one that computes `place`, which is the last of its inputs to be computed."""
        node = ir.Node("", op_type, inputs, [*(attributes or ()), *(ir.AttrInt64(name, number) for name, number in ints.items())])
        producer = place.producer()
        assert producer is not None
        self._graph.insert_after(producer, node)
        node.outputs[0].type = ir.TensorType(dtype or inputs[0].dtype)  # type: ignore[arg-type]
        return node.outputs[0]

    def _constant(self, number: object, dtype: ir.DataType) -> ir.Value:
        key = (str(number), dtype)
        if key not in self._constants:
            array = np.asarray(number, dtype.numpy())
            made = ir.Value(name=f"host_{len(self._constants)}_{dtype.name.lower()}", const_value=ir.tensor(array))
            made.type, made.shape = ir.TensorType(dtype), ir.Shape(array.shape)
            self._graph.register_initializer(made)
            self._constants[key] = made
        return self._constants[key]
