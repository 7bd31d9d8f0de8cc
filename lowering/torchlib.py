"""onnxscript's torch_lib as the second source of lowerings. The only file that touches it (read in onnxscript 0.7.2).

Importing it takes seconds, and what it registers is written for inference and for opset versions of its own: random operators draw from ONNX
Runtime's generator, `_native_batch_norm_legit_functional` normalises as in inference, `nll_loss_forward` counts one row,
`_scaled_dot_product_flash_attention_for_cpu` has no log-sum-exp, `_embedding_bag` brings the process down, `scatter_reduce` has another mean,
`sort` another order of ties, complex tensors another layout; `upsample_*` ignores scale factors, `angle` of integers takes 3 for pi,
`special_erfcx` is something else, `as_strided` reads out of bounds. So a list says which of its lowerings are used: each of them was compared with
PyTorch on ONNX Runtime (tests/lowering/test_torchlib.py), and whoever needs another one adds it there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.constants import constant
from ort_backend.lowering.dtypes import to_ir
from ort_backend.lowering.registry import Unsupported

aten = torch.ops.aten

_USED = {
    aten.histc.default: "aten::histc",
}

# What its functions raise for arguments that they do not express, and what the builder raises for the nodes that they would write.
_REFUSALS = (NotImplementedError, TypeError, ValueError)


def find(target: object) -> Callable[..., Any] | None:
    """torch_lib's lowering of an operator overload, if there is one that was checked."""
    if target not in _USED:
        return None
    importlib.import_module("onnxscript.function_libs.torch_lib.ops")
    registration = importlib.import_module("onnxscript.function_libs.torch_lib.registration")
    name = _USED[target]
    if name not in registration.default_registry or not registration.default_registry[name].overloads:
        return None
    return registration.default_registry[name].overloads[0]


def call(function: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a torch_lib lowering so that its nodes go where `op` writes.

    Raises:
        Unsupported: it refuses the arguments, or writes a node of unknown type.
    """
    evaluator = importlib.import_module("onnxscript.evaluator")
    try:
        with evaluator.default_as(_Writer(op)):
            results = function(*_typed(op, function, args), **_attributes(function, kwargs))
    except _REFUSALS as refusal:
        raise Unsupported(f"torch_lib: {type(refusal).__name__}: {refusal}") from refusal
    values = list(results) if isinstance(results, (tuple, list)) else [results]
    if any(not isinstance(value, ir.Value) or value.dtype is None for value in values):
        raise Unsupported("torch_lib wrote a value of unknown type")
    return results


class _Writer:
    """An onnxscript evaluator that writes what it is asked to evaluate."""

    def __init__(self, op: Any) -> None:
        self._op = op

    def eval_op(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        schema = op.op_schema
        if op.name == "Constant":
            return self._op.Constant(**{name: value for name, value in kwargs.items() if value is not None})
        attributes = {name: value for name, value in kwargs.items() if value is not None}
        count = attributes.get("num_outputs", len(schema.outputs)) if op.name == "Split" else len(schema.outputs)
        return self._op.builder.call_op(op.name, list(args), attributes, domain=schema.domain, version=self._op.version, outputs=count)

    def eval_function(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._op.call_inline(function, *args, **kwargs)


def _typed(op: Any, function: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments, with numbers that stand where a tensor does as constants of the tensors' dtype, and dtypes as ONNX counts them."""
    dtype = next((arg.dtype for arg in args if isinstance(arg, ir.Value)), None)
    parameters = function.op_signature.params
    return [_argument(op, arg, parameter, dtype) for arg, parameter in zip(args, parameters)]


def _argument(op: Any, arg: Any, parameter: Any, dtype: ir.DataType | None) -> Any:
    if isinstance(arg, torch.dtype):
        return int(to_ir(arg))
    if isinstance(parameter, ir.schemas.Parameter) and isinstance(arg, (int, float)) and dtype is not None:
        return constant(op, arg, dtype)
    return arg


def _attributes(function: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that the function knows: it has none for the device, the layout and the like."""
    known = {parameter.name for parameter in function.op_signature.params}
    return {name: int(to_ir(arg)) if isinstance(arg, torch.dtype) else arg for name, arg in kwargs.items() if name in known and arg is not None}
