"""Graph optimizers of ONNX Runtime that would break a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

import onnx_ir as ir

from ort_backend.runtime.capabilities import CPU_PROVIDER, MS, has_kernel, has_training
from ort_backend.target import ATEN, TRITON


def harmful_optimizers(model: ir.Model, provider: str = CPU_PROVIDER) -> list[str]:
    """Graph optimizers of ONNX Runtime that break this graph, by name, where the provider runs it.

    MatmulTransposeFusion makes a FusedMatMul of Transpose and MatMul, for which the CPU provider has no float64 kernel (1.19.2);
    and where a transposed tensor is multiplied by itself, it counts that product twice among the readers, and fails to remove a Transpose that
    something else reads (1.19.2).
    MatMulScaleFusion makes a factor of float64 an attribute, which is float32 (1.31.1), and forgets the dimensions that one has beyond those of the
    product (1.19.2).
    QuickGeluFusion likewise makes a QuickGelu of a product with a Sigmoid; and in bfloat16 where it has no kernel (CUDA, 1.19.2).
    NoopElimination drops sums and products with an empty constant, and with one the graph's output that it may be, or fails at it (1.19.2); and
    what only multiplies a tangent by 1, which leaves a tangent as the gradient, and `TrainingAgent` cannot fetch that (1.19.2).
    ConstantFolding turns a gradient that is constant into an initializer, which `TrainingAgent` cannot fetch (1.19.2); and it would keep
    large tensors of zeros (to which an embedding's gradient is added) for the life of the session; and it would call PyTorch once, while
    the session is made, and free memory that is torch's.
    FuseReluClip, which makes one Clip of a Relu and a Clip, knows no float64 (1.19.2).
    DivMulFusion, which makes a / b of a * (1 / b), crashes where a is a cast of bools (1.19.2).
    GatherToSliceFusion makes a Slice of a Gather of a Range. A range that falls to 0 ends at -1, the last element to a Slice, which then
    takes nothing (1.19.2, 1.31.1). For CUDA it writes the limits on the device, from which the Slice copies them.
    SkipLayerNormFusion makes a SkipLayerNormalization of a sum and its LayerNormalization, where nothing else reads the sum, as in front of a
    backward that computes it again; its CPU kernel leaves out the mean and the deviation, which that backward reads (1.19.2). It does so where
    several dimensions are normalized, too, and the kernel refuses that as it runs (CUDA, 1.31.1); and in bfloat16, which the operator does not
    take everywhere (1.19.2).
    CommonSubexpressionElimination lets the backward read a tensor that the forward hands out, and that the user may write to, where it would compute
    the same again (1.19.2).
    MatMulAddFusion puts what it makes of a product and a sum behind all other nodes: in a backward of its own the gradient that everything waits for
    comes last, and temporaries of all layers are there at once (1.32.0: 150 MB for 87).
    """
    nodes = list(model.graph.all_nodes())  # those in the bodies of loops, too
    products = [node.outputs[0] for node in nodes if node.op_type in ("MatMul", "FusedMatMul")]
    is_double = any(value.dtype == ir.DataType.DOUBLE for value in products)
    harmful = ["MatmulTransposeFusion"] if is_double or any(map(_is_square_of_transposed, products)) else []
    if is_double or any(map(_gets_dimensions, products)):
        harmful.append("MatMulScaleFusion")
    sigmoids = {node.outputs[0].dtype for node in nodes if node.op_type == "Sigmoid"}
    # A node of the operator alone does not tell that there is no kernel: it is a function, of which every step has one.
    if ir.DataType.DOUBLE in sigmoids or ir.DataType.BFLOAT16 in sigmoids and has_training():
        harmful.append("QuickGeluFusion")
    if any(node.op_type == "Clip" and node.outputs[0].dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16) for node in nodes):
        harmful.append("FuseReluClip")
    if any(node.op_type == "Div" for node in nodes):
        harmful.append("DivMulFusion")
    if any(node.op_type == "Range" for node in nodes):
        harmful.append("GatherToSliceFusion")
    varying = _varying(model)
    if _has_empty_constant(model, varying) or _hands_back_a_tangent(model):
        harmful.append("NoopElimination")
    if _has_large_fill(nodes) or _folds_too_much(model, varying):
        harmful.append("ConstantFolding")
    if _reads_statistics(nodes) or _has_layers_not_to_skip(nodes, provider):
        harmful.append("SkipLayerNormFusion")
    if ".backward" in str(model.graph.name):
        harmful.append("MatMulAddFusion")
    if _computes_again_what_is_handed_out(model):
        harmful.append("CommonSubexpressionElimination")
    return harmful


def _is_square_of_transposed(product: ir.Value) -> bool:
    """Whether both operands are one value that is transposed, or may come to be: the optimizers move a Transpose behind other movements."""
    node = product.producer()
    assert node is not None
    value, other = node.inputs[:2]
    made = value.producer() if value is other and value is not None else None
    while made is not None and made.op_type in _MOVEMENTS and made.op_type != "Transpose":
        value = made.inputs[0]
        made = value.producer() if value is not None else None
    return made is not None and made.op_type == "Transpose"


def _gets_dimensions(value: ir.Value) -> bool:
    """Whether it is multiplied with, or divided by, what has more dimensions."""
    others = [one for use in value.uses() if use.node.op_type in ("Mul", "Div") for one in use.node.inputs if one is not None]
    return any(one.shape is not None and (value.shape is None or one.shape.rank() > value.shape.rank()) for one in others)


def _reads_statistics(nodes: Sequence[ir.Node]) -> bool:
    """Whether something reads the mean or the deviation that a LayerNormalization has found."""
    found = [value for node in nodes if node.op_type == "LayerNormalization" for value in node.outputs[1:]]
    return any(value.uses() or value.is_graph_output() for value in found)


def _has_layers_not_to_skip(nodes: Sequence[ir.Node], provider: str) -> bool:
    """Whether a LayerNormalization is of several dimensions, or of a dtype in which there is no SkipLayerNormalization."""
    layers = [node for node in nodes if node.op_type == "LayerNormalization"]
    scales = [node.inputs[1] for node in layers if node.inputs[1] is not None]
    if any(scale.shape is None or scale.shape.rank() != 1 for scale in scales):
        return True
    unusual = {scale.dtype for scale in scales} - {ir.DataType.FLOAT, ir.DataType.FLOAT16, None}
    return not all(has_kernel(_skip_layer_norm(dtype), provider=provider, opset=18) for dtype in unusual if dtype is not None)


def _skip_layer_norm(dtype: ir.DataType) -> ir.Node:
    kind, size = ir.TensorType(dtype), ir.Shape([8])
    inputs = [ir.Value(name=name, type=kind, shape=size if name == "scale" else ir.Shape([1, 2, 8])) for name in ("x", "y", "scale")]
    return ir.Node(MS, "SkipLayerNormalization", inputs, outputs=[ir.Value(name="result", type=kind, shape=inputs[0].shape)], version=1)


_LARGE = 1 << 20  # elements


def _has_large_fill(nodes: Sequence[ir.Node]) -> bool:
    return any(shape.is_static() and math.prod(shape.numpy()) > _LARGE for shape in _fills(nodes))


def _has_empty_constant(model: ir.Model, varying: Set[ir.Value]) -> bool:
    """Whether there is arithmetic with a tensor without elements that depends on no input."""
    operands = (value for node in model.graph if node.op_type in _ARITHMETIC for value in node.inputs)
    return any(value is not None and value.shape is not None and 0 in value.shape and value not in varying for value in operands)


def _fills(nodes: Sequence[ir.Node]) -> Iterator[ir.Shape]:
    """The shapes of tensors that repeat a constant."""
    for node in nodes:
        repeats = node.op_type == "Expand" and node.inputs[0] is not None and node.inputs[0].const_value is not None
        if (repeats or node.op_type == "ConstantOfShape") and node.outputs[0].shape is not None:
            yield node.outputs[0].shape


def _varying(model: ir.Model) -> set[ir.Value]:
    """The values that depend on inputs, and on more than their shapes."""
    varying = set(model.graph.inputs)
    for node in model.graph:
        reads_values = node.op_type not in ("Shape", "Size") and not varying.isdisjoint(value for value in node.inputs if value is not None)
        if reads_values or node.op_type == "YieldOp":
            varying.update(node.outputs)
    return varying


def _folds_too_much(model: ir.Model, varying: Set[ir.Value]) -> bool:
    """Whether an output, or a node that calls PyTorch, depends on no input, or on the shape of one at most."""
    calls = (node for node in model.graph if node.op_type in (ATEN, TRITON, "PythonOp"))
    return any(value not in varying for value in model.graph.outputs) or any(node.outputs[0] not in varying for node in calls)


# What may turn out to do nothing, or to be undone.
_MOVEMENTS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast")
_ARITHMETIC = ("Mul", "Div", "Add", "Sub")


def _hands_back_a_tangent(model: ir.Model) -> bool:
    """Whether a gradient is a tangent but for movements and arithmetic with constants."""
    tangents = {value for node in model.graph if node.op_type == "YieldOp" for value in node.outputs}
    return bool(tangents) and any(_source(value) in tangents and value not in tangents for value in model.graph.outputs)


def _source(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None:
        inputs = node.inputs[:1] if node.op_type in _MOVEMENTS else node.inputs if node.op_type in _ARITHMETIC else ()
        varying = [one for one in inputs if one is not None and one.const_value is None]
        if len(varying) != 1:
            break
        value = varying[0]
    return value


def _computes_again_what_is_handed_out(model: ir.Model) -> bool:
    """Whether a node behind the `YieldOp` computes what one in front of it does whose result is handed out."""
    if not any(node.op_type == "YieldOp" for node in model.graph):
        return False
    numbers: dict[ir.Value, Any] = {}  # values that are computed alike have one number
    handed_out: set[Any] | None = None
    known: dict[Any, int] = {}
    for node in model.graph:
        given = tuple(_number(value, numbers) for value in node.inputs)
        if node.op_type == "YieldOp":
            handed_out = set(given)
        if node.op_type == "Identity":
            number = given[0]
        else:
            attributes = tuple(sorted((name, _content(attribute)) for name, attribute in node.attributes.items()))
            number = known.setdefault((node.domain, node.op_type, attributes, given), len(known))
        for i, value in enumerate(node.outputs):
            numbers[value] = number if i == 0 else (number, i)
        if handed_out is not None and node.op_type != "Identity" and any(numbers[value] in handed_out for value in node.outputs):
            return True
    return False


def _number(value: ir.Value | None, numbers: dict[ir.Value, Any]) -> Any:
    if value is None or value in numbers:
        return None if value is None else numbers[value]
    return f"of {value.name}" if value.const_value is None else _constant(value.const_value)


def _content(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        return _constant(attribute.as_tensor())
    return str(id(attribute.value)) if attribute.type == ir.AttributeType.GRAPH else repr(attribute.value)


def _constant(tensor: ir.TensorProtocol) -> str:
    is_small = tensor.nbytes <= 64
    return f"{tensor.dtype} {tensor.shape} {tensor.tobytes()!r}" if is_small else str(id(tensor))
