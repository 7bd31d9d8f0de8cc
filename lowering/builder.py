"""onnxscript's graph builder with a memory: a model repeats few kinds of nodes, and a second compile repeats all of them.

Of a node it asks ONNX for the schema, makes a signature of it, and lets ONNX infer dtypes and shapes through protobuf. That was nearly half of the
time of lowering a GPT. All are functions of what `_key` holds. (The overridden methods were read in onnxscript 0.7.2.)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import onnx_ir as ir

from ort_backend.lowering.lean_imports import GraphBuilder, param_manipulation

# Constants up to this size take part in inference (onnxscript's limit).
_SMALL = 20
_LIMIT = 1 << 14

_Inferred = tuple[tuple[ir.DataType | None, tuple[Any, ...] | None], ...]
_inferred: dict[Hashable, _Inferred] = {}
_signatures: dict[Hashable, Any] = {}
_schemas: dict[Hashable, Any] = {}


class Builder(GraphBuilder):
    """Writes nodes into a graph, for tensors on some kind of device, and works out what is known of their results.

    Attributes:
        hints: The examples of the symbolic sizes that were met, by name.
    """

    def __init__(self, graph: ir.Graph, device_type: str = "cpu", *, call_type: str = "PythonOp") -> None:
        super().__init__(graph)
        self.device_type = device_type
        self.call_type = call_type  # the type of the nodes that call PyTorch's kernels
        self.hints: dict[str, int] = {}

    def _get_schema(self, op_type: str, domain: str, version: int | None) -> Any:
        key = op_type, domain, version
        if key not in _schemas:
            _schemas[key] = super()._get_schema(op_type, domain, version)
        return _schemas[key]

    def _cast_attributes(self, schema: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        return {name: _attribute(name, value) for name, value in attributes.items()} if attributes else {}

    def _partition_inputs_attributes(self, schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        if schema is None:
            return args, kwargs
        operator = schema.name, schema.domain, schema.since_version
        if (signature := _signatures.get(operator)) is None:
            signature = _signatures[operator] = ir.schemas.OpSignature.from_op_schema(schema)
        return param_manipulation.separate_input_attributes_from_arguments(signature, list(args), kwargs, fill_defaults=False, allow_extra_args=False)

    def _infer_shapes(self, node: ir.Node) -> None:
        key = _key(node)
        if key is None:
            super()._infer_shapes(node)
        elif (known := _inferred.get(key)) is not None:
            for value, (dtype, shape) in zip(node.outputs, known, strict=True):
                value.type = None if dtype is None else ir.TensorType(dtype)
                value.shape = None if shape is None else ir.Shape(shape)
        else:
            super()._infer_shapes(node)
            if len(_inferred) < _LIMIT and all(value.type is None or isinstance(value.type, ir.TensorType) for value in node.outputs):
                _inferred[key] = tuple((value.dtype, None if value.shape is None else tuple(value.shape)) for value in node.outputs)


def _attribute(name: str, value: Any) -> Any:
    """An attribute of a usual kind; onnx_ir asks of every value whether it is a tensor first, which takes longer than all else about it."""
    kind = type(value)
    if kind is int:
        return ir.AttrInt64(name, value)
    if kind is float:
        return ir.AttrFloat32(name, value)
    if kind is list and value and all(type(one) is int for one in value):
        return ir.AttrInt64s(name, value)
    return value


def _key(node: ir.Node) -> Hashable | None:
    """All that inference looks at; None if something has no place in a key, or is known of the results already."""
    if any(value.type is not None or value.shape is not None for value in node.outputs):
        return None
    attributes = []
    for name, attribute in node.attributes.items():
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            value = _content(value)
        elif isinstance(value, (list, tuple)):
            value = tuple(value)
        if not isinstance(value, (int, float, str, tuple)) or value == ():
            return None
        attributes.append((name, attribute.type, value))
    inputs: list[Hashable] = []
    for source in node.inputs:
        if source is None:
            inputs.append(None)
            continue
        if not isinstance(source.type, ir.TensorType):
            return None
        constant = source.const_value
        content = None if constant is None or constant.size > _SMALL else _content(constant)
        inputs.append((source.dtype, None if source.shape is None else tuple(map(_dimension, source.shape)), content))
    return node.domain, node.op_type, node.version, len(node.outputs), tuple(attributes), tuple(inputs)


def _dimension(size: int | ir.SymbolicDim) -> int | str | None:
    return size if isinstance(size, int) else size.value


def _content(tensor: ir.TensorProtocol) -> Hashable:
    return tensor.dtype, tuple(tensor.shape), tensor.tobytes() if tensor.size <= _SMALL else ()
